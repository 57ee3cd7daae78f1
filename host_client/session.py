"""The pipe: one `kubectl exec -i` per sandbox in use, an MCP session over it, one task that owns it.

A session is shared by all calls on its sandbox, and known to work by the hello (the answer to
`initialize`), never by kubectl's exit code. Opening it, and what becomes of a call whose pipe broke,
is `sessions`' business.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import anyio.abc

from host_client.clock import timestamp, utc_now
from host_client.config import IDLE_SECONDS
from host_client.errors import (
    Forbidden,
    PodpipeError,
    RequestRefused,
    SessionLost,
    VersionMismatch,
    root_cause,
)
from host_client.kubectl import Kubectl
from host_client.parts import stage
from host_client.pipe import OnProgress, Pipe
from host_client.pod_view import PodView
from host_client.sandbox import Sandbox
from in_pod_server.contract import (
    CANCEL_CALL,
    CANCEL_ID,
    CONTRACT_VERSION,
    DIAL_ARGV,
    FATE_NOT_STARTED,
    HELLO,
    HELLO_APPS,
    HELLO_BOOT_ID,
    HELLO_CONTRACT,
    HELLO_POD_UID,
    IN_FLIGHT_LIMIT,
    META_ACCESS,
    META_EXPIRES_AT,
    META_FATE,
    META_LEASE,
    META_PARTS,
    STOP_GRACE_SECONDS,
)

log = logging.getLogger(__name__)

HELLO_SECONDS = 20.0
"""One attempt to connect: a daemon that starts on a busy node needs a few seconds."""
ANSWER_MARGIN_SECONDS = 5.0
"""What is left of a call's time for its answer to arrive."""
HEARTBEAT_SECONDS = 10.0
"""Load balancers and proxies cut what was silent for 20 s and more."""
CANCEL_ANSWER_SECONDS = 4.0
"""For a daemon to answer a cancel; a pipe on which it does not is taken for frozen."""
HEARTBEAT_ANSWER_SECONDS = 8.0
LEASE_SECONDS = 60.0
"""The daemon closes a pipe that has brought it nothing for so long: three heartbeats and more."""
FRESH_SECONDS = 2 * HEARTBEAT_SECONDS
"""A pod that answered within this is most likely there when its pipe breaks."""
CLOSE_SECONDS = 3.0
"""All pipes together at exit; a client kills its server after a few seconds."""
CALLS_AT_ONCE = IN_FLIGHT_LIMIT - 32
"""Over one pipe; further ones wait here. There is room beside them for heartbeats and cancels, which a
daemon that has all its hands full would not read."""

WAIT = "wait_seconds"
"""The argument by which a tool of the daemon is told how long its call may wait."""


class SandboxSession:
    """One live pipe into one pod.

    Args:
        sandbox: the record as it was when the pipe was opened.
        pod: the pod that it leads into.
        idle_seconds: after which it closes itself, if no call has used it.
        now: what expiry is judged by.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        pod: PodView,
        *,
        idle_seconds: float = IDLE_SECONDS,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._now = now
        self.sandbox = sandbox
        self.pod = pod
        self.boot_id = ""
        self.apps = ""
        """The daemon's table of apps, as it said it last."""
        self._pipe: Pipe | None = None
        self._greeted = False
        self._close = anyio.Event()
        self._opened = anyio.Event()
        self._released = anyio.Event()
        # What is cancelled around it may still need the pipe for its cleaning up.
        self._scope = anyio.CancelScope(shield=True)
        self._failure: PodpipeError | None = None
        self._calls = 0
        self._places = anyio.Semaphore(CALLS_AT_ONCE, fast_acquire=True)
        self._last_call = 0.0
        self._heard = 0.0

    @property
    def connected(self) -> bool:
        """Whether the pipe is open as far as is known."""
        return self._greeted and not self._close.is_set() and not self._ended

    @property
    def _ended(self) -> bool:
        return self._pipe is None or self._pipe.ended.is_set()

    @property
    def ending(self) -> bool:
        """Whether the daemon has said that it ends: it answers what it has, and takes no more."""
        return self._pipe is not None and self._pipe.ending

    @property
    def alive(self) -> bool:
        """Whether calls may be sent: connected, and not past the expiry that it knows of."""
        return self.connected and not self.ending and not self.sandbox.expired(self._now())

    @property
    def fresh(self) -> bool:
        """Whether its pod answered so lately that another pipe into it is worth a try."""
        heard = self._greeted and anyio.current_time() - self._heard < FRESH_SECONDS
        return heard and not self.ending and not self.sandbox.expired(self._now())

    async def own(self, kubectl: Kubectl) -> None:
        """Open the pipe and hold it until it is closed or broken. Raises nothing.

        Runs as a task of its own: a broken pipe must not end the tasks beside it.
        """
        try:
            with self._scope:
                await self._hold(kubectl)
        except (Exception, BaseExceptionGroup) as caught:
            error = root_cause(caught)
            if isinstance(error, PodpipeError) and not isinstance(error, SessionLost):
                self._failure = error
            elif not self._greeted:
                self._failure = self._refusal(kubectl) or SessionLost(
                    f"no answer from sandbox {self.sandbox.id} (pod {self.pod.name}): "
                    f"{self._reason(error)}",
                    sent=False,
                )
            else:
                log.info("pipe into %s broke: %s", self.pod.name, self._reason(error))
        finally:
            self._opened.set()
            self._released.set()

    def _refusal(self, kubectl: Kubectl) -> Forbidden | None:
        """The one failure of a kubectl without a hello that trying again does not mend."""
        argv = kubectl.exec_argv(self.pod.name, DIAL_ARGV)
        said = kubectl.classified(argv, None, self.stderr.decode("utf-8", "replace"))
        if not isinstance(said, Forbidden):
            return None
        return Forbidden(
            f"kubectl may not exec into pod {self.pod.name} ({said}); nothing was sent. Your role "
            "needs the verbs get and create on pods/exec: `podpipe doctor` checks both",
            argv=argv,
            stderr=said.stderr,
        )

    async def opened(self) -> None:
        """Wait for the hello; a cancelled wait gives the pipe up.

        Raises:
            SessionLost: there was none; `sent` is false.
            VersionMismatch: the pod speaks another contract version.
            Forbidden: this user may not exec into it.
        """
        try:
            await self._opened.wait()
        except anyio.get_cancelled_exc_class():
            self._scope.cancel()
            raise
        if self._failure:
            raise self._failure

    async def _hold(self, kubectl: Kubectl) -> None:
        argv = kubectl.exec_argv(self.pod.name, DIAL_ARGV)
        self._pipe = pipe = await Pipe.start(argv, kubectl.environment, f"pod {self.pod.name}")
        try:
            hello = await pipe.initialize(HELLO_SECONDS)
            self._check((hello.get("capabilities") or {}).get("experimental") or {})
            self._greeted = True
            self._last_call = self._heard = anyio.current_time()
            self._opened.set()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat)
                await _first(self._close, pipe.ended)
                tasks.cancel_scope.cancel()
        finally:
            await pipe.aclose()

    def _check(self, experimental: dict[str, dict[str, Any]]) -> None:
        hello = experimental.get(HELLO, {})
        if hello.get(HELLO_CONTRACT) != CONTRACT_VERSION:
            raise VersionMismatch(
                f"sandbox {self.sandbox.id} runs image {self.sandbox.spec.image!r}, which speaks "
                f"contract {hello.get(HELLO_CONTRACT)!r}; this podpipe speaks {CONTRACT_VERSION}. "
                "Nothing was sent, and files in the home are kept. Build and load the matching image "
                "(scripts/image build, scripts/image load), then create a new sandbox"
            )
        uid = hello.get(HELLO_POD_UID)
        if uid and uid != self.pod.uid:
            raise SessionLost(
                f"pod {self.pod.name} was replaced (uid {self.pod.uid}, now {uid})", sent=False
            )
        self.boot_id = str(hello.get(HELLO_BOOT_ID, ""))
        self.apps = str(hello.get(HELLO_APPS, ""))

    def _reason(self, error: BaseException) -> str:
        said = self.stderr.decode("utf-8", "replace").strip()
        return f"{error}; kubectl said: {said[-500:]}" if said else f"{error}"

    @property
    def kubectl_pid(self) -> int | None:
        """Process id of the kubectl that is the pipe."""
        return self._pipe.pid if self._pipe else None

    @property
    def stderr(self) -> bytes:
        """The last of what kubectl wrote to stderr; for messages only, never for decisions."""
        return self._pipe.stderr if self._pipe else b""

    async def request(
        self,
        tool: str,
        arguments: dict[str, Any],
        on_progress: OnProgress | None,
        *,
        meta: dict[str, str] | None = None,
        timeout: float,
        cancels: Callable[[], bool],
    ) -> dict[str, Any]:
        """One tool call over the pipe.

        Args:
            tool: the daemon's tool.
            arguments: for it.
            on_progress: receives its progress.
            meta: the call's name, where it may have to be asked for again.
            timeout: seconds until the pipe is taken for frozen.
            cancels: asked when this task is cancelled: whether the call is to be stopped too.

        Returns:
            The raw CallToolResult as the daemon gave it.

        Raises:
            SessionLost: the pipe broke or froze; `sent` says whether the call may have run.
            RequestRefused: the daemon answered with an error of the protocol.
            PodpipeError: too many other calls were in work for all the time.
        """
        began = anyio.current_time()
        self._calls += 1
        try:
            async with self._place(tool, timeout):
                waited = anyio.current_time() - began
                params, left = await self._staged(arguments, meta or {}, timeout - waited)
                result = await self._ask(
                    "tools/call",
                    {"name": tool} | params,
                    left,
                    on_progress=on_progress,
                    cancels=cancels,
                )
            if not _is_tool_result(result):
                raise RequestRefused(
                    f"what answered is no result of {tool}: is it podpipe that answers there? It may "
                    "have run",
                    code=0,
                )
            if (result.get("_meta") or {}).get(META_FATE) == FATE_NOT_STARTED:
                assert self._pipe is not None
                self._pipe.ending = True
                raise SessionLost(
                    f"pod {self.pod.name} is ending and did not start {tool}", sent=False
                )
            return result
        finally:
            self._calls -= 1
            self._last_call = anyio.current_time()

    @asynccontextmanager
    async def _place(self, tool: str, seconds: float) -> AsyncIterator[None]:
        """One of the places for calls on the pipe, waited for so long."""
        with anyio.move_on_after(seconds) as patience:
            await self._places.acquire()
        if patience.cancelled_caught:
            raise PodpipeError(
                f"sandbox {self.sandbox.id} has {CALLS_AT_ONCE} other calls in work, and none of them "
                f"ended within {seconds:.0f} s: {tool} was not sent. Let calls wait for less "
                f"({WAIT}), or start long commands with start_background"
            )
        try:
            yield
        finally:
            self._places.release()

    async def _staged(
        self, arguments: dict[str, Any], meta: dict[str, str], timeout: float
    ) -> tuple[dict[str, Any], float]:
        """The parameters of a call whose long arguments are in the sandbox already; time left."""
        began = anyio.current_time()
        staged = await stage(
            arguments,
            ask=self._ask,
            notify=self._notify,
            seconds=max(1.0, timeout - 2 * ANSWER_MARGIN_SECONDS),
        )
        left = timeout - (anyio.current_time() - began)
        if isinstance(asked := staged.arguments.get(WAIT), int | float):
            staged.arguments[WAIT] = max(0.0, min(asked, left - ANSWER_MARGIN_SECONDS))
        said = meta | ({META_PARTS: staged.named} if staged.named else {})
        return {"arguments": staged.arguments, **({"_meta": said} if said else {})}, left

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        if self._pipe:
            self._pipe.notify(method, params)

    async def _ask(
        self,
        method: str,
        params: dict[str, Any] | None,
        timeout: float,
        *,
        of_silence: bool = False,
        on_progress: OnProgress | None = None,
        cancels: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        if self._pipe is None or not self.connected:
            raise SessionLost(f"the pipe into pod {self.pod.name} is closed", sent=False)
        try:
            answer = await self._pipe.request(
                method,
                params,
                timeout=timeout,
                of_silence=of_silence,
                on_progress=on_progress,
                cancels=cancels,
            )
            self._heard = anyio.current_time()
            return answer
        except SessionLost:
            # Frozen or broken: whoever comes next has to open another. One that is ending still
            # brings the answers of others.
            if not self.ending:
                self._close.set()
            raise

    async def _beat(self) -> None:
        """Send something in both directions before anything on the way calls the pipe idle.

        Ends when the pipe turns out to be frozen, or has not been used for long.
        """
        while await self.answers(HEARTBEAT_ANSWER_SECONDS):
            await anyio.sleep(HEARTBEAT_SECONDS)
            idle = anyio.current_time() - self._last_call
            if not self._calls and idle > self._idle_seconds:
                self._close.set()
                return
        if self.ending:
            # What is not answered when its grace is over will not be.
            await anyio.sleep(STOP_GRACE_SECONDS + ANSWER_MARGIN_SECONDS)
            self._close.set()

    async def answers(self, seconds: float) -> bool:
        """Whether the daemon answers, and is not silent for so many seconds; otherwise the pipe is over.

        Its daemon learns by it that this host is there, and closes a pipe whose host is not; until
        when the sandbox lives; and who may open its apps.
        """
        known = {
            META_LEASE: LEASE_SECONDS,
            META_EXPIRES_AT: timestamp(self.sandbox.expires_at),
            META_ACCESS: self.sandbox.access,
        }
        try:
            await self._ask("ping", {"_meta": known}, seconds, of_silence=True)
        except SessionLost as lost:
            log.info("%s", lost)
            return False
        return True

    async def cancel(self, call_id: str) -> bool:
        """Let the daemon end a call, or never begin it, by its id.

        Returns:
            Whether it can: an older one cannot.

        Raises:
            SessionLost: it may not know.
        """
        asked = {"name": CANCEL_CALL, "arguments": {CANCEL_ID: call_id}}
        answer = await self._ask("tools/call", asked, CANCEL_ANSWER_SECONDS, of_silence=True)
        return not answer.get("isError")

    async def list_tools(self) -> list[str]:
        """Names of the tools that the daemon offers."""
        listed = await self._ask("tools/list", None, HELLO_SECONDS)
        return [tool["name"] for tool in listed["tools"]]

    async def aclose(self) -> None:
        """Close the pipe and wait until its owner has let go of kubectl, at most CLOSE_SECONDS."""
        self._close.set()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._released.wait()
        self._scope.cancel()


def _is_tool_result(result: dict[str, Any]) -> bool:
    """Whether an answer is what we take it for: a command could have put its own in the daemon's place."""
    content = result.get("content", [])
    return (
        isinstance(content, list)
        and all(
            isinstance(each, dict) and isinstance(each.get("text", ""), str) for each in content
        )
        and all(isinstance(result.get(name, {}), dict) for name in ("_meta", "structuredContent"))
    )


async def _first(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
