"""Newline-delimited JSON-RPC: bytes to messages and back. Pure, linear in time, bounded in memory.

The SDK's own framing drops a line it cannot parse, so that its caller waits for ever, and dies of a
lone surrogate in a result. Here every such line becomes an error reply, and every message can be
written. Who reads and writes the bytes is `connection`'s business.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mcp.types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

KEPT_OF_OVERLONG = 4096
"""How much of either end of an over-long line is kept, to find the request's id in it."""

_ID = rb'"id"\s*:\s*(-?[0-9]{1,18}|"[^"\\]{1,256}")'
_ID_FIRST = re.compile(
    rb'\s*\{\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*' + _ID + rb"\s*[,}]"
)
_ID_LAST = re.compile(
    rb',\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?'
    + _ID
    + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z'
)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Overlong:
    """A line that was longer than allowed: how long, and its two ends."""

    size: int
    head: bytes
    tail: bytes


class LineBuffer:
    """Cut a byte stream into lines of at most `limit` bytes, whatever the chunks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()
        self._tail = bytearray()
        self._size = 0

    def feed(self, data: bytes) -> list[bytes | Overlong]:
        """Take the next bytes; return the lines that they complete, without newlines."""
        lines: list[bytes | Overlong] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._push(data[start:end])
            lines.append(self._take())
            start = end + 1
        self._push(data[start:])
        return lines

    def _push(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._limit:
            self._line += piece
            return
        if not self._tail:
            self._tail += self._line[-KEPT_OF_OVERLONG:]
            self._line += piece[:KEPT_OF_OVERLONG]
            del self._line[KEPT_OF_OVERLONG:]
        self._tail += piece[-KEPT_OF_OVERLONG:]
        del self._tail[:-KEPT_OF_OVERLONG]

    def _take(self) -> bytes | Overlong:
        line: bytes | Overlong
        if self._size <= self._limit:
            line = bytes(self._line)
        else:
            line = Overlong(self._size, bytes(self._line), bytes(self._tail))
        self._line.clear()
        self._tail.clear()
        self._size = 0
        return line


class Refused(Exception):
    """A line that is no message; `reply` is what to answer."""

    def __init__(self, reply: JSONRPCError) -> None:
        super().__init__(reply.error.message)
        self.reply = reply


def parse(line: bytes | Overlong, limit: int) -> JSONRPCMessage:
    """Read one line.

    Raises:
        Refused: The line is no JSON-RPC message, or was too long to read.
    """
    if isinstance(line, Overlong):
        raise Refused(_too_long(line, limit))
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        pass
    else:
        # An id that no request may have (null, 1.5, true) would make a notification of it.
        if not (isinstance(message, JSONRPCNotification) and b'"id"' in line):
            return message
        if "id" not in json.loads(line):
            return message
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise Refused(error(None, PARSE_ERROR, "Parse error: the line is not JSON")) from None
    if _has_lone_surrogate(line):
        reason = "Parse error: the message is not Unicode (invalid UTF-8 or a lone surrogate)"
        raise Refused(error(_id_of(value), PARSE_ERROR, reason))
    reason = "Invalid Request: the line is not a JSON-RPC 2.0 message"
    raise Refused(error(_id_of(value), INVALID_REQUEST, reason))


def _too_long(line: Overlong, limit: int) -> JSONRPCError:
    found = _ID_FIRST.match(line.head) or _ID_LAST.search(line.tail)
    return error(
        json.loads(found[1].decode("utf-8", "replace")) if found else None,
        INVALID_REQUEST,
        f"The message has {line.size} bytes, the limit is {limit}: send the content in smaller parts",
    )


def error(request_id: RequestId | None, code: int, message: str) -> JSONRPCError:
    """Return a JSON-RPC error reply."""
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=message))


def encode(message: JSONRPCMessage, limit: int) -> bytes:
    """Write one line. What cannot be written, or is too long, becomes an error reply instead."""
    reply_to = message.id if isinstance(message, (JSONRPCResponse, JSONRPCError)) else None
    try:
        line = _dump(_members(message))
    except (TypeError, ValueError, RecursionError) as exc:
        reason = f"The reply could not be written as JSON ({type(exc).__name__})"
        return _dump(_members(error(reply_to, INTERNAL_ERROR, reason)))
    if len(line) > limit:
        reason = f"The reply has {len(line)} bytes, the limit is {limit}: ask for less at a time"
        return _dump(_members(error(reply_to, INTERNAL_ERROR, reason)))
    return line


def _members(message: JSONRPCMessage) -> dict[str, Any]:
    match message:
        case JSONRPCResponse():
            return {"jsonrpc": "2.0", "id": message.id, "result": message.result}
        case JSONRPCError():
            return {
                "jsonrpc": "2.0",
                "id": message.id,
                "error": message.error.model_dump(by_alias=True, exclude_unset=True),
            }
        case JSONRPCRequest() | JSONRPCNotification():
            return message.model_dump(by_alias=True, exclude_unset=True)


def _dump(members: dict[str, Any]) -> bytes:
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # Only inside strings, and doubled: the reader sees the six characters, not a surrogate.
        return _SURROGATE.sub(lambda m: f"\\\\u{ord(m[0]):04x}", text).encode() + b"\n"


def _id_of(value: object) -> RequestId | None:
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) or type(found) is int else None


def _has_lone_surrogate(line: bytes) -> bool:
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return True
    return False
