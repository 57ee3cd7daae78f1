"""The calls of a soak: each checks its own answer, and puts down how it ended."""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio

from host_client.errors import (
    ApiUnreachable,
    ContainerRestarted,
    LaunchFailed,
    PodpipeError,
    PodReplaced,
    SessionLost,
    StillStarting,
)
from host_client.host import Host
from tests.soak.tally import API, CONTAINER, POD, Call, Tally

IDS = "ids"
"""The file of the home to which commands append their ids."""
PATIENCE_SECONDS = 90.0
"""A call that has not ended by then hangs: no call may take longer than 50 s."""
BIG = 300_000
ENDED = (CONTAINER, POD)


class Workload:
    """What the workers of one soak do.

    Args:
        host: whose sandboxes.
        tally: told of each call.
        over: whether to begin no further one.
        long_seconds: how long a long command takes, at most.
    """

    def __init__(
        self, host: Host, tally: Tally, over: Callable[[], bool], *, long_seconds: float
    ) -> None:
        self._host = host
        self._tally = tally
        self._over = over
        self._long = long_seconds
        self._numbers = itertools.count(1)
        self._logs: set[tuple[str, str]] = set()

    async def work(self, sandbox: str, dice: random.Random) -> None:
        """One worker: one call after the other, of every sort."""
        sorts = (self._short, self._slow, self._outlasting, self._background, self._files,
                 self._append, self._list, self._big)  # fmt: skip
        weights = (6, 3, 1, 1, 3, 2, 1, 1)
        while not self._over():
            await dice.choices(sorts, weights)[0](sandbox, dice)

    def _name(self) -> str:
        return f"c{next(self._numbers)}"

    async def _call(
        self,
        sandbox: str,
        tool: str,
        arguments: dict[str, Any],
        right: Callable[[dict[str, Any]], bool],
        *,
        name: str = "",
        since: float | None = None,
        reads_only: bool = False,
    ) -> dict[str, Any] | None:
        """Make a call and put down how it ended.

        Args:
            sandbox: where.
            tool: of the daemon.
            arguments: for it.
            right: whether its structured content is the right one.
            name: the id that it leaves behind, if it does.
            since: when the process that it asks about was started.
            reads_only: as of `Sessions.call`.

        Returns:
            The structured content of a right answer, None for any other ending.
        """
        began = time.monotonic()
        call = Call(name, sandbox, tool, began if since is None else since, began)
        self._tally.calls.append(call)
        try:
            with anyio.fail_after(PATIENCE_SECONDS):
                answer = await self._host.sessions.call(
                    sandbox, tool, arguments, reads_only=reads_only
                )
        except (PodpipeError, TimeoutError) as error:
            call.said = f"{type(error).__name__}: {error}"
            call.ending, call.cause = _ending(error)
            answer = {}
        finally:
            call.ended = time.monotonic()
        facts: dict[str, Any] | None = answer.get("structuredContent")
        if answer.get("isError"):
            call.ending, call.cause = "refused", ENDED
            call.said = str(answer["content"])[:300]
        elif facts is not None and right(facts):
            call.ending = "answered"
            return facts
        elif answer:
            # A pod that ends stops its commands and says so.
            call.ending = "refused" if (facts or {}).get("state") == "killed" else "lost"
            call.cause, call.said = ENDED, f"a wrong answer: {str(facts)[:300]}"
        if call.ending != "answered":
            await anyio.sleep(0.2)  # whoever is told that a sandbox is starting does not spin
        return None

    async def _run(self, sandbox: str, name: str, script: str) -> None:
        await self._call(
            sandbox,
            "run_command",
            {"command": f"echo {name} >> {IDS}; {script}; echo {name}"},
            lambda facts: facts["exit_code"] == 0 and facts["stdout"] == f"{name}\n",
            name=name,
        )

    async def _short(self, sandbox: str, _: random.Random) -> None:
        await self._run(sandbox, self._name(), "true")

    async def _slow(self, sandbox: str, dice: random.Random) -> None:
        longest = self._long * dice.choice((1, 1, 1, 1, 1, 1, 1, 4))  # now and then, through it all
        await self._run(sandbox, self._name(), f"sleep {dice.uniform(0, longest):.2f}")

    async def _outlasting(self, sandbox: str, dice: random.Random) -> None:
        """A command that is still running when its call has to answer, and is followed then."""
        name = self._name()
        seconds = dice.uniform(1, self._long)
        since = time.monotonic()
        facts = await self._call(
            sandbox,
            "run_command",
            {"command": f"echo {name} >> {IDS}; sleep {seconds:.2f}; echo {name}",
             "wait_seconds": min(0.5, seconds / 3)},
            lambda facts: facts["state"] == "running" or facts["stdout"] == f"{name}\n",
        )  # fmt: skip
        if facts and facts["state"] == "running":
            await self._follow(sandbox, name, facts["process_id"], since)

    async def _background(self, sandbox: str, _: random.Random) -> None:
        name = self._name()
        since = time.monotonic()
        facts = await self._call(
            sandbox,
            "start_background",
            {"command": f"echo {name} >> {IDS}; sleep 1; echo {name}"},
            lambda facts: bool(facts["process_id"]),
        )
        if facts:
            await self._follow(sandbox, name, facts["process_id"], since)

    async def _follow(self, sandbox: str, name: str, process: str, since: float) -> None:
        await self._call(
            sandbox,
            "read_output",
            {"process_id": process, "until_end": True, "wait_seconds": 40},
            lambda facts: facts["data"] == f"{name}\n" and facts["eof"],
            since=since,
            reads_only=True,
        )

    async def _files(self, sandbox: str, dice: random.Random) -> None:
        """Written once, changed once, moved once, read as it should be: twice would be refused."""
        name = self._name()
        content = f"{name} {dice.random()}\n"
        steps: list[tuple[str, dict[str, Any], bool]] = [
            ("write_file", {"path": f"f-{name}", "content": f"old {content}", "create_only": True},
             False),
            ("edit_file", {"path": f"f-{name}", "old_text": "old ", "new_text": ""}, False),
            ("move_file", {"path": f"f-{name}", "new_path": f"g-{name}"}, False),
        ]  # fmt: skip
        for tool, arguments, reads in steps:
            if not await self._call(sandbox, tool, arguments, bool, reads_only=reads):
                return
        await self._call(
            sandbox,
            "read_file",
            {"path": f"g-{name}"},
            lambda facts: facts["content"] == content,
            reads_only=True,
        )

    async def _append(self, sandbox: str, dice: random.Random) -> None:
        name = self._name()
        log = f"log-{sandbox}-{dice.randrange(3)}"
        self._logs.add((sandbox, log))
        await self._call(
            sandbox,
            "write_file",
            {"path": log, "content": f"{name}\n", "append": True},
            bool,
            name=name,
        )

    async def _list(self, sandbox: str, _: random.Random) -> None:
        await self._call(
            sandbox, "list_processes", {}, lambda facts: "processes" in facts, reads_only=True
        )

    async def _big(self, sandbox: str, dice: random.Random) -> None:
        """More than one message may hold, there and back."""
        name = self._name()
        data = dice.randbytes(BIG)
        put = {"path": f"b-{name}", "content": base64.b64encode(data).decode(),
               "encoding": "base64", "create_only": True}  # fmt: skip
        if not await self._call(sandbox, "write_file", put, bool):
            return
        got = hashlib.sha256()
        offset = 0
        while offset < BIG:
            facts = await self._call(
                sandbox,
                "read_file",
                {"path": f"b-{name}", "encoding": "base64", "offset": offset},
                lambda facts: bool(facts["content"]),
                reads_only=True,
            )
            if not facts:
                return
            part = base64.b64decode(facts["content"])
            got.update(part)
            offset += len(part)
        if got.digest() != hashlib.sha256(data).digest():
            self._tally.calls[-1].ending = "lost"
            self._tally.calls[-1].said = f"b-{name} came back changed"

    async def count(self, sandboxes: list[str]) -> Counter[str]:
        """How often each id was left behind. All sandboxes of a user share the home."""
        ran: Counter[str] = Counter()
        for sandbox, path in [(sandboxes[0], IDS), *sorted(self._logs)]:
            answer = await self._host.sessions.call(sandbox, "file_info", {"path": path})
            if answer.get("isError"):
                continue
            offset = 0
            content = ""
            while True:
                answer = await self._host.sessions.call(
                    sandbox, "read_file", {"path": path, "offset": offset}
                )
                facts = answer["structuredContent"]
                content += facts["content"]
                if not facts["truncated"]:
                    break
                offset = facts["next_offset"]
            ran.update(content.split())
        return ran


def _ending(error: Exception) -> tuple[Any, tuple[str, ...]]:
    """What an error claims, and the faults of which one has to have happened for it."""
    match error:
        case PodReplaced():
            return "may have run", (POD,)
        case ContainerRestarted():
            return "may have run", ENDED
        case SessionLost(sent=True):
            return "lost", ()
        case ApiUnreachable():
            return "not started", (API,)
        case SessionLost() | StillStarting() | LaunchFailed():
            return "not started", (*ENDED, API)
        case _:
            return "lost", ()
