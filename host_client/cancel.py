"""Ending a call whose caller does not want it any more, whatever has become of its pipe.

A pipe tells its daemon of a cancel while it is whole. One that has broken or is frozen does not, and the
daemon goes on with the call, for it keeps the answer for whoever asks again: so it is told once more, by
the call's id and with an answer, over another pipe if need be.
"""

from __future__ import annotations

import logging

import anyio

from host_client.backoff import pauses
from host_client.errors import NotFound, PodpipeError
from host_client.pipes import Pipes
from host_client.session import SandboxSession

log = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0
"""How long a daemon is tried for; after that the call ends by its own timeout."""
TRY_SECONDS = 3.0
"""For one try: a kubectl may hang on its way as the one before it did."""
RETRY_SECONDS = (0.05, 1.0)


async def cancel(pipes: Pipes, sent: SandboxSession, call_id: str) -> None:
    """See to it that a call ends, or never begins; what cannot be told is logged.

    Args:
        pipes: where another pipe comes from.
        sent: the session that the call was sent on. Its pod is asked and no other: if that is gone,
            so is the call.
        call_id: names the call.
    """
    with anyio.move_on_after(CANCEL_SECONDS, shield=True):
        for pause in pauses(*RETRY_SECONDS):
            try:
                with anyio.move_on_after(TRY_SECONDS):
                    await pipes.connect(sent.sandbox, sent.pod)
                if session := pipes.get(sent.sandbox.id):
                    if await session.cancel(call_id):
                        return
                    break
                log.info("not cancelled yet: no pipe within %g s", TRY_SECONDS)
            except NotFound:
                return
            except PodpipeError as error:
                log.info("not cancelled yet: %s", error)
            await anyio.sleep(pause)
    log.warning(
        "a call in sandbox %s could not be cancelled and may run on to its own timeout",
        sent.sandbox.id,
    )
