"""Shell patterns for names: `*`, `?`, `[a-z]`, `{a,b}` and `**`, as ripgrep reads them.

A pattern without a slash is for an entry's name, one with a slash for its path below the folder
that is looked at. The standard library has no `**` and no braces before Python 3.13.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Final

from in_pod_server.errors import ArgumentError

MAX_ALTERNATIVES: Final = 64

_Test = Callable[[str], object]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return the test of a path relative to the folder that is looked at.

    Raises:
        ArgumentError: The pattern is none.
    """
    alternatives = [_steps(one) for one in _braces(pattern)]

    def matches(path: str) -> bool:
        parts = path.split("/")
        return any(
            _all_match(parts if whole else parts[-1:], steps) for steps, whole in alternatives
        )

    return matches


def _braces(pattern: str) -> list[str]:
    """Write out {a,b}; braces do not nest."""
    done = [""]
    rest = pattern
    while found := re.search(r"\{([^{}]*)\}", rest):
        words = found[1].split(",")
        done = [head + rest[: found.start()] + word for head in done for word in words]
        if len(done) > MAX_ALTERNATIVES:
            raise ArgumentError(
                f"glob {pattern!r} has more than {MAX_ALTERNATIVES} alternatives: use several calls"
            )
        rest = rest[found.end() :]
    if "{" in "".join(done) + rest or "}" in "".join(done) + rest:
        raise ArgumentError(f"glob {pattern!r}: a brace is not closed, or braces are nested")
    return [head + rest for head in done]


def _steps(pattern: str) -> tuple[list[_Test | None], bool]:
    """Return a test for each part of a path, None for `**`, and whether it is for whole paths."""
    parts = pattern.removeprefix("/").removesuffix("/").split("/")
    tests: list[_Test | None] = [
        None if part == "**" else re.compile(fnmatch.translate(part)).match for part in parts
    ]
    return tests, "/" in pattern


def _all_match(parts: list[str], steps: list[_Test | None]) -> bool:
    """Follow all ways at once: no pattern makes it slow."""
    reached = {0}
    for number, step in enumerate(steps):
        if step is None:
            # A last `**` stands for what is in a folder, not for the folder.
            begin = min(reached) + (number == len(steps) - 1)
            reached = set(range(begin, len(parts) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(parts) and step(parts[at])}
        if not reached:
            return False
    return len(parts) in reached
