"""Files of log lines: shared, bounded, private, and never in the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from host_client import logs
from host_client.logs import FileHandler
from host_client.shared_file import KEPT_FILES, SharedFile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "serve.log"


def shared(path: Path, max_bytes: int = 1 << 20) -> SharedFile:
    return SharedFile(path, "PODPIPE_LOG_FILE", max_bytes)


def record(text: str, name: str = "host_client.x") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 0, text, None, None)


def test_the_file_and_its_folder_are_for_the_user_alone(path: Path) -> None:
    shared(path).append(b"one")
    assert path.read_text(encoding="utf-8") == "one\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_it_stays_bounded_and_keeps_the_newest(path: Path) -> None:
    file = shared(path, 1000)
    for number in range(1000):
        file.append(b"%09d" % number)
    kept = sorted(path.parent.iterdir())
    assert [entry.name for entry in kept] == [
        "serve.log", *(f"serve.log.{n}" for n in range(1, KEPT_FILES + 1))
    ]  # fmt: skip
    assert all(entry.stat().st_size == 1000 for entry in kept)
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in kept)
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "000000999"


def test_several_writers_lose_nothing_and_move_it_aside_once(path: Path) -> None:
    """Each process of a client has a handler of its own."""
    files = [shared(path, 2000) for _ in range(4)]

    def write(number: int) -> None:
        for turn in range(100):
            files[number].append(b"%d.%07d" % (number, turn))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [
        line
        for entry in path.parent.iterdir()
        for line in entry.read_text(encoding="utf-8").splitlines()
    ]
    assert sorted(lines) == sorted(f"{n}.{turn:07}" for n in range(4) for turn in range(100))


@pytest.mark.parametrize("obstacle", ["a folder", "a fifo", "a file as its folder"])
def test_a_file_that_cannot_be_written_is_said_once_and_stops_nothing(
    path: Path, obstacle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if obstacle == "a folder":
        path.mkdir(parents=True)
    elif obstacle == "a fifo":
        path.parent.mkdir()
        os.mkfifo(path)
    else:
        path.parent.write_text("", encoding="utf-8")
    file = shared(path)
    file.append(b"one")
    file.append(b"two")
    said = capsys.readouterr().err
    assert said.count(f"{path} cannot be written") == 1
    assert "PODPIPE_LOG_FILE" in said


def test_a_disk_that_is_full_leaves_no_line_that_cannot_be_read(path: Path) -> None:
    """The kernel takes what has room: half a line, which the next one must not be glued to."""
    program = f"""
import resource
from pathlib import Path
from host_client.shared_file import SharedFile
file = SharedFile(Path({str(path)!r}), "PODPIPE_LOG_FILE", 1 << 20)
file.append(b"1" * 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
file.append(b"2" * 20)
file.append(b"3" * 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
file.append(b"4" * 20)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines == ["1" * 20, "2" * 9, "4" * 20, ""]
    assert ended.stderr.count("cannot be written") == 1


def test_it_goes_on_once_the_obstacle_is_gone(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.mkdir(parents=True)
    file = shared(path)
    file.append(b"lost")
    path.rmdir()
    file.append(b"kept")
    assert path.read_text(encoding="utf-8") == "kept\n"
    assert "cannot be written" in capsys.readouterr().err


def test_what_libraries_log_stays_out_of_it(path: Path) -> None:
    """They may quote what a model sent."""
    file = FileHandler(path)
    file.handle(record("arguments: hunter2", name="mcp.server"))
    file.handle(record("ours"))
    assert path.read_text(encoding="utf-8") == "ours\n"


def test_a_stderr_that_nobody_reads_is_not_waited_for_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, sink = os.pipe()
    monkeypatch.setattr(logs, "_STDERR", sink)
    handler = logs.StderrHandler()
    with os.fdopen(source, "rb") as read, os.fdopen(sink, "wb", 0):
        for number in range(10_000):
            handler.handle(record(f"{number} {'x' * 100}"))
        os.set_blocking(source, False)
        kept = (read.read() or b"").count(b"\n")
        assert 0 < kept < 10_000
        handler.handle(record("on"))
        handler.handle(record("and on"))
        said = f"\n[{10_000 - kept} records before this were not read here]\non\nand on\n"
        assert (read.read() or b"").decode() == said
    handler.handle(record("to nobody at all"))
