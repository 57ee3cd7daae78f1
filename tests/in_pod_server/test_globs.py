"""Patterns for names: as ripgrep reads them, and never slow."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from in_pod_server.errors import ArgumentError
from in_pod_server.globs import matcher

PATHS = [
    "a.py",
    "b.txt",
    "src/a.py",
    "src/deep/a.py",
    "src/deep/er/b.js",
    "src/[x].py",
    "other/src/a.py",
    "é€.py",
    "new\nline.py",
    "x-1.py",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.py",
        "a.*",
        "?.py",
        "**/*.py",
        "src/*.py",
        "src/**",
        "src/**/*.py",
        "**/deep/**",
        "/a.py",
        "*.{py,js}",
        "{src,other}/**/a.py",
        "[ab].py",
        "[!a].py",
        "src/**/b.js",
        "nothing",
    ],
)
def test_a_glob_chooses_the_files_that_ripgrep_chooses(tmp_path: Path, pattern: str) -> None:
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    listed = subprocess.run(
        ["rg", "--no-config", "--files", "--null", f"--glob={pattern}"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    ).stdout.decode()
    chosen = {path for path in PATHS if matcher(pattern)(path)}
    assert chosen == set(listed.split("\0")[:-1])


def test_a_question_mark_is_a_character_and_not_a_byte() -> None:
    assert matcher("??.py")("é€.py")


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a,{b,c}}", "{1,2,3}" * 5])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ArgumentError, match="glob"):
        matcher(pattern)


def test_no_pattern_is_slow() -> None:
    begun = time.perf_counter()
    assert not matcher("*a" * 400 + "b")("a" * 255)
    assert not matcher("**/" * 300 + "b")("a/" * 1000 + "a")
    assert time.perf_counter() - begun < 1
