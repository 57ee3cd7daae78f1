"""Framing: any chunks give the same lines; every bad line has its answer; anything can be written."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.types import JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from in_pod_server.framing import Refused, encode, error, parse
from in_pod_server.lines import LineBuffer, Overlong

LIMIT = 1 << 20


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b""))),
    st.lists(st.integers(0, 400)),
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines: list[bytes], cuts: list[int]) -> None:
    buffer = LineBuffer(32)
    stream = b"".join(line + b"\n" for line in lines)
    got = [line for chunk in cut(stream, cuts) for line in buffer.feed(chunk)]
    assert len(got) == len(lines)
    for expected, line in zip(lines, got, strict=True):
        if len(expected) <= 32:
            assert line == expected
        else:
            assert line == Overlong(len(expected), expected, expected)


def test_a_line_over_the_limit_keeps_its_ends_only_and_the_next_is_whole() -> None:
    buffer = LineBuffer(10_000)
    body = b"a" * 5000 + b"b" * 50_000 + b"c" * 5000
    got = [
        line
        for start in range(0, len(body), 777)
        for line in buffer.feed(body[start : start + 777])
    ]
    assert got == []
    overlong, following = buffer.feed(b"\nnext\n")
    assert overlong == Overlong(60_000, b"a" * 4096, b"c" * 4096)
    assert following == b"next"


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    def seconds(size: int) -> float:
        buffer = LineBuffer(1 << 30)
        start = time.process_time()
        for _ in range(size // 64):
            buffer.feed(b"x" * 64)
        assert len(buffer.feed(b"\n")) == 1
        return time.process_time() - start

    small, large = min(seconds(1 << 19) for _ in range(3)), min(seconds(1 << 22) for _ in range(3))
    assert large < small * 8 * 4, "quadratic would be 64 times"


@pytest.mark.parametrize(
    ("line", "request_id", "code"),
    [
        (b"garbage", None, -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":', None, -32700),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"x":"\xff\xfe"}}', 7, -32700),
        (b'{"jsonrpc":"2.0","id":"a","method":"ping","params":{"x":"\\ud800"}}', "a", -32700),
        (b'{"jsonrpc":"2.0","id":8}', 8, -32600),
        (b'{"id":9,"method":"ping"}', 9, -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', None, -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', None, -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', None, -32600),
        (b"null", None, -32600),
        (b"[" * 100_000, None, -32700),
        (b"\x00", None, -32700),
    ],
)
def test_every_line_that_is_no_message_has_an_answer(
    line: bytes, request_id: int | str | None, code: int
) -> None:
    with pytest.raises(Refused) as refused:
        parse(line, LIMIT)
    assert refused.value.reply.id == request_id
    assert refused.value.reply.error.code == code


@pytest.mark.parametrize(
    ("line", "request_id"),
    [
        (b'{"jsonrpc":"2.0","id":5,"method":"x","params":"%s"}', 5),
        (b'{"method":"x","id":"q-1","params":"%s"}', "q-1"),
        (b'{"method":"x","params":{"id":3,"a":"%s"},"jsonrpc":"2.0","id":6}', 6),
        (b'{"method":"x","params":{"a":"%s","id":3},"id":6,"jsonrpc":"2.0"}', 6),
        (b'{"method":"x","params":{"id":3,"a":"%s","id":4}}', None),
    ],
)
def test_the_id_of_an_overlong_request_is_found_at_either_end(
    line: bytes, request_id: int | str | None
) -> None:
    (overlong,) = LineBuffer(100).feed(line % (b"x" * 20_000) + b"\n")
    with pytest.raises(Refused) as refused:
        parse(overlong, 100)
    assert refused.value.reply.id == request_id
    assert "the limit is 100" in refused.value.reply.error.message


def test_a_good_message_is_read() -> None:
    message = parse(b'{"jsonrpc":"2.0","id":1,"method":"ping"}', LIMIT)
    assert isinstance(message, JSONRPCRequest)
    assert message.method == "ping"
    note = parse(b'{"jsonrpc":"2.0","method":"n","params":{"id":1}}', LIMIT)
    assert isinstance(note, JSONRPCNotification)


@given(st.recursive(st.none() | st.text(st.characters()), lambda inner: st.lists(inner)))
def test_whatever_text_a_result_holds_can_be_written(value: object) -> None:
    line = encode(JSONRPCResponse(jsonrpc="2.0", id=1, result={"v": value}), LIMIT)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line).__str__().encode()  # no lone surrogate is left, and it is UTF-8


def test_a_lone_surrogate_is_shown_as_its_escape() -> None:
    line = encode(JSONRPCResponse(jsonrpc="2.0", id=1, result={"\udcff": "a\ud800é\u2028"}), LIMIT)
    assert json.loads(line)["result"] == {"\\udcff": "a\\ud800é\u2028"}


def test_a_reply_that_cannot_be_written_or_is_too_long_becomes_an_error_reply() -> None:
    for result in ({"v": float("nan")}, {"v": object()}, {"v": "x" * 2000}):
        reply = json.loads(encode(JSONRPCResponse(jsonrpc="2.0", id=3, result=result), 1000))
        assert reply["id"] == 3
        assert reply["error"]["code"] == -32603


def test_notifications_and_errors_are_written_without_nulls() -> None:
    note = encode(JSONRPCNotification(jsonrpc="2.0", method="m"), LIMIT)
    assert json.loads(note) == {"jsonrpc": "2.0", "method": "m"}
    assert json.loads(encode(error(None, -1, "x"), LIMIT)) == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -1, "message": "x"},
    }
