"""Arguments that several tools take, and how their values are read."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import Field

from in_pod_server.errors import ArgumentError

HomePath = Annotated[
    str,
    Field(
        min_length=1,
        description="Relative to the home, or absolute under it. Bytes that are not UTF-8: \\xNN.",
    ),
]

ProcessId = Annotated[
    str, Field(description="The process_id that run_command or start_background gave.")
]


def to_bytes(content: str, encoding: Literal["text", "base64"], *, name: str) -> bytes:
    """Return the bytes that an argument stands for.

    Raises:
        ArgumentError: It is no base64, or no Unicode text.
    """
    if encoding == "base64":
        try:
            # In lines, as base64(1) writes it, it is base64 all the same; words are not.
            joined = content.replace("\r", "").replace("\n", "")
            return base64.b64decode(joined, validate=True)
        except ValueError as exc:
            reason = f"{name} is not base64 ({exc}): send text with encoding=text"
            raise ArgumentError(reason) from None
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} is not Unicode text: send it with encoding=base64") from None
