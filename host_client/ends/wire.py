"""The frames between two ends, over two file descriptors: a kind, a length, a payload.

Small frames are gathered, so whoever waits for an answer flushes first. Both ends send a tick when
they have nothing else to say; an end that hears nothing at all for `SILENCE_SECONDS` gives up.
"""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import time

TYPE_CHECKING = False  # `typing` costs the pod's end 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

CHUNK = 256 * 1024
"""Bytes of a file in one frame."""
MAX_PAYLOAD = 1024 * 1024
ROWS = 400
ROWS_BYTES = MAX_PAYLOAD // 4
"""Rows of a frame, at most; a single one is always shorter than a frame."""
"""No honest end sends a longer one."""
TICK_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""Four ticks. A container that dies can leave kubectl hanging: seen on a node, for as long as asked."""
_HEAD = struct.Struct(">cI")
_LARGE = 64 * 1024
"""A payload that is not worth being copied to go out with its head."""
SMALL_BYTES = 32 * 1024
"""A file of at most so many bytes is one frame: this head, and the bytes."""
SMALL_HEAD = struct.Struct(">IIQq32s")
"""Number, mode, size, nanoseconds of modification, SHA-256."""
_BUFFER = 1024 * 1024

MAX_ENTRIES = 1_000_000
UNLISTED = "!"
"""The kind of a second entry for a folder whose contents cannot be listed."""

JOB, ENTRIES, ENTRIES_END, WANTS, WANTS_END = b"J", b"E", b"e", b"W", b"w"
BEGIN, DATA, ZEROS, FINISH, SMALL = b"B", b"D", b"Z", b"F", b"S"
UNREADABLE, DATA_END = b"X", b"d"
RESULTS, RESULTS_END, REFUSAL, TICK = b"R", b"r", b"!", b"T"


class Lost(Exception):
    """The channel ended or fell silent: nothing is known but what was acknowledged."""


class Broken(Exception):
    """The other end does not keep to the protocol."""


class Refused(Exception):
    """The job as a whole cannot be done; the message is for a person."""


class Channel:
    """One end's frames.

    Args:
        reader: descriptor to read from.
        writer: descriptor to write to.
        on_silence: called, from a thread of the channel, when the other end was silent too long;
            it has to make reading end.
    """

    def __init__(self, reader: int, writer: int, on_silence: Callable[[], None]) -> None:
        for fd in (reader, writer):
            _widen(fd)
        self._in = io.BufferedReader(io.FileIO(reader, closefd=False), _BUFFER)
        self._writer = writer
        self._out = bytearray()
        self._lock = threading.Lock()
        self._spoke = time.monotonic()
        self._waits_since = 0.0
        self._on_silence = on_silence
        self._closed = threading.Event()
        self._stopped = ""
        self.heard = False
        """Whether the other end has said anything."""

    def start(self) -> None:
        """Tick, and watch the other end's ticks, until closed."""
        threading.Thread(target=self._tick, name="ticks", daemon=True).start()

    def close(self) -> None:
        """Stop ticking."""
        self._closed.set()

    def stop(self, why: str) -> None:
        """Make `check` fail from now on."""
        self._stopped = why

    def check(self) -> None:
        """To be called now and then by whoever is busy without the channel.

        Raises:
            Lost: it was stopped.
        """
        if self._stopped:
            raise Lost(self._stopped)

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            since = self._waits_since
            if since and time.monotonic() - since > SILENCE_SECONDS:
                self._on_silence()
                return
            # Whoever holds the lock is writing right now, which says as much.
            if time.monotonic() - self._spoke >= TICK_SECONDS and self._lock.acquire(
                blocking=False
            ):
                try:
                    self._out += _HEAD.pack(TICK, 0)
                    self._write_out()
                except Lost:
                    return
                finally:
                    self._lock.release()

    def send(self, kind: bytes, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a frame, soon.

        Raises:
            Lost: nobody reads any more.
        """
        with self._lock:
            self._out += _HEAD.pack(kind, len(payload))
            if len(payload) >= _LARGE:
                self._write_out()
                self._write(payload)
                return
            self._out += payload
            if len(self._out) >= CHUNK:
                self._write_out()

    def tell(self, kind: bytes, value: Any) -> None:
        """Send a frame that holds JSON. Text may hold surrogates for bytes that are not UTF-8."""
        self.send(kind, json.dumps(value, separators=(",", ":")).encode())

    def tell_rows(self, kind: bytes, rows: Iterable[Any]) -> None:
        """Send frames that each hold a JSON list of some rows: paths may be long, frames are not."""
        texts: list[str] = []
        size = 0
        for row in rows:
            text = json.dumps(row, separators=(",", ":"))
            if len(texts) == ROWS or size + len(text) > ROWS_BYTES:
                self.send(kind, f"[{','.join(texts)}]".encode())
                texts, size = [], 0
            texts.append(text)
            size += len(text) + 1
        if texts:
            self.send(kind, f"[{','.join(texts)}]".encode())

    def flush(self) -> None:
        """Send what was gathered."""
        with self._lock:
            self._write_out()

    def _write_out(self) -> None:
        gathered, self._out = self._out, bytearray()
        self._write(gathered)
        self._spoke = time.monotonic()

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._writer, rest) :]
        except OSError as error:
            raise Lost(f"the channel broke: {error}") from error

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame that is not a tick.

        Raises:
            Lost: the channel ended.
            Broken: what came is no frame.
            Refused: the other end gave the whole job up, and says why.
        """
        while True:
            self._waits_since = time.monotonic()
            head = self._read(_HEAD.size)
            self.heard = True
            kind, size = _HEAD.unpack(head)
            if size > MAX_PAYLOAD:
                raise Broken(f"a frame of {size} bytes was announced")
            payload = self._read(size) if size else b""
            self._waits_since = 0.0
            if kind == REFUSAL:
                raise Refused(payload.decode("utf-8", "replace")[:2000])
            if kind != TICK:
                return kind, payload

    def _read(self, size: int) -> bytes:
        try:
            data = self._in.read(size)
        except (OSError, ValueError) as error:
            raise Lost(f"the channel broke: {error}") from error
        if len(data) < size:
            raise Lost("the channel ended")
        return data


def _widen(fd: int) -> None:
    """Give a pipe room for more than 64 KiB where that can be done: fewer switches."""
    try:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUFFER)
    except (ImportError, AttributeError, OSError):
        pass  # a socket, or not Linux


def parsed(payload: bytes, shape: type) -> Any:
    """The JSON of a payload, which has to be of this type.

    Raises:
        Broken: it is not.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Broken("a frame that should hold JSON does not") from error
    if type(value) is not shape:
        raise Broken(f"a frame holds a {type(value).__name__} where a {shape.__name__} belongs")
    return value


def add_to_sum(fd: int, size: int, summed: Any, channel: Channel) -> int:
    """Add the first `size` bytes of a file to a sum.

    Returns:
        How many there were.

    Raises:
        Lost: the channel was stopped meanwhile.
    """
    done = 0
    while done < size:
        chunk = os.read(fd, min(1 << 20, size - done))
        if not chunk:
            break
        summed.update(chunk)
        done += len(chunk)
        channel.check()
    return done
