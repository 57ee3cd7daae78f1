"""What a line of the doctor's report is."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Literal

from host_client.kubectl import Kubectl

Result = Literal["ok", "warning", "failure", "unknown"]

RENDER = "podpipe render admin | kubectl apply --server-side -f -"
"""What an administrator does about most of what is missing in a namespace."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Args:
        check: what was looked at.
        result: how it is; unknown where it may not be looked at.
        detail: what was found.
        fix: what to do; empty where nothing is.
    """

    check: str
    result: Result
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """The form of `--json`."""
        return asdict(self)


def shell(kubectl: Kubectl) -> str:
    """The beginning of a command that asks the same cluster."""
    context = ["--context", kubectl.target.context] if kubectl.target.context else []
    return shlex.join([kubectl.path, *context])
