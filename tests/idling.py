"""Sandboxes that go idle within a test: the setting counts in minutes, and no test has those."""

from __future__ import annotations

from typing import Any

import pytest

from host_client import manifest
from in_pod_server import contract as c


def idle_after(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each sandbox that is to go idle do so after so many seconds."""
    whole = manifest.pod

    def pod(*arguments: Any) -> manifest.Object:
        made = whole(*arguments)
        for each in made["spec"]["containers"][0]["env"]:
            if each["name"] == c.ENV_IDLE_SECONDS and each["value"] != "0":
                each["value"] = str(seconds)
        return made

    monkeypatch.setattr(manifest, "pod", pod)
