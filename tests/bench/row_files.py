"""Reading a file through the session beside `kubectl exec cat`, same kubectl, same pod."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from host_client.errors import PodpipeError
from in_pod_server.contract import CONTAINER, HOME
from tests.bench.harness import Row, Sides, timed
from tests.bench.lab import Lab, checked

PLACE = "bench-read"


def _against_cat(size: int) -> Callable[[Lab], AbstractAsyncContextManager[Sides]]:
    @asynccontextmanager
    async def sides(lab: Lab) -> AsyncIterator[Sides]:
        session = await lab.sandbox()
        ref = session.sandbox.id
        # Source code, more or less: that is what is read as text.
        line = f"    value = {os.urandom(12).hex()!r}  # and so on\n"
        text = (line * (size // len(line) + 1))[:size]
        checked(await lab.host.sessions.call(ref, "write_file", {"path": PLACE, "content": text}))

        async def read() -> None:
            """As a client does that wants all of it: on and on from where the last piece ended."""
            pieces, offset = [], 0
            while offset < size:
                facts = checked(
                    await lab.host.sessions.call(
                        ref,
                        "read_file",
                        {"path": PLACE, "offset": offset, "max_bytes": size},
                        reads_only=True,
                    )
                )
                pieces.append(facts["content"])
                offset = facts["next_offset"] or size
            if "".join(pieces) != text:
                raise PodpipeError("what was read is not what was written")

        async def cat() -> None:
            read = await lab.type(
                "exec", session.pod.name, "-c", CONTAINER, "--", "cat", f"{HOME}/{PLACE}"
            )
            if read != text:
                raise PodpipeError("what cat gave is not what was written")

        yield Sides(timed(read), timed(cat))
        checked(await lab.host.sessions.call(ref, "delete_file", {"path": PLACE}))

    return sides


ROWS: tuple[Row[Lab], ...] = (
    Row(
        name="read-64k",
        ours="read_file of 64 KiB by Sessions.call",
        baseline="kubectl exec POD -- cat of it",
        sides=_against_cat(64 * 1024),
        runs=20,
        target=1 / 10,
    ),
    Row(
        name="read-5m",
        ours="read_file of 5 MiB by Sessions.call, in as many calls as it takes",
        baseline="kubectl exec POD -- cat of it",
        sides=_against_cat(5 * 1024 * 1024),
        runs=10,
        target=2.0,
    ),
)
