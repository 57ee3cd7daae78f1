"""The log file of `serve`: shared, bounded, private, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from host_client import logs
from host_client.logs import KEPT_FILES, SharedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "serve.log"


def record(text: str, name: str = "host_client.x") -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 0, text, None, None)


def test_the_file_and_its_folder_are_for_the_user_alone(path: Path) -> None:
    SharedFile(path).handle(record("one"))
    assert path.read_text(encoding="utf-8") == "one\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_it_stays_bounded_and_keeps_the_newest(path: Path) -> None:
    file = SharedFile(path, max_bytes=1000)
    for number in range(1000):
        file.handle(record(f"{number:09}"))
    kept = sorted(path.parent.iterdir())
    assert [entry.name for entry in kept] == [
        "serve.log", *(f"serve.log.{n}" for n in range(1, KEPT_FILES + 1))
    ]  # fmt: skip
    assert all(entry.stat().st_size == 1000 for entry in kept)
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in kept)
    assert path.read_text(encoding="utf-8").splitlines()[-1] == "000000999"


def test_several_writers_lose_nothing_and_move_it_aside_once(path: Path) -> None:
    """Each process of a client has a handler of its own."""
    files = [SharedFile(path, max_bytes=2000) for _ in range(4)]

    def write(number: int) -> None:
        for turn in range(100):
            files[number].handle(record(f"{number}.{turn:07}"))

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
    file = SharedFile(path)
    file.handle(record("one"))
    file.handle(record("two"))
    said = capsys.readouterr().err
    assert said.count(f"the log file {path} cannot be written") == 1
    assert "PODPIPE_LOG_FILE" in said


def test_it_goes_on_once_the_obstacle_is_gone(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.mkdir(parents=True)
    file = SharedFile(path)
    file.handle(record("lost"))
    path.rmdir()
    file.handle(record("kept"))
    assert path.read_text(encoding="utf-8") == "kept\n"
    assert "cannot be written" in capsys.readouterr().err


def test_what_libraries_log_stays_out_of_it(path: Path) -> None:
    """They may quote what a model sent."""
    file = SharedFile(path)
    file.handle(record("arguments: hunter2", name="mcp.server"))
    file.handle(record("ours"))
    assert path.read_text(encoding="utf-8") == "ours\n"


@pytest.mark.parametrize(
    ("sandbox", "shown"), [("work", "work"), ("a b\nINFO forged", "-"), (7, "-"), (None, "-")]
)
async def test_a_call_is_one_line_without_what_was_in_it(
    caplog: pytest.LogCaptureFixture, sandbox: object, shown: str
) -> None:
    with caplog.at_level(logging.INFO, "host_client.logs"):
        with logs.call("run_command", sandbox) as running:
            running.outcome = "ok"
        with pytest.raises(ValueError, match="x"), logs.call("read_file", sandbox):
            raise ValueError("x")
    first, second = caplog.messages
    assert first.startswith(f"call tool=run_command sandbox={shown} outcome=ok ms=")
    assert second.startswith(f"call tool=read_file sandbox={shown} outcome=error ms=")
