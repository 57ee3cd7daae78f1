"""Secrets of a test run, all recognisable, and where none of them may ever be found.

They are given to podpipe wherever people have secrets: in the kubeconfig, in the environment of
kubectl and its plugins, in what a call carries. What a run wrote is searched for the mark.
"""

from __future__ import annotations

import base64
from pathlib import Path

MARK = "canary9f31c7"
"""In each of them, so that one search finds all."""

TOKEN = f"{MARK}-token"
ENVIRONMENT = {"LOGIN_PASSPHRASE": f"{MARK}-environment"}

_WRITTEN = (
    "**/serve.log*",  # the log file, its predecessors
    "**/audit.jsonl*",
    "**/calls.jsonl",  # argv of every kubectl
    "**/state.json",  # objects in the cluster
    "**/pods/*/daemon.log",  # the container's log
    "**/pods/*/podinfo/*",
)


def leaked(text: str | bytes) -> bool:
    """Whether a secret is in it, as it is or in base64, as Kubernetes and HTTP write them."""
    data = text.encode() if isinstance(text, str) else text
    # Three alignments; each less the characters that its neighbours change.
    encoded = [base64.b64encode(b"\0" * n + MARK.encode())[4:-4] for n in range(3)]
    return any(form in data for form in (MARK.encode(), *encoded))


def leaks(folder: Path) -> list[Path]:
    """What was written below a folder, by podpipe and not by its commands, and holds a secret."""
    return [
        path
        for pattern in _WRITTEN
        for path in folder.glob(pattern)
        if path.is_file() and leaked(path.read_bytes())
    ]
