"""Rows, samples and what follows from them; knows nothing of Kubernetes.

A row's two sides are measured in turns (ours, baseline, ours, …), so that whatever else the machine
is doing meets both. What is timed is the side's own business: it returns its seconds, and may set
up before and clean up after them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio

SETTLE_SECONDS = 0.1
"""Between two samples: the last one's dying processes must not be the next one's cost."""
SAMPLE_SECONDS = 180.0
"""No sample takes longer, its untimed parts included; whatever does is broken."""
P95 = 0.95

Place = TypeVar("Place")
"""What rows work with: `lab.Lab`, or nothing in tests."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a sample.

    Args:
        name: what it was; the same part has the same name in every sample.
        begin: seconds after the sample's begin.
        end: likewise.
    """

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Args:
        seconds: what is compared.
        spans: where it went, if the side knows.
    """

    seconds: float
    spans: tuple[Span, ...] = ()


Side = Callable[[], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Sides:
    """What a row compares."""

    ours: Side
    baseline: Side


@dataclass(frozen=True, slots=True)
class Row(Generic[Place]):
    """One comparison.

    Args:
        name: as the command line takes it.
        ours: what is measured, for the table.
        baseline: what it is measured against.
        sides: sets up for as long as it is entered.
        runs: samples of each side, unless the command line says otherwise.
        target: the highest ratio of the medians that is good enough; None for one to look at.
        warmups: turns that are run and not counted.
        burst: samples in a row that each side takes in its turn.
        added: the most seconds that our median may be above the baseline's; None for no such bound.
        limit: the most seconds that our median may be, whatever the baseline's is; None for no bound.
    """

    name: str
    ours: str
    baseline: str
    sides: Callable[[Place], AbstractAsyncContextManager[Sides]]
    runs: int
    target: float | None = None
    warmups: int = 1
    burst: int = 1
    added: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Many samples of one side, in seconds."""

    median: float
    least: float
    p95: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Summary:
        """Summarise at least one sample."""
        ordered = sorted(seconds)
        return cls(statistics.median(ordered), ordered[0], percentile(ordered, P95))


@dataclass(frozen=True, slots=True)
class Result(Generic[Place]):
    """What a row came to.

    Args:
        row: which.
        ours: its samples, in order.
        baseline: likewise.
        load: load averages of the last minute before and after it.
        failure: why there are no samples, or none to trust; empty otherwise.
    """

    row: Row[Place]
    ours: Sequence[Sample] = ()
    baseline: Sequence[Sample] = ()
    load: tuple[float, float] = (0.0, 0.0)
    failure: str = ""

    @property
    def ratio(self) -> float | None:
        """Our median over the baseline's."""
        if self.failure or not self.ours or not self.baseline:
            return None
        mine, other = (Summary.of(s.seconds for s in side) for side in (self.ours, self.baseline))
        return mine.median / other.median

    @property
    def difference(self) -> float | None:
        """Seconds that our median is above the baseline's."""
        if self.ratio is None:
            return None
        mine, other = (Summary.of(s.seconds for s in side) for side in (self.ours, self.baseline))
        return mine.median - other.median

    @property
    def verdict(self) -> str:
        """`ok`, `MISS`, `FAILED`, or `-` where there is no target."""
        if self.ratio is None:
            return "FAILED"
        median = Summary.of(sample.seconds for sample in self.ours).median
        bounds = [
            (self.ratio, self.row.target),
            (self.difference, self.row.added),
            (median, self.row.limit),
        ]
        asked = [(is_, most) for is_, most in bounds if is_ is not None and most is not None]
        if not asked:
            return "-"
        return "ok" if all(is_ <= most for is_, most in asked) else "MISS"

    def to_json(self) -> dict[str, Any]:
        """All of it, times in milliseconds."""
        return {
            "name": self.row.name,
            "target": self.row.target,
            "ratio": round(self.ratio, 5) if self.ratio is not None else None,
            "most_added_ms": milliseconds(self.row.added) if self.row.added is not None else None,
            "limit_ms": milliseconds(self.row.limit) if self.row.limit is not None else None,
            "added_ms": milliseconds(self.difference) if self.difference is not None else None,
            "verdict": self.verdict,
            "failure": self.failure,
            "load": [round(value, 2) for value in self.load],
            "ours": _side_json(self.row.ours, self.ours),
            "baseline": _side_json(self.row.baseline, self.baseline),
        }


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest sample that at least `part` of them do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def breakdown(samples: Iterable[Sample]) -> list[Span]:
    """The median span of each name over the samples that have it, by its begin."""
    found: dict[str, list[Span]] = {}
    for sample in samples:
        for span in sample.spans:
            found.setdefault(span.name, []).append(span)
    medians = [
        Span(
            name,
            statistics.median(span.begin for span in spans),
            statistics.median(span.end for span in spans),
        )
        for name, spans in found.items()
    ]
    return sorted(medians, key=lambda span: (span.begin, span.end))


def milliseconds(seconds: float) -> float:
    """To a hundredth."""
    return round(seconds * 1e3, 2)


def _side_json(what: str, samples: Sequence[Sample]) -> dict[str, Any]:
    facts: dict[str, Any] = {"what": what}
    if samples:
        summary = Summary.of(sample.seconds for sample in samples)
        facts |= {
            "median_ms": milliseconds(summary.median),
            "min_ms": milliseconds(summary.least),
            "p95_ms": milliseconds(summary.p95),
            "samples_ms": [milliseconds(sample.seconds) for sample in samples],
        }
    if any(sample.spans for sample in samples):
        facts["breakdown_ms"] = [_span_json(span) for span in breakdown(samples)]
        facts["spans_ms"] = [[_span_json(span) for span in sample.spans] for sample in samples]
    return facts


def _span_json(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "begin": milliseconds(span.begin),
        "took": milliseconds(span.end - span.begin),
    }


def timed(action: Callable[[], Awaitable[object]], *, share: int = 1) -> Side:
    """The side that is all of `action`.

    Args:
        action: what to time.
        share: how many times it does what is compared.
    """

    async def side() -> Sample:
        began = time.perf_counter()
        await action()
        return Sample((time.perf_counter() - began) / share)

    return side


async def measure(
    sides: Sides,
    *,
    runs: int,
    warmups: int,
    burst: int = 1,
    tell: Callable[[str], None],
    settle: float = SETTLE_SECONDS,
) -> tuple[list[Sample], list[Sample]]:
    """Measure both sides in turns.

    Args:
        sides: the two.
        runs: samples of each that are kept.
        warmups: turns before them that are not.
        burst: samples in a row that a side takes in its turn.
        tell: told how far it is, between samples.
        settle: seconds of rest after each turn of a side.

    Raises:
        TimeoutError: a sample took longer than `SAMPLE_SECONDS`.
    """
    ours: list[Sample] = []
    baseline: list[Sample] = []
    turns = [burst] * warmups + [min(burst, runs - done) for done in range(0, runs, burst)]
    for number, samples in enumerate(turns):
        warm = number < warmups
        tell("warming up" if warm else f"run {len(ours) + 1} of {runs}")
        for side, kept in ((sides.ours, ours), (sides.baseline, baseline)):
            for _ in range(samples):
                with anyio.fail_after(SAMPLE_SECONDS):
                    sample = await side()
                if not warm:
                    kept.append(sample)
            await anyio.sleep(settle)
    return ours, baseline
