"""What the kubelet tells of the pod, in a downwardAPI file that it keeps current."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path


def read_annotations(path: Path) -> Mapping[str, str]:
    """The annotations in a file: a line each, as name="value" with Go's escapes.

    Args:
        path: of the file; one that is not there, or cannot be read, tells nothing.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    found = {}
    for line in lines:
        name, _, quoted = line.partition("=")
        with contextlib.suppress(ValueError):
            value = json.loads(quoted)
            if isinstance(value, str):
                found[name] = value
    return found
