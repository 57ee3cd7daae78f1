"""The judge of a soak: what it has to find."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.soak.tally import API, CONTAINER, POD, Call, Fault, Tally


def tally(*calls: Call, faults: list[Fault] | None = None, ran: str = "c0") -> Tally:
    good = Call("c0", "a", "run_command", 0, 0, 1, "answered")
    return Tally(1, [good, *calls], faults or [], Counter(ran.split()))


def call(ending: Any, *cause: str, name: str = "c1") -> Call:
    return Call(name, "a", "run_command", 10, 10, 20, ending, cause)


def fault(kind: str, sandbox: str = "a", began: float = 15, recovered: float | None = 1) -> Fault:
    return Fault(kind, sandbox, began, began + 1, recovered)


def test_answers_that_are_true_are_good() -> None:
    assert tally(call("answered"), ran="c0 c1").good


def test_a_soak_that_tried_nothing_is_not_good() -> None:
    assert not Tally(1).good


def test_a_call_without_an_ending_is_lost() -> None:
    assert not tally(call("lost"), faults=[fault(POD)]).good


def test_a_call_that_ran_twice_is_found() -> None:
    found = tally(call("answered"), ran="c0 c1 c1")
    assert (found.good, found.twice) == (False, ["c1"])


def test_an_answer_for_what_never_ran_is_false() -> None:
    assert [each.id for each in tally(call("answered")).false] == ["c1"]


def test_a_call_that_ran_though_it_is_said_not_to_have_started_is_false() -> None:
    found = tally(call("not started", POD), faults=[fault(POD)], ran="c0 c1")
    assert [each.id for each in found.false] == ["c1"]
    assert tally(call("not started", POD), faults=[fault(POD)]).good


def test_an_ending_needs_a_fault_of_its_kind_in_its_sandbox_and_its_time() -> None:
    ending = call("may have run", POD)
    assert tally(ending, faults=[fault(POD)]).good
    assert not tally(ending).good
    assert not tally(ending, faults=[fault(CONTAINER)]).good
    assert not tally(ending, faults=[fault(POD, "b")]).good
    assert not tally(ending, faults=[fault(POD, began=21)]).good
    assert not tally(ending, faults=[fault(POD, began=5)]).good


def test_an_api_server_is_everybodys() -> None:
    assert tally(call("not started", API), faults=[fault(API, "")]).good


def test_a_fault_that_nothing_recovered_from_is_found() -> None:
    assert not tally(faults=[fault(CONTAINER, recovered=None)]).good


def test_the_summary_says_what_was_wrong() -> None:
    found = tally(call("lost"), call("not started", name="c2"), ran="c0 c0 c2")
    for text in ("NOT GOOD", "lost: run_command c1 in a", "twice: c0", "false: run_command c2"):
        assert text in found.text()
    assert found.to_json()["endings"] == {"answered": 1, "lost": 1, "not started": 1}
