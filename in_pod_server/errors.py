"""Failures that a caller is meant to read: what happened, to what, and what to do next.

All are `ToolError`, so that their text reaches the model. Anything else that a tool raises is a
fault of ours and is reported as such by `server`.
"""

from __future__ import annotations

from typing import Final

from mcp.server.mcpserver.exceptions import ToolError

from in_pod_server.contract import MAX_ERROR_CHARS

SHOWN_CHARS: Final = 300
"""How much of a path, or of another's words, an error repeats."""


class ArgumentError(ToolError):
    """An argument is of the right type but cannot be used."""


class PathRefusedError(ToolError):
    """A path leads outside the home, or is no usable path at all."""


class FileFailedError(ToolError):
    """A file operation did not happen; what was there before still is."""


class StartFailedError(ToolError):
    """A command could not be started."""


class NoSuchProcessError(ToolError):
    """No command of that process id is known."""


class InputRefusedError(ToolError):
    """A command takes no input, or no more."""


class GatewayFailedError(ToolError):
    """Apps cannot be published as things are."""


def readable(error: ToolError) -> ToolError:
    """Return the error, or one of its kind whose text is not too long for a reader."""
    text = str(error)
    if len(text) <= MAX_ERROR_CHARS:
        return error
    half = MAX_ERROR_CHARS // 2
    left_out = len(text) - 2 * half
    return type(error)(f"{text[:half]} [... {left_out} characters ...] {text[-half:]}")


def short(text: str) -> str:
    """Return text as an error shows it."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
