"""What people and programs get to see: progress on stderr, a table on stdout, a JSON document."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.bench.harness import Result, Row, Sample, Summary, breakdown

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_SECONDS = 15.0
"""Plain output says this often how far it is: CI jobs cut silence off."""
PLAIN_WIDTH = 160
"""Columns of a table that no terminal wraps."""

_STYLES = {"ok": "green", "MISS": "bold red", "FAILED": "bold red"}


class Progress:
    """One line that changes on a terminal, now and then a line elsewhere.

    Written between samples only, by no thread of its own: what is measured runs in this process.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._spoke = 0.0

    def say(self, text: str) -> None:
        """Something worth a line of its own."""
        self.clear()
        print(text, file=self._stream, flush=True)
        self._spoke = time.monotonic()

    def tell(self, text: str) -> None:
        """How far it is."""
        if self._live:
            print(f"\r\x1b[K{text} ", end="", file=self._stream, flush=True)
        elif time.monotonic() - self._spoke >= HEARTBEAT_SECONDS:
            self.say(text)

    def clear(self) -> None:
        """Take the changing line away."""
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def show(results: Sequence[Result[Any]], out: TextIO | None = None) -> None:
    """Print the table, and the breakdowns below it."""
    stream = out or sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("row")
    for head in (
        "ours ms",
        "baseline ms",
        "ratio",
        "target",
        "",
        "min",
        "p95",
        "min",
        "p95",
        "load",
    ):
        table.add_column(head, justify="left" if head == "" else "right")
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    for result in results:
        console.print(Text(f"{result.row.name}: {result.row.ours} / {result.row.baseline}"))
        if result.failure:
            console.print(Text(f"  {result.failure}", style=_STYLES["FAILED"]))
        for side, samples in (("ours", result.ours), ("baseline", result.baseline)):
            _show_breakdown(console, side, samples)


def _cells(result: Result[Any]) -> list[Text]:
    mine, other = (
        Summary.of(sample.seconds for sample in side) if side else None
        for side in (result.ours, result.baseline)
    )
    cells = [
        result.row.name,
        _ms(mine.median if mine else None),
        _ms(other.median if other else None),
        _number(result.ratio),
        _target(result.row),
        result.verdict,
        *(_ms(value) for value in ((mine.least, mine.p95) if mine else (None, None))),
        *(_ms(value) for value in ((other.least, other.p95) if other else (None, None))),
        f"{result.load[1]:.1f}",
    ]
    return [Text(cell, style=_STYLES.get(cell, "")) for cell in cells]


def _show_breakdown(console: Console, side: str, samples: Sequence[Sample]) -> None:
    for span in breakdown(samples):
        took = span.end - span.begin
        console.print(
            Text(f"  {side:8} {span.begin * 1e3:7.0f} {took * 1e3:+7.0f} ms  {span.name}")
        )


def _target(row: Row[Any]) -> str:
    """What a row has to keep below, in a cell."""
    if row.limit is not None:
        return f"{_ms(row.limit)} ms"
    return _number(row.target) if row.added is None else f"+{_ms(row.added)} ms"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def document(
    results: Sequence[Result[Any]], began: datetime, cluster: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that was measured, and on what.

    Args:
        results: of all rows.
        began: when the first was begun.
        cluster: versions of kubectl and of the API server.
    """
    return {
        "date": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - began).total_seconds(), 1),
        "cpu_count": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "platform": platform.platform(),
        "versions": {
            "podpipe": version("podpipe"),
            "commit": _commit(),
            "python": platform.python_version(),
            "mcp": version("mcp"),
            **cluster,
        },
        "rows": [result.to_json() for result in results],
    }


def _commit() -> str:
    """What is checked out; empty outside a checkout."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            asked, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write(path: Path, facts: Mapping[str, Any]) -> None:
    """Keep the document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
