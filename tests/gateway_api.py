"""The Gateway API's own definitions, pinned, from its Go module."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

MODULE = "sigs.k8s.io/gateway-api@v1.4.0"
DOWNLOAD_SECONDS = 120


def definitions() -> Sequence[Path]:
    """The files that define Gateways and HTTPRoutes, as a cluster's administrator applies them."""
    go = shutil.which("go")
    if not go:
        pytest.fail(f"{MODULE} is downloaded with go, as the node's own parts are: install Go")
    done = subprocess.run(
        [go, "mod", "download", "-json", MODULE],
        cwd="/", timeout=DOWNLOAD_SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"go could not download {MODULE}: {done.stdout}{done.stderr}"
    folder = Path(json.loads(done.stdout)["Dir"]) / "config/crd/standard"
    return [
        folder / f"gateway.networking.k8s.io_{kind}.yaml" for kind in ("gateways", "httproutes")
    ]
