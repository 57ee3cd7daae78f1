"""Run by isolated.sh: the life of a node from the first `up` to `down --purge`, as facts in JSON.

Everything is real but the machine, which is a copy-on-write view. /upper is what changed on disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host_client.local.containerd import Containerd
from host_client.local.tools import Failure

STATE = Path("/var/tmp/podpipe-test/state")
CACHE = Path("/var/tmp/podpipe-test/cache")
UPPER = Path("/upper")
LOADS = 40
PAUSE = "localhost/podpipe/pause:1"
GARBAGE = "localhost/podpipe/garbage:1"
SHARED = "localhost/podpipe/shared:1"
OBJECTS = """
{"apiVersion": "v1", "kind": "List", "items": [
  {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}, "data": {"x": "y"}},
  {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "home"}, "spec":
    {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}},
  {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {
    "securityContext": {"runAsUser": 1000},
    "containers": [{"name": "c", "image": "localhost/podpipe/pause:1",
      "volumeMounts": [{"name": "home", "mountPath": "/home"}]}],
    "volumes": [{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]}}]}
"""


def cluster(*arguments: str) -> dict[str, Any]:
    """Run scripts/cluster's module; its exit code, output and time."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "host_client.local.cluster", *arguments],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    took = time.monotonic() - began
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr, "seconds": took}


def kubectl(*arguments: str, text_in: str | None = None) -> str:
    env = json.loads(cluster("env", "--json")["out"])
    done = subprocess.run(
        [env["PODPIPE_KUBECTL"], f"--cache-dir={STATE}/test-cache", *arguments],
        env={**os.environ, **env},
        input=text_in,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def traces() -> dict[str, list[str]]:
    """What of a node can be found on this machine, apart from its own state folder."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        words = (folder / "cmdline").read_bytes().split(b"\0")
        if int(folder.name) not in {1, os.getpid()} and words != [b""]:
            processes.append(b" ".join(words).decode())
    mounts = Path("/proc/mounts").read_text("utf-8").splitlines()
    rules = subprocess.run(["iptables-save"], capture_output=True, encoding="utf-8", check=True)
    return {
        "processes": processes,
        "mounts": [line for line in mounts if "podpipe" in line or "hostpath_pv" in line],
        "links": [name.name for name in Path("/sys/class/net").iterdir() if name.name != "lo"],
        "rules": [line for line in rules.stdout.splitlines() if line[0] not in "#:*C"],
        "chains": [
            line for line in rules.stdout.splitlines() if line.startswith((":CNI", ":KUBE"))
        ],
        "groups": [str(path) for path in Path("/sys/fs/cgroup").glob("**/kubepods")],
        "files": sorted(str(path) for path in UPPER.rglob("*") if is_left_over(path)),
    }


def is_left_over(path: Path) -> bool:
    """Whether this was made here: deletions show as devices, and folders change with their content."""
    if path.is_relative_to(UPPER / STATE.relative_to("/")):
        return False
    mode = path.lstat().st_mode
    return not (stat.S_ISCHR(mode) or stat.S_ISDIR(mode))


def kill_everything() -> None:
    """A hard stop: every recorded process dies at once."""
    for record in (STATE / "podpipe" / "node" / "run").glob("*.pid"):
        os.kill(int(record.read_text("ascii").split()[0]), signal.SIGKILL)


def kill_one(component: str) -> None:
    record = STATE / "podpipe" / "node" / "run" / f"{component}.pid"
    os.kill(int(record.read_text("ascii").split()[0]), signal.SIGKILL)


def tarred(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def image_of(layers: list[bytes]) -> bytes:
    """An image archive of these layers, named SHARED."""
    digests = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    config = {"os": "linux", "architecture": "amd64", "config": {}}
    config["rootfs"] = {"type": "layers", "diff_ids": digests}
    names = [f"{at}.tar" for at in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": [SHARED], "Layers": names}]
    described = {
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    return tarred(dict(zip(names, layers, strict=True)) | described)


def load_while_garbage_is_collected() -> dict[str, Any]:
    """Load images that share layers only with the one they replace; then one that is broken."""
    containerd = Containerd(STATE / "podpipe" / "node" / "run" / "containerd.sock")
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            for words in (("tag", "--force", PAUSE, GARBAGE), ("rm", "--sync", GARBAGE)):
                argv = containerd.argv("images", *words)
                subprocess.run(argv, check=True, capture_output=True)

    collector = threading.Thread(target=collect)
    collector.start()
    failures = []
    archive = Path("/var/tmp/podpipe-test/image.tar")
    try:
        for turn in range(LOADS):
            # Few turns in a row with the same layers below: what the race takes, it takes for good.
            below = [tarred({f"{turn // 3}-{at}": b""}) for at in range(4)]
            archive.write_bytes(image_of([*below, tarred({str(turn): b""})]))
            try:
                containerd.load(archive, SHARED)
            except Failure as error:
                failures.append(str(error))
    finally:
        ended.set()
        collector.join()
    before = containerd.images()
    archive.write_bytes(image_of([*below, b"no archive"]))
    try:
        containerd.load(archive, SHARED)
        refused = ""
    except Failure as error:
        refused = str(error)
    archive.unlink()
    after = containerd.images()
    removal = containerd.argv("images", "rm", "--sync", SHARED)
    subprocess.run(removal, check=True, capture_output=True)
    return {
        "failures": failures,
        "refused": refused,
        "kept": before[SHARED] == after[SHARED],
        "held": [name for name in after if "held" in name],
    }


def main() -> None:
    """Live through it; one JSON object on standard output."""
    facts: dict[str, Any] = {}
    built = sys.argv[1]
    (CACHE / "podpipe").mkdir(parents=True)
    (CACHE / "podpipe" / Path(built).name).symlink_to(built)
    os.environ |= {"XDG_STATE_HOME": str(STATE), "XDG_CACHE_HOME": str(CACHE)}
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/var/tmp/podpipe-test"}

    facts["before"] = traces()
    facts["first up"] = cluster("up", "--provider", "node", "--json")
    facts["second up"] = cluster("up", "--json")
    facts["objects"] = kubectl("apply", "-f", "-", text_in=OBJECTS)
    facts["ready"] = kubectl("wait", "--for=condition=Ready", "pod/pod", "--timeout=30s")
    (home,) = (STATE / "podpipe" / "node" / "homes").iterdir()
    (home / "file").write_text("of the user", "utf-8")
    facts["while up"] = traces()
    facts["loads"] = load_while_garbage_is_collected()

    facts["down"] = cluster("down", "--json")
    facts["status when down"] = cluster("status", "--json")
    facts["after down"] = traces()
    facts["up again"] = cluster("up", "--json")
    facts["object"] = kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.x}")
    facts["home"] = Path("/tmp/hostpath_pv", home.name, "file").read_text("utf-8")

    kill_everything()
    facts["status when killed"] = cluster("status", "--json")
    facts["up after a hard stop"] = cluster("up", "--json")
    kill_one("kube-scheduler")
    kill_one("kubelet")
    facts["up of half a node"] = cluster("up", "--json")
    facts["object at the end"] = kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.x}")

    kill_one("containerd")
    facts["purge"] = cluster("down", "--purge", "--json")
    facts["after purge"] = traces()
    facts["folders"] = [
        str(path) for path in (STATE / "podpipe", CACHE / "podpipe") if path.exists()
    ]
    facts["binaries"] = Path(built, "bin", "kubectl").exists()
    facts["env after purge"] = cluster("env")
    facts["purge of nothing"] = cluster("down", "--purge", "--json")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
