"""The tests' own turns on the node that they share."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

from tests.turns import DOOR, turn

BOUND = 10.0


def held(lock: Path) -> bool:
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_tests_are_on_the_node_beside_each_other(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False), turn(tmp_path, alone=False):
        assert not held(tmp_path / DOOR)


def test_who_wants_it_alone_waits_for_those_on_it_and_holds_up_those_who_come_later(
    tmp_path: Path,
) -> None:
    came: list[str] = []

    def come(name: str, alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            came.append(name)

    others = [
        threading.Thread(target=come, args=arguments)
        for arguments in (("alone", True), ("later", False))
    ]
    deadline = time.monotonic() + BOUND
    with turn(tmp_path, alone=False):
        for other in others:
            other.start()
            while not held(tmp_path / DOOR):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        came.append("first")
    for other in others:
        other.join(BOUND)
    assert came == ["first", "alone", "later"]
