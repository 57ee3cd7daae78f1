"""Arguments that came in parts: texts too long for one message, until the call that names them.

A host sends numbered parts, each answered, and then the call, whose `_meta` says which argument is
which text. The call itself stays one message, so that it begins once or not at all. What no call
names goes with its connection, or when the host says that it gave the call up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from mcp.types import (
    INVALID_PARAMS,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from in_pod_server.contract import (
    MAX_STAGED_BYTES,
    META_PARTS,
    METHOD_PART,
    METHOD_PARTS_DROPPED,
)
from in_pod_server.framing import Refused, error

PARTS_OF_A_CALL: Final = 16
"""Texts that one call may take from parts: more than any tool has arguments."""


@dataclass(slots=True)
class Room:
    """What all connections of a daemon may hold together.

    Args:
        limit: bytes.
    """

    limit: int = MAX_STAGED_BYTES
    used: int = 0


@dataclass(slots=True)
class _Text:
    parts: dict[int, str] = field(default_factory=dict)
    size: int = 0


class Parts:
    """The unfinished texts of one connection.

    Args:
        room: shared with the daemon's other connections.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._texts: dict[str, _Text] = {}

    def take(self, message: JSONRPCMessage) -> tuple[JSONRPCMessage | None, JSONRPCResponse | None]:
        """Keep a part, or give a call the texts that it names.

        Returns:
            The message if it is for somebody else too, and what is to be answered at once.

        Raises:
            Refused: there is no room for the part, or the call names what is not wholly here.
        """
        match message:
            case JSONRPCRequest(method=method) if method == METHOD_PART:
                self._keep(message)
                return None, JSONRPCResponse(jsonrpc="2.0", id=message.id, result={})
            case JSONRPCNotification(method=method) if method == METHOD_PARTS_DROPPED:
                for name in (message.params or {}).get("ids", []):
                    self._pop(str(name))
                return None, None
            case JSONRPCRequest(method="tools/call"):
                self._fill(message)
        return message, None

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._texts):
            self._pop(name)

    def _keep(self, request: JSONRPCRequest) -> None:
        match request.params:
            case {"id": str(name), "number": int(number), "text": str(text)} if number >= 0:
                pass
            case _:
                raise _refused(request, "a part needs id, number and text")
        size = len(text.encode("utf-8", "surrogatepass"))
        if self._room.used + size > self._room.limit:
            self._pop(name)
            raise _refused(
                request,
                f"a sandbox takes at most {self._room.limit} bytes of arguments at a time: upload it "
                "as a file (upload_file, or podpipe put), or wait until other calls have begun",
            )
        kept = self._texts.setdefault(name, _Text())
        if number in kept.parts:
            raise _refused(request, f"part {number} is here already")
        kept.parts[number] = text
        kept.size += size
        self._room.used += size

    def _fill(self, request: JSONRPCRequest) -> None:
        params: dict[str, Any] = request.params or {}
        meta = params.get("_meta")
        named = meta.get(META_PARTS) if isinstance(meta, dict) else None
        if not isinstance(named, dict):
            return
        arguments = params.get("arguments")
        if not isinstance(arguments, dict) or len(named) > PARTS_OF_A_CALL:
            raise _refused(request, "a call whose arguments came in parts names them otherwise")
        for argument, what in named.items():
            match what:
                case {"id": str(name), "count": int(count)} if name in self._texts:
                    parts = self._pop(name).parts
                case _:
                    raise _refused(request, f"no parts are here for argument {argument!r}")
            if sorted(parts) != list(range(count)):
                raise _refused(request, f"argument {argument!r} lacks some of its parts")
            arguments[argument] = "".join(parts[number] for number in range(count))

    def _pop(self, name: str) -> _Text:
        text = self._texts.pop(name, _Text())
        self._room.used -= text.size
        return text


def _refused(request: JSONRPCRequest, why: str) -> Refused:
    return Refused(error(request.id, INVALID_PARAMS, why))
