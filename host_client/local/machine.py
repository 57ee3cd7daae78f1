"""What the node does to the machine outside its own folder, and how that is undone.

Mounts, the bridge and its iptables rules, CNI's files, the kubelet's links and cgroups, kernel
settings. Each is recognised as the node's own before it is touched.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from host_client.local.node_config import BRIDGE, NETWORK, PROVISIONER_FOLDER, SANDBOX_UID
from host_client.local.tools import Failure, run, run_json

CNI_RESULTS: Final = Path("/var/lib/cni/results")
"""libcni's cache; fixed in the containerd of Debian 12."""
CONTAINER_LINKS: Final = Path("/var/log/containers")
"""The kubelet's links to container logs; fixed."""
SHIM_SOCKETS: Final = Path("/run/containerd/s")
"""Sockets of containerd's shims; fixed."""
DEVICE_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")
"""The kubelet's; fixed, whatever its root folder is."""
CONTAINERS: Final = Path("/var/lib/containers")
"""Where podman and buildah keep things when nobody says otherwise."""
BUILDER_STRAYS: Final = (
    CONTAINERS / "cache" / "blob-info-cache-v1.boltdb",
    Path("/var/cache/containers/short-name-aliases.conf.lock"),
    Path("/etc/cni/net.d/cni.lock"),
)
"""Caches and empty locks whose places buildah's options do not change."""
CGROUPS: Final = Path("/sys/fs/cgroup")
KERNEL_SETTINGS: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
)
"""What the kubelet sets for a server farm (a machine that reboots itself after an oops), and the
bridge plugin."""
FORWARDING: Final = "net/ipv4/ip_forward"
OURS: Final = re.compile(rf'name: \\?"{NETWORK}\\?" id:')
"""The comment that CNI's plugins put into the iptables rules of our network."""


def mount_homes(homes: Path) -> None:
    """Make the provisioner's fixed folder show the node's own one."""
    homes.mkdir(parents=True, exist_ok=True)
    shutil.chown(homes, SANDBOX_UID, SANDBOX_UID)
    PROVISIONER_FOLDER.mkdir(parents=True, exist_ok=True)
    if not homes.samefile(PROVISIONER_FOLDER):
        run(["mount", "--bind", str(homes), str(PROVISIONER_FOLDER)])


def unmount_homes(homes: Path) -> None:
    """Take our mount away from the provisioner's folder, and the folder where it is empty."""
    if not PROVISIONER_FOLDER.exists():
        return
    while homes.exists() and homes.samefile(PROVISIONER_FOLDER):
        run(["umount", str(PROVISIONER_FOLDER)])
    _remove_empty(PROVISIONER_FOLDER)


def mounts_below(folder: Path) -> list[Path]:
    """Mount points below a folder, deepest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        if Path(point).is_relative_to(folder):
            found.append(Path(point))
    return found[::-1]


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder, so that removing it can never reach into a volume."""
    for point in mounts_below(folder):
        if run(["umount", str(point)], check=False).returncode != 0:
            run(["umount", "--lazy", str(point)], check=False)
    left = mounts_below(folder)
    if left:
        raise Failure(f"still mounted: {', '.join(map(str, left))}; unmount by hand, then repeat")


def snapshotter_for(folder: Path) -> str:
    """overlayfs, or plain copies where the folder's own file system is one already."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        probe = Path(name)
        for part in ("lower", "upper", "work", "merged"):
            (probe / part).mkdir()
        options = f"lowerdir={probe}/lower,upperdir={probe}/upper,workdir={probe}/work"
        argv = ["mount", "-t", "overlay", "overlay", "-o", options, f"{probe}/merged"]
        if run(argv, check=False).returncode != 0:
            return "native"
        run(["umount", f"{probe}/merged"])
        return "overlayfs"


def resolv_conf() -> Path:
    """The name servers that a pod can reach: not a resolver on the machine's own loopback."""
    upstream = Path("/run/systemd/resolve/resolv.conf")
    return upstream if upstream.exists() else Path("/etc/resolv.conf")


def read_kernel_settings() -> dict[str, str]:
    """The settings that the node's parts will change, as they are now."""
    values = {}
    for name in KERNEL_SETTINGS:
        path = Path("/proc/sys") / name
        if path.exists():
            values[name] = path.read_text(encoding="ascii").strip()
    return values


def restore_kernel_settings(values: dict[str, str]) -> None:
    """Put the settings back; forwarding stays on where another bridge needs it."""
    for name, value in values.items():
        path = Path("/proc/sys") / name
        if name not in KERNEL_SETTINGS or path.read_text(encoding="ascii").strip() == value:
            continue
        if name == FORWARDING and run_json(["ip", "-json", "link", "show", "type", "bridge"]):
            continue
        path.write_text(value, encoding="ascii")


def remove_network() -> None:
    """Remove our rules and chains from iptables, then the bridge and the pods' ends of it."""
    rules = run(["iptables", "-w", "-t", "nat", "-S"], check=False).stdout.splitlines()
    for argv in deletions(rules):
        run(["iptables", "-w", "-t", "nat", *argv], check=False)
    links = run(["ip", "-json", "link", "show"], check=False).stdout
    for link in json.loads(links or "[]"):
        if link.get("master") == BRIDGE:
            run(["ip", "link", "delete", link["ifname"]], check=False)
    if Path("/sys/class/net", BRIDGE).exists():
        run(["ip", "link", "delete", BRIDGE])


def deletions(rules: Iterable[str]) -> list[list[str]]:
    """The iptables arguments that remove our network's rules and the chains they jump to."""
    ours = [shlex.split(rule) for rule in rules if OURS.search(rule)]
    jumps = [rule for rule in ours if rule[-2] == "-j" and rule[-1].startswith("CNI-")]
    chains = sorted({rule[-1] for rule in jumps})
    return [
        *(["-D", *rule[1:]] for rule in jumps),
        *(["-F", chain] for chain in chains),
        *(["-X", chain] for chain in chains),
    ]


def remove_shim_sockets(containerd_state: Path) -> None:
    """Remove the sockets of our shims: each bundle knows its own."""
    for address in containerd_state.glob("io.containerd.runtime.v2.task/*/*/address"):
        socket = Path(address.read_text(encoding="utf-8").strip().removeprefix("unix://"))
        if socket.parent == SHIM_SOCKETS:
            socket.unlink(missing_ok=True)


def remove_strays(state: Path) -> None:
    """Remove what the kubelet, containerd and CNI make at fixed places outside the folder."""
    for sandbox in (state / "containerd" / "io.containerd.grpc.v1.cri" / "sandboxes").glob("*"):
        (CNI_RESULTS / f"{NETWORK}-{sandbox.name}-eth0").unlink(missing_ok=True)
        (CNI_RESULTS / f"cni-loopback-{sandbox.name}-lo").unlink(missing_ok=True)
    for link in CONTAINER_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(state):
            link.unlink()
    if DEVICE_PLUGINS.exists() and not (DEVICE_PLUGINS.parent / "pods").exists():
        shutil.rmtree(DEVICE_PLUGINS)
    for folder in (
        CNI_RESULTS,
        CNI_RESULTS.parent,
        CONTAINER_LINKS,
        DEVICE_PLUGINS.parent,
        SHIM_SOCKETS,
        SHIM_SOCKETS.parent,
    ):
        _remove_empty(folder)
    for pods in (*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")):
        for folder in sorted((path for path in pods.rglob("*") if path.is_dir()), reverse=True):
            _remove_empty(folder)
        _remove_empty(pods)


def remove_builder_strays() -> None:
    """Remove what buildah keeps at fixed places, unless the machine's own podman shares it."""
    if (CONTAINERS / "storage").exists():
        return
    for path in BUILDER_STRAYS:
        path.unlink(missing_ok=True)
        _remove_empty(path.parent)
    _remove_empty(CONTAINERS)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # not there, not empty, or in use: then it is not only ours
