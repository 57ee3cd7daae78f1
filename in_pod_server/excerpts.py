"""As much of a command's output as a reply takes: whole, or its start and its end with a note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from in_pod_server.process import Process
from in_pod_server.results import REPLY_BYTES
from in_pod_server.text import decode, json_size

_CONTINUATION: Final = bytes(range(0x80, 0xC0))
"""What a UTF-8 character goes on with: an excerpt does not begin inside one."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What is shown of one stream, and whether that is not all."""

    text: str
    cut: bool


def excerpts(process: Process) -> tuple[Excerpt, Excerpt]:
    """Share a reply's room between both streams; one may use what the other does not."""
    half = REPLY_BYTES // 2
    stdout = _excerpt(process, "stdout", half)
    stderr = _excerpt(process, "stderr", REPLY_BYTES - min(json_size(stdout.text), half))
    if stdout.cut:
        stdout = _excerpt(process, "stdout", REPLY_BYTES - min(json_size(stderr.text), half))
    return stdout, stderr


def _excerpt(process: Process, stream: Literal["stdout", "stderr"], limit: int) -> Excerpt:
    """Return a stream whole, or its start and its end and how to read what lies between."""
    output = process.stdout if stream == "stdout" else process.stderr
    total = output.total
    if total <= limit and not output.dropped:
        text = decode(output.read(0, total).data, final=True).text
        if json_size(text) <= limit:
            return Excerpt(text, cut=False)
    room = limit
    while True:
        head = output.read(0, room // 3)
        first = decode(head.data, final=False)
        tail = output.read(max(total - room // 2, first.used), room // 2)
        data = tail.data.lstrip(_CONTINUATION) if len(tail.data) > 4 else tail.data
        start = tail.end - len(data)
        note = (
            f"\n[... {start - first.used} bytes left out here; read_output(process_id={process.id!r}, "
            f"stream={stream!r}, cursor={first.used}) reads what is kept of them ...]\n"
        )
        text = first.text + note + decode(data, final=True).text
        size = json_size(text)
        if size <= limit:
            return Excerpt(text, cut=True)
        room = min(room * limit // size, room - room // 16)
