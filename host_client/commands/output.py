"""What commands print: answers on stdout, what happens meanwhile on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from host_client.status import Progress


def show(arguments: argparse.Namespace, text: str, facts: Any) -> None:
    """Print an answer: `text`, or `facts` as one JSON document where that was asked for.

    `arguments.answered` says so from then on: what ends the command later is no second document.
    """
    print(json.dumps(facts, indent=2) if arguments.json else text)
    arguments.answered = True


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def warn(warnings: Iterable[str]) -> None:
    """Print warnings to stderr, a line each."""
    for warning in warnings:
        print(f"podpipe: warning: {warning}", file=sys.stderr)


def told(text: str) -> None:
    """Progress as a line on stderr, also where answers are printed meanwhile."""
    print(f"podpipe: {text} …", file=sys.stderr, flush=True)


@contextmanager
def watched() -> Iterator[Progress]:
    """Progress on stderr: a spinner on a terminal, a line for each change elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console  # 60 ms that `connect` need not pay

        with Console(stderr=True).status("…") as status:
            yield status.update
        return
    last = ""

    def line(text: str) -> None:
        nonlocal last
        if text != last:
            told(text)
            last = text

    yield line
