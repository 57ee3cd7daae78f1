"""What happened in a soak, and which of it was not as claimed. Pure data.

A call that changes something leaves its id in a file. Every call has an answer, or an ending that
says what became of it; the judge holds both against the faults that were injected and the ids that
are there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["answered", "refused", "not started", "may have run", "lost"]
"""`refused` is an answer that says no, for example that a process is not known any more."""

CONTAINER, POD, API = "container", "pod", "api"
"""The kinds of fault that an ending may be excused by; the others excuse none."""
SETTLE_SECONDS = 60.0
"""A sandbox may be coming up again for so long after its container, pod or API server went."""


@dataclass(slots=True)
class Fault:
    """Something that was broken.

    Args:
        kind: of fault.
        sandbox: which it hit; empty for all.
        began: monotonic seconds.
        ended: when it was over; infinite until then.
        recovered: seconds from `began` to the next good answer; None where there was none.
    """

    kind: str
    sandbox: str
    began: float
    ended: float = math.inf
    recovered: float | None = None

    def hit(self, sandbox: str, began: float, ended: float) -> bool:
        """Whether it happened to a sandbox within a span of time."""
        return self.sandbox in ("", sandbox) and self.began <= ended and self.ended >= began


@dataclass(slots=True)
class Call:
    """One call and how it ended.

    Args:
        id: what it leaves in the file; empty where it leaves nothing.
        sandbox: where it was sent.
        tool: of the daemon.
        since: when what it rests on began: itself, or the process that it asks about.
        began: monotonic seconds.
        ended: likewise.
        ending: how.
        cause: the fault kinds of which one has to have happened, if it ended otherwise.
        said: the text of an ending that is no answer.
    """

    id: str
    sandbox: str
    tool: str
    since: float
    began: float
    ended: float = math.inf
    ending: Ending = "lost"
    cause: tuple[str, ...] = ()
    said: str = ""

    def describe(self) -> str:
        """A line for the list of what went wrong."""
        took = self.ended - self.began
        return f"{self.tool} {self.id or '-'} in {self.sandbox}, {took:.1f} s: {self.ending}; {self.said}"


@dataclass(slots=True)
class Tally:
    """All calls and faults of one soak.

    Args:
        seed: of its random numbers.
        ran: how often each id was found in the files at the end.
    """

    seed: int
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ran: Mapping[str, int] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def lost(self) -> list[Call]:
        """Calls with neither an answer nor an ending that a fault explains."""
        return [call for call in self.calls if not self._explained(call)]

    def _explained(self, call: Call) -> bool:
        if call.ending == "answered":
            return True
        if call.ending == "lost":
            return False
        since = call.since - (SETTLE_SECONDS if call.ending == "not started" else 0)
        return any(
            fault.kind in call.cause and fault.hit(call.sandbox, since, call.ended)
            for fault in self.faults
        )

    @property
    def twice(self) -> list[str]:
        """Ids of calls that ran more than once."""
        return sorted(name for name, times in self.ran.items() if times > 1)

    @property
    def false(self) -> list[Call]:
        """Calls that are said not to have started and did run, or to be done and did not."""
        wrong: dict[Ending, bool] = {"not started": True, "answered": False}
        return [
            call
            for call in self.calls
            if call.id and call.ending in wrong and (call.id in self.ran) is wrong[call.ending]
        ]

    @property
    def stuck(self) -> list[Fault]:
        """Faults after which no good answer came."""
        return [fault for fault in self.faults if fault.recovered is None]

    @property
    def good(self) -> bool:
        """Whether nothing went wrong, and something was tried."""
        tried = any(call.ending == "answered" and call.id for call in self.calls)
        return tried and not (self.lost or self.twice or self.false or self.stuck)

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        return {
            "seed": self.seed,
            "good": self.good,
            "seconds": round(self.seconds, 1),
            "calls": len(self.calls),
            "endings": dict(Counter(call.ending for call in self.calls)),
            "tools": dict(Counter(call.tool for call in self.calls)),
            "faults": dict(Counter(fault.kind for fault in self.faults)),
            "lost": [call.describe() for call in self.lost],
            "twice": self.twice,
            "false": [call.describe() for call in self.false],
            "stuck": [f"{fault.kind} {fault.sandbox}".strip() for fault in self.stuck],
            "recovery_seconds": {
                kind: {"median": _middle(times), "slowest": max(times)}
                for kind, times in sorted(self._recoveries().items())
            },
        }

    def _recoveries(self) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for fault in self.faults:
            if fault.recovered is not None:
                times.setdefault(fault.kind, []).append(round(fault.recovered, 2))
        return times

    def text(self) -> str:
        """The summary for a person."""
        facts = self.to_json()
        verdict = "good" if self.good else "NOT GOOD"
        lines = [
            f"soak of {self.seconds / 60:.1f} minutes, seed {self.seed}: {verdict}",
            f"calls          {len(self.calls)} ({_counts(facts['endings'])})",
            f"faults         {len(self.faults)} ({_counts(facts['faults'])})",
            f"lost answers   {len(self.lost)}",
            f"run twice      {len(self.twice)}",
            f"false claims   {len(self.false)}",
            f"no recovery    {len(self.stuck)}",
        ]
        for kind, times in facts["recovery_seconds"].items():
            lines.append(
                f"recovery       {kind}: {times['median']:.2f} s at the median, "
                f"{times['slowest']:.2f} s at most"
            )
        for what in ("lost", "twice", "false", "stuck"):
            lines += [f"  {what}: {each}" for each in facts[what][:20]]
        return "\n".join(lines)


def _middle(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{times} {name}" for name, times in sorted(found.items())) or "none"
