"""Streams: what is written together goes out together, in order and whole."""

from __future__ import annotations

import asyncio
import os

from in_pod_server.streams import PIECE_BYTES, Streams, Together


async def a_turn() -> None:
    """Let what was due in this turn of the loop happen."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_first_goes_at_once_and_the_rest_of_the_turn_in_one_piece() -> None:
    pieces: list[bytes] = []
    together = Together(pieces.append)
    for number in range(5):
        together.write(b"%d\n" % number)
    assert pieces == [b"0\n"]
    await a_turn()
    assert pieces == [b"0\n", b"1\n2\n3\n4\n"]
    together.write(b"5\n")
    assert pieces[-1] == b"5\n", "nothing was being written, so nothing is waited for"


async def test_what_is_large_does_not_wait() -> None:
    pieces: list[bytes] = []
    together = Together(pieces.append)
    data = [bytes([number]) * (PIECE_BYTES // 2) for number in range(6)]
    for each in data:
        together.write(each)
    assert sum(map(len, pieces)) >= 5 * PIECE_BYTES // 2
    await a_turn()
    assert b"".join(pieces) == b"".join(data)


async def test_what_waits_is_written_before_the_streams_close() -> None:
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    streams = await Streams.opened(os.fdopen(ours_in, "rb", 0), os.fdopen(ours_out, "wb", 0))
    lines = [b"%d\n" % number for number in range(100)]
    for line in lines:
        streams.together.write(line)
    await streams.aclose()
    with os.fdopen(theirs_in, "rb") as reader:
        assert reader.read() == b"".join(lines)
    os.close(theirs_out)


async def test_a_reader_that_went_away_ends_the_other_end_too() -> None:
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    streams = await Streams.opened(os.fdopen(ours_in, "rb", 0), os.fdopen(ours_out, "wb", 0))
    os.close(theirs_in)
    assert await streams.reader.read() == b"", "though its writer is still there"
    await streams.aclose()
    os.close(theirs_out)
