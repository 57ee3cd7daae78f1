"""A real Kubernetes with one node, from Debian packages and a Go build: no Docker, no image pulls.

Everything listens on loopback and keeps its files in one folder; `machine` knows the exceptions.
`up` may be called in any state: it starts what is not running and finishes what was interrupted.
NetworkPolicies are enforced where `policies` was asked to; Services (kube-proxy) are not there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from host_client.local import binaries, machine, node_config, pki, policies
from host_client.local.archive import write_single_program
from host_client.local.console import Console
from host_client.local.containerd import Containerd, canonical
from host_client.local.node_config import (
    COMPONENTS,
    CONTEXT,
    KUBERNETES_VERSION,
    NODE,
    PAUSE_IMAGE,
    PORTS_OF,
    STORAGE_CLASS,
    Layout,
    Ports,
)
from host_client.local.processes import (
    Records,
    boot_id,
    choose_port,
    comes_free,
    holder_of,
    spawn,
    stop,
)
from host_client.local.provider import Access, Status
from host_client.local.tools import (
    Failure,
    NotFound,
    exclusive,
    run,
    tail_of_file,
    write_private,
)

READY_SECONDS: Final = 120.0
"""Six seconds on an idle machine; a loaded one takes its time."""
POLL_SECONDS: Final = 0.1
CONTAINER_GRACE_SECONDS: Final = 3.0
"""From TERM to KILL for the pods' processes at `down`: a sandbox's daemon ends within one."""
LONGEST_SOCKET: Final = 100
"""The kernel takes 107 bytes, and containerd adds a suffix."""


class Node:
    """The single node of one state folder."""

    name = "node"

    def __init__(self, state: Path, cache: Path, console: Console) -> None:
        self._cache = cache
        self._layout = Layout(state, binaries.build_folder(cache) / "bin")
        self._records = Records(self._layout.run)
        self._containerd = Containerd(self._layout.socket)
        self._console = console

    @property
    def containerd(self) -> Containerd:
        """For loading images."""
        return self._containerd

    def access(self) -> Access:
        """The administrator's access, by the kubectl that was built with the server."""
        if not self._layout.kubeconfig.exists():
            raise NotFound("there is no node yet: run `scripts/cluster up --provider node`")
        return Access(str(self._layout.kubeconfig), CONTEXT, str(self._layout.bin / "kubectl"))

    def exists(self) -> bool:
        """Whether there is anything of this node, running or not."""
        return self._layout.state.exists()

    def up(self) -> None:
        """Bring the node up, whatever state it is in."""
        binaries.require_linux_root()
        if len(str(self._layout.socket)) > LONGEST_SOCKET:
            raise Failure(
                f"{self._layout.socket} is too long for a socket: set XDG_STATE_HOME to a shorter path"
            )
        binaries.install(binaries.PACKAGE_OF, self._console)
        binaries.build(self._cache, self._console)
        with exclusive(self._lock):
            missing = [name for name in COMPONENTS if not self._records.alive(name)]
            if missing:
                self._prepare(missing)
                self._start(missing)
            self._finish(fast=not missing)

    def enforce_policies(self, *, on: bool) -> None:
        """Enforce NetworkPolicies from now on, or stop it and leave no rule of it behind."""
        binaries.require_linux_root()
        kubeconfig = Path(self.access().kubeconfig)
        if not on:
            with exclusive(self._lock):
                self._stop_policies()
            return
        program = policies.program(self._cache, self._console)
        if not self._api_is_ready():
            raise Failure("the node does not answer: bring it up with `scripts/cluster up`")
        with exclusive(self._lock):
            if not self._records.alive(policies.NAME):
                self._start_one(policies.NAME, policies.argv(program, kubeconfig))

    def _stop_policies(self) -> None:
        if self._records.load(policies.NAME):
            self._stop_one(policies.NAME)
            policies.remove_traces()

    def down(self, *, purge: bool) -> None:
        """Stop the node and undo what it did to the machine; with `purge` forget it altogether."""
        binaries.require_linux_root()
        if self.exists():
            with exclusive(self._lock):
                self._stop()
                self._clean(purge=purge)
        if purge:
            self._lock.unlink(missing_ok=True)

    def status(self, image: str) -> Status:
        """Each component, and whether the API server answers with a ready node."""
        names = [*COMPONENTS, *([policies.NAME] if self._records.load(policies.NAME) else [])]
        alive = {name: self._records.alive(name) for name in names}
        components = {**alive, "node ready": all(alive.values()) and self._node_is_ready()}
        loaded = canonical(image) in self._containerd.images() if alive["containerd"] else False
        return Status(self.name, KUBERNETES_VERSION, components, image, loaded)

    @property
    def _lock(self) -> Path:
        return self._layout.state.with_suffix(".lock")

    def _prepare(self, missing: list[str]) -> None:
        layout = self._layout
        cold = len(missing) == len(COMPONENTS)
        layout.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if cold:
            self._recover_from_reboot()
        layout.run.mkdir(exist_ok=True)
        pki.issue_missing(layout.pki, node_config.IDENTITIES)
        settings = layout.state / "kernel-settings.json"
        if not settings.exists():
            write_private(settings, json.dumps(machine.read_kernel_settings()))
        machine.mount_homes(layout.homes)
        ports = self._ports(missing, cold=cold)
        snapshotter = machine.snapshotter_for(layout.state)
        rendered = node_config.files(layout, ports, snapshotter, machine.resolv_conf())
        for path, content in rendered.items():
            write_private(path, content)
        for name in missing:
            self._records.forget(name)

    def _recover_from_reboot(self) -> None:
        """After a reboot containerd's state and every mount of it mean nothing any more."""
        mark = self._layout.state / "boot"
        if mark.exists() and mark.read_text(encoding="ascii") != boot_id():
            machine.unmount_below(self._layout.run)
            shutil.rmtree(self._layout.run, ignore_errors=True)
        mark.write_text(boot_id(), encoding="ascii")

    def _ports(self, missing: list[str], *, cold: bool) -> Ports:
        recorded = self._recorded_ports()
        wanted = asdict(recorded)
        if cold:
            for name, port in wanted.items():
                wanted[name] = choose_port(port)
                if wanted[name] != port:
                    self._console.say(
                        f"port {port} is taken by {holder_of(port)}: {name} uses {wanted[name]}"
                    )
            return Ports(**wanted)
        for component in missing:
            for name in PORTS_OF.get(component, ()):
                if not comes_free(wanted[name]):
                    raise Failure(
                        f"{component} has stopped and its port {wanted[name]} is now held by "
                        f"{holder_of(wanted[name])}: stop that, or run `scripts/cluster down` and "
                        "`scripts/cluster up`, which picks another port"
                    )
        return recorded

    def _recorded_ports(self) -> Ports:
        try:
            text = (self._layout.state / "ports.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return Ports()
        return Ports(**json.loads(text))

    def _start(self, missing: list[str]) -> None:
        with self._console.step(f"starting {', '.join(missing)}"):
            ports = self._recorded_ports()
            for name in COMPONENTS:
                if name == "kube-controller-manager":
                    self._wait("the API server", self._api_is_ready)
                if name == "kubelet":
                    self._wait("containerd", self._containerd.answers)
                    self._load_pause()
                if name in missing:
                    self._spawn(name, ports)

    def _spawn(self, name: str, ports: Ports) -> None:
        self._start_one(name, node_config.argv(self._layout, ports, name))

    def _start_one(self, name: str, argv: list[str]) -> None:
        process = spawn(argv, log=self._layout.log_of(name), cwd=self._layout.state)
        if process is None:
            raise self._died(name)
        self._records.save(name, process)

    def _finish(self, *, fast: bool) -> None:
        if fast and self._is_complete():
            self._console.say(f"the node is up (Kubernetes {KUBERNETES_VERSION})")
            return
        with self._console.step("waiting until the node is ready"):
            self._wait("the API server", self._api_is_ready)
            run(self._kubectl("apply", "-f", "-"), text_in=node_config.storage_class())
            self._wait("the node", self._node_is_ready)
            self._wait("the default ServiceAccount", self._account_exists)
        self._console.say(f"the node is up (Kubernetes {KUBERNETES_VERSION})")

    def _is_complete(self) -> bool:
        return self._node_is_ready() and self._account_exists() and self._class_exists()

    def _node_is_ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self._ask("get", "node", NODE, "-o", path) == "True"

    def _account_exists(self) -> bool:
        return self._ask("get", "serviceaccount", "default", "-o", "name") != ""

    def _class_exists(self) -> bool:
        return self._ask("get", "storageclass", STORAGE_CLASS, "-o", "name") != ""

    def _api_is_ready(self) -> bool:
        return self._ask("get", "--raw", "/readyz") == "ok"

    def _ask(self, *arguments: str) -> str:
        argv = self._kubectl("--request-timeout=5s", *arguments)
        done = run(argv, check=False, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    def _kubectl(self, *arguments: str) -> list[str]:
        # Its cache would be the only thing of ours in the user's ~/.kube.
        return self.access().argv(f"--cache-dir={self._layout.state / 'kubectl'}", *arguments)

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + READY_SECONDS
        while not ready():
            for name in COMPONENTS:
                if self._records.load(name) is not None and not self._records.alive(name):
                    raise self._died(name)
            if time.monotonic() > until:
                logs = self._layout.logs
                raise Failure(f"{what} is not ready after {READY_SECONDS:.0f} s; see {logs}")
            time.sleep(POLL_SECONDS)

    def _died(self, name: str) -> Failure:
        self._records.forget(name)
        log = self._layout.log_of(name)
        return Failure(
            f"{name} ended right after its start; the end of {log}:\n{tail_of_file(log)}"
        )

    def _load_pause(self) -> None:
        if PAUSE_IMAGE in self._containerd.images():
            return
        program = self._layout.bin / "pause"
        with tempfile.TemporaryDirectory(dir=self._layout.run) as folder:
            archive = Path(folder) / "pause.tar"
            architecture = binaries.machine_architecture()
            write_single_program(archive, program, PAUSE_IMAGE, architecture)
            self._containerd.load(archive, PAUSE_IMAGE)

    def _stop(self) -> None:
        """The kubelet first, or it would start again what is stopped; containerd last."""
        bundles = self._layout.run / "containerd" / "io.containerd.runtime.v2.task" / "k8s.io"
        with self._console.step("stopping the node"):
            for name in ("kubelet", "kube-scheduler", "kube-controller-manager"):
                self._stop_one(name)
            self._stop_policies()
            if (
                not self._records.alive("containerd")
                and bundles.exists()
                and any(bundles.iterdir())
            ):
                # It was killed and its containers live on: only it can stop them.
                self._spawn("containerd", self._recorded_ports())
                self._wait("containerd", self._containerd.answers)
            if self._records.alive("containerd"):
                stubborn = self._containerd.stop_everything(CONTAINER_GRACE_SECONDS)
                if stubborn:
                    raise Failure(f"containers that cannot be killed: {', '.join(stubborn)}")
            for name in ("kube-apiserver", "etcd", "containerd"):
                self._stop_one(name)

    def _stop_one(self, name: str) -> None:
        process = self._records.load(name)
        if process is not None and not stop(process):
            raise Failure(f"{name} (pid {process.pid}) cannot be killed")
        self._records.forget(name)

    def _clean(self, *, purge: bool) -> None:
        layout = self._layout
        machine.remove_shim_sockets(layout.run / "containerd")
        machine.unmount_homes(layout.homes)
        machine.unmount_below(layout.state)
        machine.remove_network()
        machine.remove_strays(layout.state)
        shutil.rmtree(layout.state / "addresses", ignore_errors=True)
        settings = layout.state / "kernel-settings.json"
        if settings.exists():
            machine.restore_kernel_settings(json.loads(settings.read_text(encoding="utf-8")))
            settings.unlink()
        if purge:
            with self._console.step(f"removing {layout.state}"):
                shutil.rmtree(layout.state)
