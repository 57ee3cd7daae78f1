"""What the reaper is put to, over the stub and on the real cluster alike: races, and killed creates."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import anyio

from host_client import manifest
from host_client.backends.pod import PodBackend
from host_client.clock import utc_now
from host_client.config import Settings
from host_client.errors import SandboxNotFound
from host_client.kubectl import Kubectl
from host_client.launcher import Launcher
from host_client.pod_view import PodView
from host_client.reaper import sweep
from host_client.sandbox import Sandbox, draft_sandbox
from tests.clocks import Moved

ROOT = Path(__file__).resolve().parents[1]

# --- the race --------------------------------------------------------------------------------------

RACERS = 10
"""Sandboxes of one round: as many extensions meet one sweep."""
ROUND_SECONDS = 60.0


@dataclass(slots=True)
class Race:
    """How many extensions were made in time, and how many sandboxes were reaped before."""

    extended: int = 0
    reaped: int = 0


async def race(settings: Settings, rounds: int, reaper: Settings | None = None) -> Race:
    """Extend sandboxes while they are reaped; every extension that was granted has to hold.

    The extending host's clock is behind the API server's, so it does not see that they are over.

    Args:
        settings: of the extending host.
        rounds: of `RACERS` sandboxes each.
        reaper: of the reaping one, if that has rights of its own.
    """
    kubectl = Kubectl(settings)
    backend = PodBackend(kubectl, settings)

    async def no_pod(_: Sandbox, __: PodView) -> None:
        raise AssertionError("nothing here is to be connected to")

    launcher = Launcher(backend, settings, no_pod, Moved(lambda: utc_now() - timedelta(minutes=10)))
    tally = Race()
    for _ in range(rounds):
        over = utc_now() - timedelta(minutes=5)
        records = [
            manifest.record(
                replace(
                    draft_sandbox(settings, utc_now() - timedelta(minutes=30)),
                    expires_at=over,
                    state="Running",
                ),
                settings,
            )
            for _ in range(RACERS)
        ]
        bundle = {"apiVersion": "v1", "kind": "List", "items": records}
        await kubectl.run("create", "-f", "-", stdin=json.dumps(bundle))
        ids = [record["metadata"]["labels"]["podpipe/sandbox"] for record in records]
        granted: dict[str, bool] = {}

        async def extend(sandbox_id: str, answers: dict[str, bool], delay: float) -> None:
            await anyio.sleep(delay)
            try:
                await launcher.extend(sandbox_id, 60)
                answers[sandbox_id] = True
            except SandboxNotFound:
                answers[sandbox_id] = False

        with anyio.fail_after(ROUND_SECONDS):
            async with anyio.create_task_group() as tasks:
                for sandbox_id in ids:
                    tasks.start_soon(extend, sandbox_id, granted, random.random())
                await anyio.sleep(random.random())
                report = await sweep(Kubectl(reaper or settings))
        assert not report.failed, report.failed
        live = {status.sandbox.id for status in await launcher.list_all()} & set(ids)
        assert live == {sandbox_id for sandbox_id, held in granted.items() if held}
        tally.extended += sum(granted.values())
        tally.reaped += len(ids) - sum(granted.values())
        for sandbox_id in live:
            await backend.delete((await launcher.find(sandbox_id))[0])
    return tally


# --- a create whose host is killed -----------------------------------------------------------------

When = Literal["during", "after"]

_KILLER = """\
#!{python} -IS
import fcntl, os, signal, subprocess, sys
from pathlib import Path
folder, real = Path({folder!r}), {real!r}
with open(folder / "killer.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    begun = folder / "begun"
    verb = next(a for a in sys.argv[1:] if not a.startswith("--"))
    with begun.open("a") as log:
        log.write(verb + "\\n")
    seen = begun.read_text().splitlines().count(verb)
when = os.environ["KILL_WHEN"]
mine = f"{{verb}} {{seen}}" == os.environ["KILL_AT"]
host = os.getppid()
running = subprocess.Popen([real, *sys.argv[1:]], stdout=subprocess.PIPE if mine else None)
if mine and (when == "during" or "exec" in sys.argv):
    os.kill(host, signal.SIGKILL)
running.communicate()
if mine and when == "after":
    try:
        os.kill(host, signal.SIGKILL)
    except ProcessLookupError:
        pass
sys.exit(running.returncode)
"""
"""A kubectl that kills the host that called it: while the call is under way, or before its answer."""


VERBS = ("create", "get", "apply", "exec", "patch")
"""All that a create calls, the last of which says in the record that it is made."""


@dataclass(slots=True)
class Killed:
    """One create whose host was killed.

    Args:
        call: the kubectl call at which it was: its verb, and the how-manieth of that verb.
        finished: whether the record said by then that the sandbox is made.
    """

    call: str
    finished: bool


def killed_creates(
    environment: Mapping[str, str],
    folder: Path,
    when: When,
    after_each: Callable[[Killed], None],
) -> list[Killed]:
    """Kill the host of a create once at each of its kubectl calls.

    Args:
        environment: of the host, all of it.
        folder: of this test.
        when: in each call.
        after_each: looks at what is left, and removes it.
    """
    killer = folder / "killer"
    killer.write_text(
        _KILLER.format(
            python=sys.executable, folder=str(folder), real=environment["PODPIPE_KUBECTL"]
        ),
        encoding="utf-8",
    )
    killer.chmod(0o755)
    killed: list[Killed] = []
    for verb in VERBS:
        for number in itertools.count(1):
            (folder / "begun").unlink(missing_ok=True)
            host = subprocess.run(
                [sys.executable, "-m", "host_client", "create", "--name", "work"],
                env=dict(environment) | {
                    "PYTHONPATH": str(ROOT), "PODPIPE_KUBECTL": str(killer),
                    "KILL_FOLDER": str(folder),
                    "KILL_WHEN": when, "KILL_AT": f"{verb} {number}",
                },
                cwd=folder, capture_output=True, timeout=120, check=False,
            )  # fmt: skip
            assert host.returncode in (0, -signal.SIGKILL), host.stderr
            begun = _settled(folder)
            # While it is under way, nobody can tell whether the last call has been made.
            made = "patch" in begun
            if made and verb != "patch":
                after_each(Killed("", made))
                break
            killed.append(Killed(f"{verb} {number}", made))
            after_each(killed[-1])
            if made:
                break
    return killed


def _settled(folder: Path) -> list[str]:
    """The verbs of the calls that were begun, once all of them have ended: some outlive the host."""
    deadline = time.monotonic() + 60
    while left := _calls(folder):
        assert time.monotonic() < deadline, f"calls outlive their host by a minute: {left}"
        time.sleep(0.02)
    return (folder / "begun").read_text("utf-8").splitlines()


def _calls(folder: Path) -> list[str]:
    """Processes that the host started for a call, even those that are not kubectl yet."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            started_here = f"KILL_FOLDER={folder}\0".encode() in (process / "environ").read_bytes()
            line = (process / "cmdline").read_bytes()
            if started_here and line and b"in_pod_server" not in line:
                found.append(f"{process.name}: {line!r}")
    return found
