"""Progress for people: a spinner on a terminal, plain lines with elapsed seconds elsewhere.

Everything goes to standard error; standard output belongs to the answer (`env`, `--json`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from rich.console import Console as Terminal
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HEARTBEAT_SECONDS: Final = 20.0
"""Plain output says this often that a long step is still at work: CI jobs cut silence off."""
QUICK_SECONDS: Final = 2.0
"""A step shorter than this needs no second line."""


class Console:
    """One run's progress, timed from its construction."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = Terminal(file=self._stream, highlight=False)
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Report something that has happened."""
        if self._terminal.is_terminal:
            self._terminal.print(escape(text))
        else:
            print(f"[{self._elapsed():6.1f}s] {text}", file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show that `what` is being done until the block ends."""
        began = time.monotonic()
        if self._terminal.is_terminal:
            with Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._terminal,
                transient=True,
            ) as progress:
                progress.add_task(escape(what))
                yield
            took = time.monotonic() - began
            self._terminal.print(f"[green]✓[/green] {escape(what)} [dim]{took:.1f} s[/dim]")
            return
        self.say(what)
        ended = threading.Event()
        beat = threading.Thread(target=self._heartbeat, args=(what, began, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
        took = time.monotonic() - began
        if took >= QUICK_SECONDS:
            self.say(f"{what}: done in {took:.1f} s")

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _heartbeat(self, what: str, began: float, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            self.say(f"{what}: still at it after {time.monotonic() - began:.0f} s")
