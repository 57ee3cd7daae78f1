"""Arguments in parts, as any client might send them to the daemon."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.types import JSONRPCRequest

from in_pod_server.contract import MAX_STAGED_BYTES, META_PARTS, METHOD_PART, METHOD_PARTS_DROPPED
from in_pod_server.framing import Refused
from in_pod_server.parts import Parts, Room
from tests.in_pod_server.support import Daemon, Wire

PIECE = "x" * (1 << 20)


def part(wire: Wire, text: str, *, name: str = "a", number: int = 0) -> dict[str, Any]:
    return wire.request(1, METHOD_PART, {"id": name, "number": number, "text": text})


def call(wire: Wire, **named: Any) -> dict[str, Any]:
    params = {
        "name": "run_command",
        "arguments": {"command": "cat"},
        "_meta": {META_PARTS: named},
    }
    return wire.request(2, "tools/call", params)


def fill(wire: Wire) -> int:
    """Send parts until no more are taken; how many were."""
    for number in range(MAX_STAGED_BYTES // len(PIECE) + 1):
        if "error" in part(wire, PIECE, number=number):
            return number
    raise AssertionError("there was no end to the room")


def test_parts_in_any_order_are_one_argument(wire: Wire) -> None:
    for number, text in ((2, "c\n"), (0, "é"), (1, "\\b\U0001f600")):
        assert part(wire, text, number=number)["result"] == {}
    ran = call(wire, stdin={"id": "a", "count": 3})
    assert ran["result"]["structuredContent"]["stdout"] == "é\\b\U0001f600c\n"
    assert "no parts are here" in call(wire, stdin={"id": "a", "count": 3})["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"id": 1, "number": 0, "text": ""},
        {"id": "a", "number": -1, "text": ""},
        {"id": "a", "number": 0, "text": 1},
    ],
)
def test_what_is_no_part_is_refused_and_the_session_lives_on(
    wire: Wire, params: dict[str, Any]
) -> None:
    assert "a part needs" in wire.request(1, METHOD_PART, params)["error"]["message"]
    assert wire.request(2, "ping")["result"] == {}


@pytest.mark.parametrize(
    "named", [{"stdin": {"id": "c", "count": 2}}, {"stdin": {"id": "b", "count": 1}}, {"stdin": 1}]
)
def test_a_call_that_names_what_is_not_there_does_not_begin(
    wire: Wire, named: dict[str, Any]
) -> None:
    before = wire.call(3, "list_processes")["structuredContent"]["total"]
    part(wire, "text", name="c")
    assert "part" in call(wire, **named)["error"]["message"]
    assert wire.call(3, "list_processes")["structuredContent"]["total"] == before


def test_a_part_that_is_there_already_is_refused(wire: Wire) -> None:
    part(wire, "text")
    assert "here already" in part(wire, "other")["error"]["message"]


def test_room_is_bounded_and_shared_and_comes_back(daemon: Daemon, wire: Wire) -> None:
    """By a call, by what is given up, by a refusal, and by the end of a connection."""
    with Wire(daemon.socket) as other:
        # What is refused lets go of all that came before it.
        assert fill(wire) == MAX_STAGED_BYTES // len(PIECE)
        for number in range(MAX_STAGED_BYTES // len(PIECE)):
            assert "result" in part(other, PIECE, name="b", number=number)
        assert "at most" in part(wire, PIECE)["error"]["message"]
        other.send(
            {"jsonrpc": "2.0", "method": METHOD_PARTS_DROPPED, "params": {"ids": ["b", "none"]}}
        )
        assert "result" in part(other, PIECE, name="c")
        assert other.request(3, "ping")["result"] == {}
    for number in range(MAX_STAGED_BYTES // len(PIECE)):
        assert "result" in part(wire, PIECE, name="d", number=number)
    ran = wire.request(
        4,
        "tools/call",
        {
            "name": "run_command",
            "arguments": {"command": "wc -c"},
            "_meta": {META_PARTS: {"stdin": {"id": "d", "count": 64}}},
        },
    )
    assert ran["result"]["structuredContent"]["stdout"] == f"{MAX_STAGED_BYTES}\n"
    assert fill(wire) == MAX_STAGED_BYTES // len(PIECE)


@pytest.mark.parametrize(
    ("memory", "piece", "taken"),
    [
        (None, "x", 64),
        (1 << 30, "x", 64),
        (256 << 20, "x", 32),
        (256 << 20, "é", 16),  # two bytes on the way to the command
        (256 << 20, "x" * 999 + "語", 16),
        (256 << 20, "x" * 999 + "\U0001f600", 8),  # four in memory, each of them
    ],
)
def test_a_small_sandbox_takes_what_its_memory_has_room_for(
    memory: int | None, piece: str, taken: int
) -> None:
    parts, text = Parts(Room(memory)), piece * ((1 << 20) // len(piece))

    def take(number: int) -> None:
        params = {"id": "a", "number": number, "text": text}
        parts.take(JSONRPCRequest(jsonrpc="2.0", id=1, method=METHOD_PART, params=params))

    def take_all(numbers: range) -> None:
        for number in numbers:
            take(number)

    take_all(range(taken))
    with pytest.raises(Refused) as refused:
        take_all(range(taken, taken + 2))  # a piece may be a little less than a mebibyte
    assert "of this memory" in refused.value.reply.error.message
    take(0)  # what was refused is let go of
