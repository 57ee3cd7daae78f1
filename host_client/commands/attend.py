"""A command in a sandbox over our own stdin, stdout and stderr, of which nothing outlives us.

Nothing in the pod ends what `kubectl exec` started when kubectl goes: to the container that looks
like the end of stdin, which many a command outlives. So the command is marked, and a second exec, the
lifeline, waits in the pod for the end of its own stdin, whatever ends that: us, by whatever signal,
its kubectl, or the network. Then it ends all that carries the mark. The command's bytes pass neither
through it nor through us.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.to_thread

from host_client.commands.output import warn
from host_client.errors import NotFound, PodpipeError

if TYPE_CHECKING:
    from host_client.kubectl import Kubectl

MARKER = "PODPIPE_CONNECT"
BEAT_SECONDS = 15.0
"""How often the lifeline carries a byte: a proxy cuts a stream that is idle."""
STOP_SECONDS = 10.0
VERDICT_SECONDS = 1.0
"""For kubectl to say how the command ended where both their connections did; and for what it still
wrote to stderr when it has ended."""

LIFELINE = """\
looks=5
while read -r word; do
  if [ "$word" ]; then looks=1; break; fi
done
signal=TERM
turn=0
while [ "$turn" -lt 15 ]; do
  found=
  for each in $(grep -slzxF -- "$0" /proc/[0-9]*/environ); do
    each=${each#/proc/}
    kill -s "$signal" "${each%/environ}" 2>/dev/null && found=1
  done
  turn=$((turn + 1))
  [ "$found" ] || looks=$((looks - 1))
  [ "$looks" -gt 0 ] || exit 0
  signal=0
  [ "$turn" -lt 10 ] || signal=KILL
  sleep 0.1
done
exit 0
"""
"""Waits for the end of stdin, and ends what carries the mark that is $0, by force what is still there
after a second. It looks more than once: what was just asked for may still be about to start. A word
says that the command has ended: then only what it left running is looked for."""

START = """\
if [ -z "$(type -P -- "$1")" ]; then
  if [ -d "$1" ]; then
    echo "podpipe: $1 is a folder of the sandbox: name the command in it" >&2
    exit 126
  elif [ -e "$1" ] && [ "${1#*/}" != "$1" ]; then
    echo "podpipe: $1 may not be executed in the sandbox: run chmod +x, or name its interpreter" >&2
    exit 126
  fi
  echo "podpipe: the sandbox has no command $1: give the path of one, from the home or absolute" >&2
  exit 127
fi
exec -- "$@"
"""
"""Becomes the command; says in one line why not."""

_VERDICT = re.compile(rb"command terminated with exit code \d+\n?\Z")
_VERDICT_BEGINS = b"command terminated with exit code "


async def attended(kubectl: Kubectl, pod: str, command: Sequence[str]) -> int:
    """Run a command until it ends, or until we are cancelled.

    Args:
        kubectl: for the cluster of the pod.
        pod: its name.
        command: program and arguments; no shell.

    Returns:
        Its exit code, as a shell tells it.
    """
    mark = f"{MARKER}={secrets.token_hex(8)}"
    started = ("/usr/bin/env", mark, "/bin/bash", "-c", START, "podpipe", *command)
    async with _lifeline(kubectl, pod, mark) as lifeline:
        process = await anyio.open_process(
            kubectl.exec_argv(pod, started),
            env=kubectl.environment,
            stdin=None,
            stdout=None,
            stderr=subprocess.PIPE,
        )
        assert process.stderr
        try:
            async with anyio.create_task_group() as tasks:
                drained = anyio.Event()
                tasks.start_soon(pass_on, process.stderr, drained)
                code = await process.wait()
                with anyio.move_on_after(VERDICT_SECONDS):
                    await drained.wait()
                tasks.cancel_scope.cancel()
            if code >= 0 and lifeline.stdin:
                with contextlib.suppress(anyio.BrokenResourceError):
                    await lifeline.stdin.send(b"ended\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with anyio.CancelScope(shield=True):
                await process.aclose()
    return code if code >= 0 else 128 - code


@asynccontextmanager
async def _lifeline(kubectl: Kubectl, pod: str, mark: str) -> AsyncIterator[anyio.abc.Process]:
    """Hold what ends all that carries the mark once we let go of it; wait until it has."""
    held = await anyio.open_process(
        kubectl.exec_argv(pod, ("sh", "-c", LIFELINE, mark)),
        env=kubectl.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A terminal's ctrl-C and its end are for us; this is what cleans up after them.
        start_new_session=True,
    )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_beat, held)
            tasks.start_soon(_watch, held)
            yield held
            tasks.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(STOP_SECONDS, shield=True):
            lost = held.returncode is not None
            if held.stdin:
                await held.stdin.aclose()
            await held.wait()
            if lost:
                await end_marked(kubectl, pod, mark)
        with anyio.CancelScope(shield=True):
            await held.aclose()


async def end_marked(kubectl: Kubectl, pod: str, mark: str) -> None:
    """End all in a pod that carries the mark, and warn where that cannot be done."""
    try:
        await kubectl.run("exec", "-i", "-q", pod, "--", "sh", "-c", LIFELINE, mark)
    except NotFound:
        pass  # it ended with its pod
    except PodpipeError as error:
        warn([f"what the command left in the sandbox may still run: {error}"])


async def _watch(held: anyio.abc.Process) -> None:
    """Let no command run that nothing would end.

    Raises:
        PodpipeError: the lifeline is gone.
    """
    await held.wait()
    await anyio.sleep(VERDICT_SECONDS)
    raise PodpipeError(
        "the connection to the sandbox was lost, and the command was ended; `podpipe status` shows "
        "how the sandbox is"
    )


async def _beat(held: anyio.abc.Process) -> None:
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while held.stdin:
            await anyio.sleep(BEAT_SECONDS)
            await held.stdin.send(b"\n")


async def pass_on(stderr: anyio.abc.ByteReceiveStream, drained: anyio.Event) -> None:
    """Copy kubectl's stderr to ours, less its own last line about the command's exit code."""
    held = b""
    async for chunk in stderr:
        held += chunk
        start = _verdict_start(held)
        ready, held = held[:start], held[start:]
        await anyio.to_thread.run_sync(_write, ready, abandon_on_cancel=True)
    await anyio.to_thread.run_sync(_write, _VERDICT.sub(b"", held), abandon_on_cancel=True)
    drained.set()


def _verdict_start(data: bytes) -> int:
    """Where kubectl's last line may begin in `data`; its length if nowhere."""
    if found := _VERDICT.search(data):
        return found.start()
    longest = min(len(data), len(_VERDICT_BEGINS))
    for size in range(longest, 0, -1):
        if data.endswith(_VERDICT_BEGINS[:size]):
            return len(data) - size
    return len(data)


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more; the command is not to stall
        while data:
            data = data[os.write(2, data) :]
