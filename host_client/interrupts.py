"""Ctrl-C, SIGTERM and the end of the terminal as a cancellation that cleaning up survives.

A KeyboardInterrupt, and asyncio's own answer to SIGINT, break through anyio's shields, so what a
cancelled command has to undo was left. Here the first signal cancels a scope, which shields hold
off; a later one ends the process at once.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Awaitable, Callable

import anyio

EXIT_INTERRUPTED = 130
SAME_SECONDS = 1.0
"""Signals that come so soon after the first are the same request: a terminal's ctrl-C reaches us and
the program that started us, which passes it on."""


async def interruptible(work: Callable[[], Awaitable[int]]) -> int:
    """Run `work` until it ends or a signal asks it to.

    Args:
        work: gives the exit code.

    Returns:
        Its exit code, or EXIT_INTERRUPTED where a signal cancelled it.
    """
    code = EXIT_INTERRUPTED
    # A shell's background job has SIGINT ignored; a receiver takes it nevertheless. What nohup
    # started is to outlive its terminal.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*numbers) as signals:

        async def watch() -> None:
            first = math.inf
            async for _ in signals:
                first = min(first, anyio.current_time())
                scope.cancel()
                if anyio.current_time() - first > SAME_SECONDS:
                    os._exit(EXIT_INTERRUPTED)

        async with anyio.create_task_group() as watching:
            watching.start_soon(watch)
            with anyio.CancelScope() as scope:
                code = await work()
            watching.cancel_scope.cancel()
    return code
