"""Breaking what a call goes through: the pipe's kubectl, the container, the pod, the API server."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import anyio

from host_client.errors import PodpipeError, PrerequisiteError
from host_client.host import Host
from host_client.pod_view import PodView
from in_pod_server.contract import CONTAINER, STOP_GRACE_SECONDS
from tests.soak.tally import API, POD, Fault
from tests.soak.tally import CONTAINER as CONTAINER_FAULT

ROOT = Path(__file__).resolve().parents[2]
KILL, FREEZE, SLOW = "kill kubectl", "freeze kubectl", "slow link"
WEIGHTS = {KILL: 5, FREEZE: 2, SLOW: 2, CONTAINER_FAULT: 2, POD: 2}
"""How often each kind comes, beside the API server's restarts."""
RESTARTS = 2
"""Container restarts of one pod; after more the kubelet waits ever longer, which proves nothing."""
DYING_SECONDS = STOP_GRACE_SECONDS + 5.0
"""A deleted pod's container is there for so long, and may end at any moment of it."""
PROBE_SECONDS = 150.0
"""A sandbox that gives no good answer for so long after a fault is stuck."""


def pipes(mark: str = "") -> list[int]:
    """Our own children that are pipes, by process id.

    Args:
        mark: in the command line of those that are meant, such as the pod's name.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes()
                mine = int(stat[1]) == os.getpid() and stat[0] != "Z"
                if mine and b"dial.py" in line and mark.encode() in line:
                    found.append(int(entry.name))
    return found


def send(number: signal.Signals, pids: list[int]) -> None:
    """Signal processes, gone or not."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def node_record(program: str) -> Path:
    """Where the node provider keeps the id of one of its programs."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return state / f"podpipe/node/run/{program}.pid"


def node_process(program: str) -> int:
    """The id of one of the node's programs, such as kubelet.

    Raises:
        PrerequisiteError: the cluster is not one of the node provider's.
    """
    record = node_record(program)
    if not record.exists():
        raise PrerequisiteError(f"only the node provider's {program} can be broken by a test")
    return int(record.read_text(encoding="utf-8").split()[0])


def restart_api_server() -> None:
    """End the node's API server by its recorded id; `scripts/cluster up` starts it again.

    Raises:
        PrerequisiteError: the cluster is not one of the node provider's.
    """
    os.kill(node_process("kube-apiserver"), signal.SIGKILL)
    bash = shutil.which("bash")
    assert bash
    up = subprocess.run(
        [bash, str(ROOT / "scripts/cluster"), "up"], check=False, capture_output=True, text=True
    )
    assert up.returncode == 0, up.stdout + up.stderr


class Ground(Protocol):
    """What a soak runs on; how to break it is the ground's own."""

    restarts_api: bool

    def mark(self, pod: PodView) -> str:
        """What the command line of a pipe into this pod holds."""

    async def end_container(self, pod: PodView) -> bool:
        """Kill everything in the container; False where that was not possible just then."""

    async def delete_pod(self, pod: PodView) -> bool:
        """Ask for the end of the pod, so that the next call makes another; likewise."""

    async def restart_api(self) -> None:
        """Take the API server away and bring it back."""


class RealCluster:
    """The ground of `scripts/bench soak`.

    Args:
        host: whose sandboxes are broken.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.restarts_api = node_record("kube-apiserver").exists()

    def mark(self, pod: PodView) -> str:
        """Its name is an argument of kubectl's."""
        return pod.name

    async def end_container(self, pod: PodView) -> bool:
        """As a command can, whose user is the daemon's; Linux spares the one that kills."""
        try:
            await self._host.kubectl.run(
                "exec", pod.name, "-c", CONTAINER, "--", "bash", "-c", "kill -9 -1"
            )
        except PodpipeError as error:
            return "137" in str(error)
        return True

    async def delete_pod(self, pod: PodView) -> bool:
        """By its uid; an API server that is away just then spares it."""
        try:
            return await self._host.kubectl.delete("pods", pod.name, uid=pod.uid)
        except PodpipeError:
            return False

    async def restart_api(self) -> None:
        """As a crash."""
        await anyio.to_thread.run_sync(restart_api_server)


class Injector:
    """Breaks one sandbox, or the API server of all, now and then.

    Args:
        host: whose sandboxes.
        ground: how to break them.
        faults: told of each.
        dice: when and what; seeded.
        freeze_seconds: how long a kubectl is stopped: longer than the heartbeat takes to notice.
        pause_seconds: between a good answer and the next fault, at the mean.
    """

    def __init__(
        self,
        host: Host,
        ground: Ground,
        faults: list[Fault],
        dice: random.Random,
        *,
        freeze_seconds: float,
        pause_seconds: float,
    ) -> None:
        self._host = host
        self._ground = ground
        self._faults = faults
        self._dice = dice
        self._freeze = freeze_seconds
        self._pause = pause_seconds
        self._restarts: dict[str, int] = {}

    async def break_sandbox(self, sandbox: str, over: Callable[[], bool]) -> None:
        """Faults of one sandbox, one after the other, until `over`."""
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not over():
            await self._rest(self._pause, over)
            if not over():
                await self._inject(self._dice.choices(kinds, weights)[0], sandbox)

    async def break_api(self, sandboxes: list[str], pause: float, over: Callable[[], bool]) -> None:
        """Restarts of the API server, until `over`."""
        while not over():
            await self._rest(pause, over)
            if over():
                return
            fault = self._begun(API, "")
            await self._ground.restart_api()
            fault.ended = time.monotonic()
            for sandbox in sandboxes:
                await self._probe(fault, sandbox)

    async def _rest(self, mean: float, over: Callable[[], bool]) -> None:
        until = time.monotonic() + mean * self._dice.uniform(0.3, 1.7)
        while time.monotonic() < until and not over():  # noqa: ASYNC110 - `over` is a clock
            await anyio.sleep(0.2)

    def _begun(self, kind: str, sandbox: str) -> Fault:
        fault = Fault(kind, sandbox, time.monotonic())
        self._faults.append(fault)
        return fault

    async def _inject(self, kind: str, sandbox: str) -> None:
        session = self._host.sessions.existing(sandbox)
        if session is None:
            return  # it is coming up: there is nothing to break
        pod = session.pod
        if kind == CONTAINER_FAULT:
            self._restarts[pod.uid] = self._restarts.get(pod.uid, 0) + 1
            if self._restarts[pod.uid] > RESTARTS:
                kind = POD
        fault = self._begun(kind, sandbox)
        mine = pipes(self._ground.mark(pod))
        async with anyio.create_task_group() as tasks:
            if kind in (FREEZE, SLOW):  # noticed while it lasts, if all is well
                tasks.start_soon(self._probe, fault, sandbox)
                await self._stutter(mine, 0.2 if kind == SLOW else self._freeze)
                fault.ended = time.monotonic()
                return
            if kind == KILL:
                send(signal.SIGKILL, mine)
                done = bool(mine)
            elif kind == CONTAINER_FAULT:
                done = await self._ground.end_container(pod)
            else:
                done = await self._ground.delete_pod(pod)
            if not done:
                self._faults.remove(fault)
                return
            fault.ended = time.monotonic() + (DYING_SECONDS if kind == POD else 0)
            await self._probe(fault, sandbox)

    async def _stutter(self, pids: list[int], stop: float) -> None:
        """Stop processes again and again, for as long as a freeze takes."""
        until = time.monotonic() + self._freeze
        try:
            while time.monotonic() < until:
                send(signal.SIGSTOP, pids)
                await anyio.sleep(stop)
                send(signal.SIGCONT, pids)
                await anyio.sleep(stop / 4)
        finally:
            send(signal.SIGCONT, pids)

    async def _probe(self, fault: Fault, sandbox: str) -> None:
        """Measure until the sandbox gives a good answer again, over whatever pipe."""
        with anyio.move_on_after(PROBE_SECONDS):
            while True:
                try:
                    answer = await self._host.sessions.call(
                        sandbox, "run_command", {"command": "true"}
                    )
                except PodpipeError:
                    await anyio.sleep(0.05)
                    continue
                if (answer.get("structuredContent") or {}).get("exit_code") == 0:
                    took = time.monotonic() - fault.began
                    fault.recovered = max(took, fault.recovered or 0.0)
                    return
        fault.recovered = None
