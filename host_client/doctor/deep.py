"""What shows only by trying: two sandboxes are made, one tries to reach the other, both go again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio

from host_client.config import Settings
from host_client.doctor.findings import RENDER, Finding
from host_client.errors import PodpipeError
from host_client.host import Host
from host_client.status import Progress

log = logging.getLogger(__name__)

TTL_MINUTES = 5
"""Of the two, in case that this process is killed: the reaper takes them then."""
ENFORCED_SECONDS = 10.0
"""How long a network plugin may take to notice a new pod."""
PORT = 20000

_LISTEN = f"""\
import socket
server = socket.create_server(("", {PORT}))
print(socket.gethostbyname(socket.gethostname()), flush=True)
while True:
    server.accept()[0].close()
"""
_REACH = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()
    print("reached")
except OSError as error:
    print(error)
"""


async def tried(settings: Settings, progress: Progress) -> AsyncIterator[Finding]:
    """Make two sandboxes and look out of them.

    Args:
        settings: whose they are.
        progress: told what is done meanwhile.
    """
    async with Host(settings) as host:
        made: list[str] = []
        had_home = True
        try:
            had_home = await host.backend.home() is not None
            progress("making two sandboxes")
            began = anyio.current_time()
            for _ in range(2):
                status = await host.launcher.create(ttl_minutes=TTL_MINUTES)
                made.append(status.sandbox.id)
                await host.open(made[-1])
            seconds = (anyio.current_time() - began) / 2
            yield Finding("sandbox made", "ok", f"made and answered in {seconds:.1f} s")
            progress(f"trying for {ENFORCED_SECONDS:.0f} s whether one reaches the other")
            yield await _network(host, made[0], made[1])
        except PodpipeError as error:
            yield Finding("sandbox made", "failure", str(error), "mend that, then try again")
        finally:
            progress("removing the sandboxes")
            with anyio.CancelScope(shield=True):
                for sandbox_id in made:
                    await host.launcher.destroy(sandbox_id)
                if made and not had_home:
                    await _forget_home(host)


async def _forget_home(host: Host) -> None:
    """Delete the home that was made for the two, unless somebody works in it by now."""
    try:
        await host.launcher.purge_home()
    except PodpipeError as error:  # most people may not; it is empty, and will be theirs
        log.info("the home that was made stays: %s", error)


async def _network(host: Host, listening: str, reaching: str) -> Finding:
    """Whether one sandbox reaches another, which no sandbox should."""
    started = await _call(host, listening, "start_background", command=_python(_LISTEN))
    read = await _call(
        host, listening, "read_output",
        process_id=started["process_id"], wait_seconds=10, pattern=r"\n",
    )  # fmt: skip
    address = str(read["data"]).strip()
    if await _reached(host, listening, address) != "reached":
        return Finding("network", "unknown", f"a sandbox does not reach itself at {address!r}")
    said = "reached"
    with anyio.move_on_after(ENFORCED_SECONDS):
        while said == "reached":
            said = await _reached(host, reaching, address)
    if said != "reached":
        return Finding("network", "ok", f"a sandbox does not reach another: {said}")
    fix = (
        f"have an administrator run: {RENDER}; where that is done, a network plugin that enforces "
        "NetworkPolicy is missing, such as Calico or Cilium"
    )
    return Finding("network", "failure", "a sandbox reaches another: no policy is enforced", fix)


async def _reached(host: Host, sandbox_id: str, address: str) -> str:
    return (await _run(host, sandbox_id, f"{_python(_REACH)} {address} {PORT}")).strip()


def _python(program: str) -> str:
    return f"/usr/bin/python3 -c '{program}'"


async def _run(host: Host, sandbox_id: str, command: str) -> str:
    return str((await _call(host, sandbox_id, "run_command", command=command))["stdout"])


async def _call(host: Host, sandbox_id: str, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await host.sessions.call(sandbox_id, tool, arguments)
    facts = answer.get("structuredContent")
    if answer.get("isError") or not isinstance(facts, dict):
        raise PodpipeError(f"{tool} in sandbox {sandbox_id} failed: {answer.get('content')}")
    return facts
