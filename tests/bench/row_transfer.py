"""Files both ways, verified, beside `kubectl cp`, which verifies nothing, and the bare pipe."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from host_client.kubectl import SPDY
from in_pod_server.contract import CONTAINER, HOME
from tests.bench.harness import Row, Sample, Sides
from tests.bench.lab import Lab
from tests.bench.row_run import PODPIPE

LARGE_BYTES = 100 * 1024 * 1024
SMALL_FILES = 2000
SMALL_BYTES = 2048

MEMORY = "/dev/shm"
"""Where this machine's side lies, if it can: its disk is not what is compared."""

Copy = Callable[[], Awaitable[None]]


class Bench:
    """A folder here and one in the sandbox, both emptied before each sample.

    Args:
        lab: the cluster.
        here: an empty folder of this machine.
        source: what is copied, below `here`.
    """

    def __init__(self, lab: Lab, here: Path, source: Path, sandbox: str, pod: str) -> None:
        self.lab = lab
        self.here = here
        self.source = source
        self.sandbox = sandbox
        self.pod = pod
        self.there = f"bench/{source.name}"
        self.back = here / "back"

    async def clear(self, folder: str = "") -> None:
        """Have nothing at the sandbox's side, or in a folder there.

        Many files are moved away, and go with the home: ext4 passes over each inode that was freed
        lately for every file that it makes, and 2,000 took either side four times as long.
        """
        place = f"bench/{folder}"
        away = f"mkdir -p ~/gone; mv ~/{place} ~/gone/{secrets.token_hex(4)}"
        await self._in_pod(f"if test -d ~/{place}/small; then {away}; else rm -rf ~/{place}; fi")

    async def _in_pod(self, script: str) -> None:
        await self.lab.type("exec", self.pod, "-c", CONTAINER, "--", "sh", "-c", script)

    async def reset(self) -> None:
        # Stored too: only ours waits for the disk, and would wait for what the other side left there.
        await self.clear("up")
        await self._in_pod("mkdir -p ~/bench/up; sync -f ~/bench")
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.back, ignore_errors=True))
        self.back.mkdir()

    async def put(self) -> None:
        await self.lab.host.transfers.put(self.sandbox, [str(self.source)], "bench/up/")

    async def get(self) -> None:
        await self.lab.host.transfers.get(self.sandbox, self.there, f"{self.back}/")

    async def cp_up(self) -> None:
        place = f"{self.pod}:{HOME}/bench/up/{self.source.name}"
        await self.lab.type("cp", str(self.source), place, "-c", CONTAINER)

    async def cp_down(self) -> None:
        place = str(self.back / self.source.name)
        await self.lab.type("cp", f"{self.pod}:{HOME}/{self.there}", place, "-c", CONTAINER)

    async def rsync_up(self) -> None:
        await self._rsync(str(self.source), f"{self.pod}:{HOME}/bench/up/")

    async def rsync_down(self) -> None:
        await self._rsync(f"{self.pod}:{HOME}/{self.there}", f"{self.back}/")

    async def _rsync(self, source: str, target: str) -> None:
        """rsync whose remote shell is `kubectl exec -i`; it sums what it writes, but not what it reads
        back."""
        kubectl = self.lab.kubectl.argv("exec", "-i")
        shell = self.here / "shell"
        shell.write_text(
            f'#!/bin/sh\npod=$1; shift\nexec {shlex.join(kubectl)} "$pod" -c {CONTAINER} -- "$@"\n'
        )
        shell.chmod(0o700)
        argv = ["rsync", "-a", "--whole-file", "-e", str(shell), source, target]
        await anyio.run_process(argv, env=self.lab.kubectl.environment)

    async def cat_down(self) -> None:
        """The bare pipe, over our carrier: what no transfer over `kubectl exec` can beat."""
        await self._piped(
            self.lab.kubectl.argv(
                "exec", self.pod, "-c", CONTAINER, "--", "cat", f"{HOME}/{self.there}"
            ),
            stdout=self.back / "cat",
        )

    async def cat_up(self) -> None:
        await self._piped(
            self.lab.kubectl.exec_argv(self.pod, ["sh", "-c", "cat > ~/bench/up/cat"]),
            stdin=self.source,
        )

    async def cli_put(self) -> None:
        await self._cli("put", self.sandbox, str(self.source), "bench/up/")

    async def _cli(self, *argv: str) -> None:
        environment = dict(self.lab.settings.environment)
        environment["PODPIPE_USER"] = self.lab.settings.user
        await anyio.run_process([str(PODPIPE), *argv], env=environment)

    async def _piped(
        self, argv: list[str], *, stdin: Path | None = None, stdout: Path | None = None
    ) -> None:
        def run() -> None:
            with (
                (stdin or Path(os.devnull)).open("rb") as source,
                (stdout or Path(os.devnull)).open("wb") as sink,
            ):
                environment = {**SPDY, **self.lab.kubectl.environment}
                subprocess.run(argv, stdin=source, stdout=sink, env=environment, check=True)

        await anyio.to_thread.run_sync(run)

    def timed(self, copy: Copy) -> Callable[[], Awaitable[Sample]]:
        async def side() -> Sample:
            await self.reset()
            began = time.perf_counter()
            await copy()
            return Sample(time.perf_counter() - began)

        return side


def _large(folder: Path) -> Path:
    path = folder / "large"
    path.write_bytes(os.urandom(LARGE_BYTES))
    return path


def _small(folder: Path) -> Path:
    path = folder / "small"
    for number in range(SMALL_FILES):
        place = path / f"{number % 20:02}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:04}.txt").write_bytes(os.urandom(SMALL_BYTES))
    return path


def _against(
    make: Callable[[Path], Path], ours: Callable[[Bench], Copy], other: Callable[[Bench], Copy]
) -> Callable[[Lab], AbstractAsyncContextManager[Sides]]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        session = await lab.sandbox()
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="podpipe-bench-", dir=memory) as folder:
            source = await anyio.to_thread.run_sync(make, Path(folder))
            bench = Bench(lab, Path(folder), source, session.sandbox.id, session.pod.name)
            await lab.host.transfers.put(session.sandbox.id, [str(source)], "bench/")
            yield Sides(bench.timed(ours(bench)), bench.timed(other(bench)))
            await bench.clear()

    return sides


_MIB = LARGE_BYTES // (1024 * 1024)

ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="put-large",
        ours=f"{_MIB} MiB into the sandbox, verified",
        baseline="kubectl cp, unverified",
        sides=_against(_large, lambda b: b.put, lambda b: b.cp_up),
        runs=7,
        target=1.0,
    ),
    Row(
        name="get-large",
        ours=f"{_MIB} MiB out of the sandbox, verified",
        baseline="kubectl cp, unverified",
        sides=_against(_large, lambda b: b.get, lambda b: b.cp_down),
        runs=7,
        target=1.0,
    ),
    Row(
        name="put-large-pipe",
        ours=f"{_MIB} MiB into the sandbox, verified",
        baseline="kubectl exec -i cat > file, the bare pipe over SPDY",
        sides=_against(_large, lambda b: b.put, lambda b: b.cat_up),
        runs=7,
    ),
    Row(
        name="get-large-pipe",
        ours=f"{_MIB} MiB out of the sandbox, verified",
        baseline="kubectl exec cat file, the bare pipe over SPDY",
        sides=_against(_large, lambda b: b.get, lambda b: b.cat_down),
        runs=7,
    ),
    Row(
        name="put-small",
        ours=f"{SMALL_FILES} files of {SMALL_BYTES} bytes into the sandbox, each verified",
        baseline="kubectl cp, unverified",
        sides=_against(_small, lambda b: b.put, lambda b: b.cp_up),
        runs=7,
        target=1.0,
    ),
    Row(
        name="get-small",
        ours=f"{SMALL_FILES} files of {SMALL_BYTES} bytes out of the sandbox, each verified",
        baseline="kubectl cp, unverified",
        sides=_against(_small, lambda b: b.get, lambda b: b.cp_down),
        runs=7,
        target=1.0,
    ),
    Row(
        name="put-large-rsync",
        ours=f"{_MIB} MiB into the sandbox, verified",
        baseline="rsync -e 'kubectl exec -i', which sums as it writes",
        sides=_against(_large, lambda b: b.put, lambda b: b.rsync_up),
        runs=7,
    ),
    Row(
        name="get-large-rsync",
        ours=f"{_MIB} MiB out of the sandbox, verified",
        baseline="rsync -e 'kubectl exec -i', which sums as it writes",
        sides=_against(_large, lambda b: b.get, lambda b: b.rsync_down),
        runs=7,
    ),
    Row(
        name="put-small-rsync",
        ours=f"{SMALL_FILES} files of {SMALL_BYTES} bytes into the sandbox, each verified",
        baseline="rsync -e 'kubectl exec -i', which sums as it writes",
        sides=_against(_small, lambda b: b.put, lambda b: b.rsync_up),
        runs=7,
    ),
    Row(
        name="get-small-rsync",
        ours=f"{SMALL_FILES} files of {SMALL_BYTES} bytes out of the sandbox, each verified",
        baseline="rsync -e 'kubectl exec -i', which sums as it writes",
        sides=_against(_small, lambda b: b.get, lambda b: b.rsync_down),
        runs=7,
    ),
    Row(
        name="put-small-cli",
        ours="the same by `podpipe put`, which starts Python and looks the sandbox up",
        baseline="kubectl cp, unverified",
        sides=_against(_small, lambda b: b.cli_put, lambda b: b.cp_up),
        runs=3,
    ),
)
