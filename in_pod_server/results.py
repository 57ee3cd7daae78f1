"""What every tool returns: text that is enough for a reader, and data that is enough for a program.

Some clients show the model only the one, some only the other, so neither may lack anything.
"""

from __future__ import annotations

from typing import Any, Final

from mcp.types import CallToolResult, TextContent

REPLY_BYTES: Final = 400_000
"""How much of a reply the content may take, in its JSON form. It is in the reply twice, as text and
as data, and the whole stays below MAX_MESSAGE_BYTES."""


def result(*text: str, **data: Any) -> CallToolResult:
    """Return text blocks (empty ones are left out) and the same as data."""
    blocks = [TextContent(type="text", text=block) for block in text if block]
    return CallToolResult(content=list(blocks), structured_content=data)
