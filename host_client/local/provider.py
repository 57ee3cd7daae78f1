"""What every provider of a cluster answers with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a cluster: one context of one kubeconfig, by one kubectl."""

    kubeconfig: str
    context: str
    kubectl: str

    def environment(self) -> dict[str, str]:
        """The variables that podpipe and its tests read."""
        return {
            "KUBECONFIG": self.kubeconfig,
            "PODPIPE_CONTEXT": self.context,
            "PODPIPE_KUBECTL": self.kubectl,
        }

    def argv(self, *arguments: str) -> list[str]:
        """A kubectl command line for this cluster and no other."""
        where = ["--context", self.context]
        if os.pathsep not in self.kubeconfig:  # the option takes one file; a list is in KUBECONFIG
            where += ["--kubeconfig", self.kubeconfig]
        return [self.kubectl, *where, *arguments]


@dataclass(frozen=True, slots=True)
class Status:
    """What is up; `image_loaded` is None where it cannot be known."""

    provider: str
    version: str
    components: Mapping[str, bool]
    image: str
    image_loaded: bool | None

    @property
    def up(self) -> bool:
        """Whether every part is up."""
        return bool(self.components) and all(self.components.values())

    def as_json(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "provider": self.provider,
            "version": self.version,
            "up": self.up,
            "components": dict(self.components),
            "image": {"name": self.image, "loaded": self.image_loaded},
        }
