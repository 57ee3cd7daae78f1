"""Output and text: nothing is lost silently, at any cursor, for any chunks."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_pod_server import output
from in_pod_server.output import Output, OutputBuffer, OutputFile
from in_pod_server.text import decode, decode_within, json_size, name_to_bytes, name_to_text


def follow(stream: Output, step: int) -> tuple[bytes, int]:
    """Read a stream from the start by its own cursors; return the bytes and how many were dropped."""
    data, dropped, cursor = b"", 0, 0
    while True:
        piece = stream.read(cursor, step)
        assert piece.start == cursor + piece.dropped
        data += piece.data
        dropped += piece.dropped
        if not piece.data:
            return data, dropped
        cursor = piece.end


@given(st.lists(st.binary(max_size=64)), st.integers(1, 40), st.integers(0, 40), st.integers(1, 40))
def test_cursor_reads_give_the_input_minus_what_is_said_to_be_dropped(
    chunks: list[bytes], step: int, head: int, tail: int
) -> None:
    buffer = OutputBuffer(head, tail)
    for chunk in chunks:
        buffer.append(chunk)
    whole = b"".join(chunks)
    data, dropped = follow(buffer, step)
    assert buffer.total == len(whole)
    assert dropped == buffer.dropped
    assert data == whole[: min(head, len(whole))] + whole[min(head, len(whole)) + dropped :]
    assert buffer.kept <= head + 2 * tail + 64


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_a_reader_who_follows_live_sees_every_byte(data: bytes, cuts: list[int]) -> None:
    buffer, seen, cursor = OutputBuffer(16, 200), b"", 0
    edges = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(edges):
        buffer.append(data[start:end])
        piece = buffer.read(cursor, 1000)
        while piece.data:
            seen, cursor = seen + piece.data, piece.end
            piece = buffer.read(cursor, 1000)
    assert seen == data


@given(st.binary(min_size=17, max_size=60), st.integers(0, 70), st.integers(1, 70))
def test_one_read_gives_all_that_it_may_where_nothing_was_dropped(
    data: bytes, cursor: int, most: int
) -> None:
    """What looks for a pattern reads once: it missed what began in the one half and not the other."""
    buffer = OutputBuffer(16, 60)
    buffer.append(data)
    assert buffer.read(cursor, most).data == data[cursor : cursor + most]


def test_released_output_is_counted_as_dropped() -> None:
    buffer = OutputBuffer()
    buffer.append(b"abc")
    buffer.release()
    assert (buffer.total, buffer.dropped) == (3, 3)
    assert buffer.read(0, 10) == output.Slice(b"", 3, 3)
    buffer.append(b"def")
    assert buffer.read(0, 10) == output.Slice(b"def", 3, 3)


def test_a_log_that_grows_too_long_loses_its_middle_and_no_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOG_BYTES", 64), ("LOG_HEAD_BYTES", 8), ("LOG_TAIL_BYTES", 16)):
        monkeypatch.setattr(output, name, value * 4096)
    path = tmp_path / "log"
    path.write_bytes(b"before\n" * 100)
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    log = OutputFile(fd)
    written = os.urandom(100 * 4096)
    os.write(fd, written)
    assert follow(log, 10_000) == (written, 0)
    log.trim()
    more = os.urandom(4096)
    os.write(fd, more)
    data, dropped = follow(log, 10_000)
    assert dropped == log.dropped == 76 * 4096
    assert data == written[: 8 * 4096] + written[84 * 4096 :] + more
    assert log.total == 101 * 4096
    assert path.stat().st_blocks * 512 < 60 * 4096, "the disk has the blocks back"
    log.close()


@given(st.binary(max_size=60), st.integers(1, 10))
def test_decoding_piece_by_piece_equals_decoding_at_once(data: bytes, step: int) -> None:
    text, cursor, size = "", 0, step
    while cursor < len(data):
        end = cursor + size
        piece = decode(data[cursor:end], final=end >= len(data))
        text, cursor = text + piece.text, cursor + piece.used
        size = step if piece.used else size + 1
    assert text == data.decode("utf-8", "backslashreplace")


@given(
    st.binary(max_size=300) | st.text(max_size=100).map(lambda s: s.encode()), st.integers(20, 400)
)
def test_text_cut_for_a_message_fits_and_goes_on_where_it_ended(data: bytes, limit: int) -> None:
    text, cursor = "", 0
    while cursor < len(data):
        piece = decode_within(data[cursor:], limit, final=True)
        assert json_size(piece.text) <= limit
        assert piece.used > 0
        text, cursor = text + piece.text, cursor + piece.used
    assert text == data.decode("utf-8", "backslashreplace")


@given(
    st.binary(min_size=1, max_size=40)
    | st.sampled_from([b"\\xff", b"\\x5c", b"\\\\x5cxff\xff", b"a\\b"])
)
def test_any_file_name_survives_its_text_form(name: bytes) -> None:
    assert name_to_bytes(name_to_text(name)) == name
    name_to_text(name).encode()


def test_ordinary_names_are_their_own_text_form() -> None:
    for name in ("a b", "é", "a\\b", "\\x41", "new\nline", "-rf", "'"):
        assert name_to_text(name.encode()) == name
        assert name_to_bytes(name) == name.encode()
