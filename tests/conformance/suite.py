"""MCP's conformance suite run against a URL, and what it said of each check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.node import installed, node

PACKAGE = "@modelcontextprotocol/conformance"
RELEASED = f"{PACKAGE}@0.1.16"
ALPHA = f"{PACKAGE}@0.2.0-alpha.12"
RUN_SECONDS = 120
FULFILLED = ("SUCCESS", "INFO")


@dataclass(frozen=True)
class Verdict:
    """What a run said: each check, as scenario/check, with the words about those not fulfilled."""

    passed: frozenset[str]
    unmet: dict[str, str]


async def judge(package: str, options: Sequence[str], url: str, results: Path) -> Verdict:
    """Run the suite once.

    Args:
        package: of the suite, name@version.
        options: which scenarios.
        url: of the server.
        results: an empty folder.
    """
    program = installed(package) / "dist/index.js"
    process = await asyncio.create_subprocess_exec(
        node(), str(program), "server", "--url", url, "-o", str(results), *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), RUN_SECONDS)
    except TimeoutError:
        process.kill()
        raise
    verdict = _read(results)
    # Its exit code only tells that something failed; that it came to its end is in its last words.
    assert b"Total: " in said or "--scenario" in options, said.decode()
    assert verdict.passed or verdict.unmet, said.decode()
    return verdict


def _read(results: Path) -> Verdict:
    passed: set[str] = set()
    unmet: dict[str, str] = {}
    for path in results.glob("server-*/checks.json"):
        # server-NAME-2026-11-30T04-35-01-190Z
        scenario = path.parent.name.removeprefix("server-")[: -len("-2026-11-30T04-35-01-190Z")]
        for check in json.loads(path.read_text(encoding="utf-8")):
            key = f"{scenario}/{check['id']}"
            if check["status"] in FULFILLED:
                passed.add(key)
            else:
                unmet[key] = f"{check['status']}: {check.get('errorMessage', '')}"
    return Verdict(frozenset(passed - set(unmet)), unmet)
