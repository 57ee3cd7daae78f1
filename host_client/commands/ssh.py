"""`podpipe shell`, and what has plain `ssh`, `scp`, `rsync` and editors reach a sandbox."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import anyio

from host_client import ssh
from host_client.commands.arguments import Add
from host_client.commands.attend import MARKER, STOP_SECONDS, end_marked, pass_on
from host_client.commands.lifecycle import opened, patiently
from host_client.commands.output import show, warn, watched
from host_client.commands.pipes import command_of
from host_client.config import Settings
from host_client.errors import EXIT_DONE
from host_client.kubectl import Kubectl
from host_client.status import Progress
from in_pod_server.contract import USER


async def shell(settings: Settings, arguments: argparse.Namespace) -> int:
    """Be a shell in a sandbox, or a command, until it ends.

    Returns:
        Its exit code, 128 + n where signal n ended it; 255 where the connection broke.
    """
    command = command_of(arguments.argv, f"podpipe shell {arguments.sandbox} -- ls -la")
    program = ssh.program(settings.environment)
    with ssh.own_keys(settings.environment) as keys:
        async with opened(settings, arguments) as host:
            with watched() as progress:
                session = await patiently(host, arguments.sandbox, progress)
            if news := host.sessions.news(session.sandbox.id):
                print(f"podpipe: before this {news}", file=sys.stderr)
            admission = await keys.admitted(host.sessions, arguments.sandbox)
            kubectl = host.kubectl
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        mark = f"{MARKER}={secrets.token_hex(8)}"
        argv = [
            *(program, *keys.configure(kubectl, admission), "-t" if terminal else "-T"),
            *(ssh.HOST, _remote(command, mark, terminal=terminal)),
        ]
        code = await _followed(argv, kubectl, admission.pod, "" if terminal else mark)
    if code == ssh.LOST:
        warn([f"the connection to sandbox {arguments.sandbox} broke, or its shell ended with 255"])
    return code


def _remote(command: list[str], mark: str, *, terminal: bool) -> str:
    """What the sandbox's shell is told to run, so that its end by a signal is told as a code."""
    if command:
        script = command[0] if len(command) == 1 else shlex.join(command)
        inner = f"/bin/bash -c {shlex.quote(script)}"
    else:
        inner = "/bin/bash -i" if terminal else "/bin/bash"
    return f"trap : INT QUIT; env {mark} {inner}; exit $?"


async def _followed(argv: list[str], kubectl: Kubectl, pod: str, mark: str) -> int:
    """Run ssh over our own stdin, stdout and stderr; its exit code.

    Args:
        argv: the call.
        kubectl: what it is started with, and its cluster.
        pod: where it leads.
        mark: what is ended there if we are interrupted; empty where a terminal's end does so.
    """
    process = await anyio.open_process(
        argv, env=kubectl.environment, stdin=None, stdout=None, stderr=None
    )
    try:
        code = await process.wait()
    except anyio.get_cancelled_exc_class():
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(STOP_SECONDS, shield=True):
            await process.wait()
            if mark:
                await end_marked(kubectl, pod, mark)
        raise
    return code if code >= 0 else 128 - code


async def config(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print an entry for ~/.ssh/config."""
    from host_client.install.entry import client_entry  # what a client's entry needs, this needs

    ssh.program(settings.environment)
    entry = client_entry(settings)
    async with opened(settings, arguments) as host:
        sandbox, _ = await host.launcher.find(arguments.sandbox)
    folder = ssh.shared_folder(settings.environment, sandbox.id)
    words = [f"{name}={value}" for name, value in entry.env.items()]
    proxy = shlex.join(
        ["/usr/bin/env", *words, entry.command, "ssh-proxy", sandbox.id, str(folder)]
    )
    alias = f"podpipe-{sandbox.name or sandbox.id}"
    text = ssh.stanza(alias, ssh.Keys(folder), sandbox.id, USER, proxy)
    warn(entry.warnings)
    show(arguments, text.rstrip(), {"host": alias, "config": text})
    return EXIT_DONE


async def proxy(settings: Settings, arguments: argparse.Namespace) -> int:
    """Be one connection of plain ssh, until either side ends it."""
    with ssh.shared_keys(Path(arguments.folder)) as keys:
        async with opened(settings, arguments) as host:
            with watched() as progress:
                await patiently(host, arguments.sandbox, _only_waits(progress))
            admission = await keys.admitted(host.sessions, arguments.sandbox)
            kubectl = host.kubectl
        process = await anyio.open_process(
            kubectl.exec_argv(admission.pod, admission.argv),
            env=kubectl.environment,
            stdin=None,
            stdout=None,
            stderr=subprocess.PIPE,
        )
        assert process.stderr
        try:
            # The sshd ends with 255 once ssh has left, which is no error.
            await pass_on(process.stderr, anyio.Event())
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with anyio.CancelScope(shield=True):
                await process.aclose()
    return EXIT_DONE


def _only_waits(progress: Progress) -> Progress:
    """Progress that is silent while nothing but the usual happens: ssh has a voice of its own."""

    def tell(text: str) -> None:
        if text != "connecting":
            progress(text)

    return tell


def add_to(add: Add) -> None:
    """Add these commands to the command line."""
    sub = add(
        "shell",
        shell,
        "Be a shell in a sandbox, by ssh, or a command with a terminal.",
        "shell work -- top",
        json=False,
    )
    sub.add_argument("argv", nargs=argparse.REMAINDER, metavar="[-- COMMAND …]")
    add(
        "ssh-config",
        config,
        "Print an entry for ~/.ssh/config, with which ssh, scp, rsync and editors reach a sandbox.",
        "ssh-config work >> ~/.ssh/config; ssh podpipe-work",
    )
    sub = add(
        "ssh-proxy",
        proxy,
        "Be one connection of ssh: what the entry of ssh-config starts.",
        "ssh-proxy work /run/user/1000/podpipe/config-work",
        json=False,
    )
    sub.add_argument("folder", metavar="FOLDER", help="where the keys lie while it runs")
