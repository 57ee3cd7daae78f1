"""A stub cluster for the host: objects in a JSON file, pods that are real daemons here."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host_client.config import Settings
from tests import canaries

ROOT = Path(__file__).resolve().parents[2]
STUB_KUBECTL = Path(__file__).resolve().parent.parent / "stubs" / "kubectl"


@functools.cache
def nursery() -> str:
    """The socket of a process that starts the daemons of all stub pods; it ends with this one."""
    path = f"/tmp/stub-nursery-{os.getpid()}.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stubs.nursery", path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return path


class StubCluster:
    """What tests/stubs/kubectl works on, seen from a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig("https://stub:6443")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KUBECONFIG": str(self.kubeconfig),
            "STUB_DIR": str(folder),
            "PODPIPE_KUBECTL": str(folder / "kubectl"),
            "PODPIPE_USER": "alice",
            **canaries.ENVIRONMENT,
        }
        # The interpreter at hand, without site: `env python3` may be a slow shim.
        kubectl = folder / "kubectl"
        kubectl.write_text(
            f"#!{sys.executable} -IS\n"
            f"import runpy; runpy.run_path({str(STUB_KUBECTL)!r}, run_name='__main__')\n",
            encoding="utf-8",
        )
        kubectl.chmod(0o755)
        (folder / "nursery").symlink_to(nursery())
        self.add({"kind": "Namespace", "metadata": {"name": "sandbox-system"}})

    def write_kubeconfig(self, server: str, context: str = "stub") -> None:
        config = {
            "clusters": [{"name": "stub", "cluster": {"server": server}}],
            "contexts": [{"name": context, "context": {"cluster": "stub", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": canaries.TOKEN}}],
            "current-context": context,
        }
        self.kubeconfig.write_text(json.dumps(config), encoding="utf-8")

    def settings(self, **environment: str) -> Settings:
        return Settings.from_env(self.environment | environment, cwd=self.folder)

    @property
    def objects(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def names(self, kind: str) -> list[str]:
        return [key.split("/")[1] for key in self.objects if key.startswith(f"{kind}/")]

    def add(self, obj: dict[str, Any]) -> None:
        obj["metadata"] = {"uid": "u", "resourceVersion": "1", "labels": {}} | obj["metadata"]
        self.replace(self.objects | {f"{obj['kind']}/{obj['metadata']['name']}": obj})

    def replace(self, objects: dict[str, Any]) -> None:
        (self.folder / "state.json").write_text(json.dumps(objects), encoding="utf-8")

    def change_pod(self, **status: Any) -> None:
        """Let the one pod have this in its status, as the kubelet writes it."""
        objects = self.objects
        (key,) = [key for key in objects if key.startswith("Pod/")]
        objects[key]["status"] |= status
        # In one step: a kubectl of the test may be reading it.
        fresh = self.folder / "state.json.test"
        fresh.write_text(json.dumps(objects), encoding="utf-8")
        fresh.rename(self.folder / "state.json")

    def faults(self, **faults: dict[str, Any] | list[dict[str, Any]]) -> None:
        # In one step: a kubectl may be reading them.
        fresh = self.folder / "faults.new"
        fresh.write_text(json.dumps(faults), encoding="utf-8")
        fresh.replace(self.folder / "faults.json")

    @property
    def calls(self) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    def execs(self) -> int:
        return sum("exec" in call for call in self.calls)

    def be_here(self, monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
        """Let this process have the stub's environment alone: its own may name a real cluster."""
        for name in set(os.environ) - set(self.environment):
            monkeypatch.delenv(name)
        for name, value in (self.environment | more).items():
            monkeypatch.setenv(name, value)

    def close(self) -> None:
        """End the daemons that the stub started, by the ids that it recorded."""
        pids = [int(p.read_text(encoding="utf-8")) for p in self.folder.glob("pods/*/pid")]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 5
        while any(map(runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)  # only a bound on the tidying up, no test waits on it


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubCluster]:
    cluster = StubCluster(tmp_path)
    yield cluster
    cluster.close()
    assert canaries.leaks(tmp_path) == []
    shutil.rmtree(tmp_path, ignore_errors=True)


class Podpipe:
    """The program, as a shell or a client starts it."""

    def __init__(self, stub: StubCluster) -> None:
        self.environment = stub.environment | {"PYTHONPATH": str(ROOT)}

    def start(
        self, *argv: str, by: str = "", ends: tuple[int, int] | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start it, with what is left to us by a parent that runs the shell code `by` first.

        `ends` are other descriptors than pipes for its stdin and stdout.
        """
        program = [sys.executable, "-m", "host_client", *argv]
        stdin, stdout = ends or (subprocess.PIPE, subprocess.PIPE)
        return subprocess.Popen(
            ["bash", "-c", f'{by}; exec "$@"', "bash", *program] if by else program,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=self.environment | environment,
        )

    def __call__(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*argv, by="", ends=None, **environment)
        out, err = process.communicate(timeout=90)
        assert not canaries.leaked(out + err)
        return subprocess.CompletedProcess(argv, process.returncode, out.decode(), err.decode())


@pytest.fixture
def podpipe(stub: StubCluster) -> Podpipe:
    return Podpipe(stub)
