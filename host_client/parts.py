"""Long arguments on their way into a sandbox: in numbered parts, a few at a time, before their call.

The call itself stays one small message, so that it begins once or not at all; a part that is lost
with its pipe is simply sent again over the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from host_client.errors import PodpipeError, RequestRefused, SessionLost, root_cause
from host_client.pipe import METHOD_NOT_FOUND
from in_pod_server.contract import METHOD_PART, METHOD_PARTS_DROPPED, PART_CHARS

WINDOW = 4
"""Parts on their way at once: a far sandbox is not waited for after each of them."""
DROP_SECONDS = 1.0

Ask = Callable[[str, dict[str, Any], float], Awaitable[object]]
Notify = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """Arguments of which the long ones are in the sandbox already.

    Args:
        arguments: those that go with the call.
        named: what the call says of the others: argument to id and count of its parts.
    """

    arguments: dict[str, Any]
    named: dict[str, dict[str, Any]]


async def stage(
    arguments: Mapping[str, Any], *, ask: Ask, notify: Notify, seconds: float
) -> Staged:
    """Send the long arguments of a call ahead of it.

    Args:
        arguments: all of the call's.
        ask: sends a request over the pipe and waits so many seconds for its answer.
        notify: sends a notification.
        seconds: until it is given up.

    Raises:
        SessionLost: the pipe broke; the call was not sent.
        PodpipeError: the sandbox has no room for so much, or the way is too slow for it.
    """
    texts = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, str) and len(value) > PART_CHARS
    }
    rest = {name: value for name, value in arguments.items() if name not in texts}
    ids = {name: secrets.token_hex(8) for name in texts}
    named: dict[str, dict[str, Any]] = {
        name: {"id": ids[name], "count": -(-len(text) // PART_CHARS)}
        for name, text in texts.items()
    }
    todo = [
        {"id": ids[name], "number": number, "text": text[at : at + PART_CHARS]}
        for name, text in texts.items()
        for number, at in enumerate(range(0, len(text), PART_CHARS))
    ]
    if not todo:
        return Staged(rest, named)
    total = len(todo)
    todo.reverse()

    async def send() -> None:
        while todo:
            await ask(METHOD_PART, todo.pop(), seconds + DROP_SECONDS)

    done = False
    try:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                for _ in range(WINDOW):
                    tasks.start_soon(send)
            done = True
    except BaseExceptionGroup as group:
        cause = root_cause(group)
        if isinstance(cause, SessionLost):
            raise SessionLost(f"{cause}", sent=False) from group
        if isinstance(cause, RequestRefused):
            raise PodpipeError(_refusal(cause)) from group
        raise
    finally:
        if not done:
            notify(METHOD_PARTS_DROPPED, {"ids": list(ids.values())})
    if not done:
        through = 100 * (total - len(todo)) // total
        raise PodpipeError(
            f"the way into the sandbox is slow: {through} % of {', '.join(texts)} got through in "
            f"{seconds:.0f} s, and nothing was begun. Upload it as a file, and use that"
        )
    return Staged(rest, named)


def _refusal(refused: RequestRefused) -> str:
    if refused.code == METHOD_NOT_FOUND:
        return (
            f"the image of the sandbox is older than this podpipe and takes no argument beyond "
            f"{PART_CHARS} characters: load the matching image (scripts/image build, scripts/image "
            "load), then create a new sandbox"
        )
    return f"nothing was begun: {refused}"
