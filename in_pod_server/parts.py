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


MEMORY_SHARE: Final = 8
"""A call's text is in memory up to five times on its way to a command, and the daemon has to outlive it
in a sandbox of any size."""


@dataclass(slots=True)
class Room:
    """What all connections of a daemon may hold together.

    Args:
        memory: bytes that the sandbox may take; None where there is no limit.
    """

    memory: int | None = None
    used: int = 0

    @property
    def limit(self) -> int:
        """In bytes."""
        if self.memory is None:
            return MAX_STAGED_BYTES
        return min(MAX_STAGED_BYTES, self.memory // MEMORY_SHARE)


@dataclass(slots=True)
class _Text:
    parts: dict[int, str] = field(default_factory=dict)
    encoded: int = 0
    width: int = 1
    size: int = 0
    """What it takes in memory, once it is joined: one wide character makes all of them wide."""

    def with_part(self, text: str) -> tuple[int, int, int]:
        """Return bytes as UTF-8, bytes a character, and size, if this part were added."""
        encoded = self.encoded + len(text.encode("utf-8", "surrogatepass"))
        width = max(self.width, _width(text))
        characters = sum(map(len, self.parts.values())) + len(text)
        return encoded, width, max(encoded, characters * width)


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
        kept = self._texts.setdefault(name, _Text())
        if number in kept.parts:
            raise _refused(request, f"part {number} is here already")
        encoded, width, size = kept.with_part(text)
        if self._room.used - kept.size + size > self._room.limit:
            self._pop(name)
            wide = f" (a character of this text takes {width})" if width > 1 else ""
            raise _refused(
                request,
                f"a sandbox of this memory takes at most {self._room.limit} bytes of arguments at a "
                f"time{wide}: upload it as a file (upload_file, or podpipe put), or wait until other "
                "calls have begun",
            )
        kept.parts[number] = text
        self._room.used += size - kept.size
        kept.encoded, kept.width, kept.size = encoded, width, size

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


def _width(text: str) -> int:
    """Return how many bytes a character of a text takes in memory."""
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return 2 if len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text) else 4
    return 1


def _refused(request: JSONRPCRequest, why: str) -> Refused:
    return Refused(error(request.id, INVALID_PARAMS, why))
