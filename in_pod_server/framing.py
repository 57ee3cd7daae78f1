"""Newline-delimited JSON-RPC: bytes to messages and back. Pure, linear in time, bounded in memory.

The SDK's own framing drops a line it cannot parse, so that its caller waits for ever, and dies of a
lone surrogate in a result. Here every such line becomes an error reply, and every message can be
written. Who reads and writes the bytes is `connection`'s business.
"""

from __future__ import annotations

import json
import re
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

from in_pod_server.lines import Overlong

_SURROGATE = re.compile("[\ud800-\udfff]")


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
    return error(
        line.id,
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
