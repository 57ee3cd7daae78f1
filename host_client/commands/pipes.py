"""podpipe as a pipe: `serve` for an MCP client, `connect` to what runs in a sandbox."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import watched
from host_client.config import Settings
from host_client.errors import EXIT_DONE
from in_pod_server.contract import CONTAINER, DIAL_ARGV

if TYPE_CHECKING:
    from host_client.kubectl import Kubectl

MARKER = "PODPIPE_CONNECT"
STOP_SECONDS = 10.0
STOP = """\
stop() {
  found=
  for each in $(grep -slzxF -- "$0" /proc/[0-9]*/environ); do
    each=${each#/proc/}
    kill -s "$1" "${each%/environ}" 2>/dev/null && found=1
  done
}
stop TERM
for _ in 1 2 3 4 5 6 7 8 9 10; do
  [ "$found" ] || exit 0
  sleep 0.1
  stop 0
done
stop KILL
exit 0
"""
"""Ends what carries the marker that is $0, by force what is still there after a second."""


async def serve(settings: Settings, arguments: argparse.Namespace) -> int:
    """Serve MCP until stdin ends."""
    from host_client.server import serve_stdio  # only serve needs a server

    await serve_stdio(settings, arguments.bound)
    return EXIT_DONE


async def connect(settings: Settings, arguments: argparse.Namespace) -> int:
    """Be a pipe to the daemon, or to another command until that ends.

    Returns:
        The command's exit code.
    """
    command = after_dashes(arguments.argv)
    async with opened(settings, bound=arguments.sandbox) as host:
        with watched() as progress:
            session = await patiently(host, arguments.sandbox, progress)
        kubectl, pod = host.kubectl, session.pod.name
    sys.stdout.flush()
    if not command:
        argv = kubectl.exec_argv(pod, DIAL_ARGV)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # Byte-exact: nothing of ours stays in between.
        os.execve(argv[0], argv, kubectl.environment)  # noqa: S606
    return await _attended(kubectl, pod, command)


async def _attended(kubectl: Kubectl, pod: str, command: Sequence[str]) -> int:
    """Run a command over our own stdin, stdout and stderr, and leave nothing of it if we must end.

    Nothing in the pod ends what `kubectl exec` started when kubectl goes: to the container that
    looks like the end of stdin, which many a command outlives. So the command is marked.
    """
    marker = f"{MARKER}={secrets.token_hex(8)}"
    argv = kubectl.exec_argv(pod, ["/usr/bin/env", marker, *command])
    process = await anyio.open_process(
        argv, env=kubectl.environment, stdin=None, stdout=None, stderr=None
    )
    ended = False
    try:
        code = await process.wait()
        ended = code >= 0
    finally:
        if not ended:
            with anyio.move_on_after(STOP_SECONDS, shield=True):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                stop = ("sh", "-c", STOP, marker)
                await kubectl.run("exec", "-i", "-q", pod, "-c", CONTAINER, "--", *stop)
    return code if ended else 128 - code


def after_dashes(words: Sequence[str]) -> list[str]:
    """A command without the `--` that stands before it."""
    return list(words[1:] if words[:1] == ["--"] else words)
