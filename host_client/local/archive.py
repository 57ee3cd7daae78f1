"""Image archives made without an engine: one layer, one file or a root folder's tar."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Final

EPOCH: Final = 1
"""A fixed time stamp: the same program gives the same image."""


def write_single_program(target: Path, program: Path, image: str, architecture: str) -> None:
    """Write a docker-archive of a scratch image that holds and runs one static program."""
    layer = _tar({program.name: (program.read_bytes(), 0o755)})
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"],
            },
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [image], "Layers": ["layer.tar"]}]
    content = {
        config_name: (config, 0o644),
        "layer.tar": (layer, 0o644),
        "manifest.json": (json.dumps(manifest).encode(), 0o644),
    }
    target.write_bytes(_tar(content))


def _tar(content: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (data, mode) in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, EPOCH
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
