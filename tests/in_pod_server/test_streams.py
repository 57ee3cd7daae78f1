"""Streams: what is written together goes out together, in order and whole."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer

from in_pod_server.connection import Connection
from in_pod_server.streams import PIECE_BYTES, Streams, Together
from tests.in_pod_server.support import INITIALIZE, PATIENCE


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


async def test_a_reader_that_takes_nothing_is_given_up_and_a_slow_one_is_not() -> None:
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    streams = await Streams.opened(os.fdopen(ours_in, "rb", 0), os.fdopen(ours_out, "wb", 0))
    streams.together.write(b"x" * 1_000_000)
    closing = asyncio.ensure_future(streams.aclose(stall=1.0))
    taken = 0
    for _ in range(4):
        await asyncio.wait([closing], timeout=0.6)
        taken += len(os.read(theirs_in, 65536))
    assert not closing.done(), "it went on taking, for longer than it may take nothing"
    await asyncio.wait([closing], timeout=30)
    assert closing.done()
    assert taken < 1_000_000
    os.close(theirs_in)
    os.close(theirs_out)


async def test_calls_of_a_client_that_was_killed_before_it_read_hold_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stdin has ended, and whatever it was killed beside keeps the other end open."""
    monkeypatch.setattr("in_pod_server.connection.STALL_SECONDS", 0.5)
    server = MCPServer[None]("test", log_level="ERROR")

    @server.tool()
    async def much() -> str:
        return "x" * 300_000

    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    streams = await Streams.opened(os.fdopen(ours_in, "rb", 0), os.fdopen(ours_out, "wb", 0))
    connection = Connection(streams, max_message_bytes=1_000_000)
    asked: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": INITIALIZE},
        {"method": "notifications/initialized"},
        *({"id": n, "method": "tools/call", "params": {"name": "much"}} for n in range(1, 20)),
    ]
    with os.fdopen(theirs_out, "wb") as pipe:
        for message in asked:
            pipe.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    with anyio.fail_after(PATIENCE):
        await connection.serve(server, experimental={})
    await streams.aclose()
    os.close(theirs_in)
