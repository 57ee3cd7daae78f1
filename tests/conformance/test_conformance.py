"""MCP's own conformance suite, the released one and the next, against both servers in both eras."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest

from tests.conformance.suite import ALPHA, RELEASED, judge

RUNS = {
    "released": (RELEASED, ["--suite", "all"]),
    "2025-11-25": (ALPHA, ["--requirements", "2025-11-25"]),
    "2026-07-28": (ALPHA, ["--requirements", "2026-07-28"]),
}
LIST = Path(__file__).with_name("not_applicable.toml")


def not_applicable() -> set[str]:
    """The checks, as scenario/check, that ask for what podpipe does not do."""
    groups = tomllib.loads(LIST.read_text(encoding="utf-8"))["group"]
    assert all(group["reason"] for group in groups)
    checks = [check for group in groups for check in group["checks"]]
    assert len(checks) == len(set(checks)), "listed twice"
    return set(checks)


@pytest.mark.parametrize("server", ["serve", "daemon"])
async def test_every_check_that_applies_passes(
    server: str, urls: dict[str, str], tmp_path: Path
) -> None:
    verdicts = await asyncio.gather(
        *(
            judge(package, options, urls[server], tmp_path / name)
            for name, (package, options) in RUNS.items()
        )
    )
    listed = not_applicable()
    for name, verdict in zip(RUNS, verdicts, strict=True):
        assert len(verdict.passed) > 30, f"{name} ran next to nothing"
        unmet = {check: said for check, said in verdict.unmet.items() if check not in listed}
        assert unmet == {}, f"{name}: neither passed nor listed in {LIST.name}"
        assert verdict.passed & listed == set(), f"{name}: passes, and is listed in {LIST.name}"
    ran = set().union(*(verdict.unmet for verdict in verdicts))
    assert listed <= ran, f"listed in {LIST.name}, and no check of the suite"
