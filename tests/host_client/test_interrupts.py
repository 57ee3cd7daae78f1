"""What a signal cancels is undone; only one who insists ends the program at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from host_client.interrupts import EXIT_INTERRUPTED, SAME_SECONDS

BOUND = 30
PROGRAM = """
import anyio, sys
from host_client.interrupts import interruptible

async def work():
    try:
        print("works", flush=True)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("undoes", flush=True)
            sys.stdin.readline()
            print("undone", flush=True)

sys.exit(anyio.run(interruptible, work))
"""
"""What it has to undo takes as long as the test wants."""


@pytest.fixture
def working() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == "works\n"
        yield program
        program.kill()


@pytest.mark.parametrize(
    "names", [["SIGTERM"], ["SIGINT"] * 2, ["SIGINT", "SIGTERM", "SIGHUP"] * 3]
)
def test_signals_that_come_together_are_one_and_nothing_is_left_undone(
    working: subprocess.Popen[str], names: list[str]
) -> None:
    """The second one ended the program amid its tidying up, and left its kubectl."""
    for name in names:
        working.send_signal(signal.Signals[name])
    said, _ = working.communicate("go on\n", timeout=BOUND)
    assert (said, working.returncode) == ("undoes\nundone\n", EXIT_INTERRUPTED)


def test_a_later_signal_ends_a_program_that_does_not_come_to_its_end() -> None:
    stuck = PROGRAM.replace("sys.stdin.readline()", "await anyio.sleep_forever()")
    with subprocess.Popen(
        [sys.executable, "-c", stuck], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == "works\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "undoes\n"
        insists = time.monotonic()
        while program.poll() is None:
            program.send_signal(signal.SIGINT)
            assert time.monotonic() - insists < BOUND
            time.sleep(0.1)
        assert time.monotonic() - insists > SAME_SECONDS / 2
        assert (program.stdout.read(), program.returncode) == ("", EXIT_INTERRUPTED)
