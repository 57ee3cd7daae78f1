"""Files and folders of any size between this machine and a sandbox's home, both ways, verified.

Each transfer has a `kubectl exec -i` of its own, with one end here and the other in the pod
(`host_client.ends`). A transfer is done when every file was read back where it arrived and has the
SHA-256 of what was read where it came from; kubectl's exit code says nothing. A channel that broke is
opened again, and goes on where it was: what is there already is compared by its sum, not sent again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import IO, Any

import anyio
import anyio.abc
import anyio.to_thread

from host_client.ends import receiver, sender, wire
from host_client.errors import (
    STDERR_TAIL,
    StillStarting,
    TransferFailed,
    UsageError,
    root_cause,
)
from host_client.kubectl import Kubectl
from host_client.sessions import Sessions
from in_pod_server.contract import HOME, WORKSPACE

log = logging.getLogger(__name__)

TRIES = 5
"""Channels that one transfer may lose before it is given up."""
RETRY_SECONDS = 0.5
"""Before the second try; twice as long before each further one."""
END_SECONDS = 5.0
"""kubectl ends by itself once the pod's end has; a frozen one is killed."""
KEEP_SECONDS = 600.0
"""How long the outcome of a transfer that a tool began waits for the call that asks for it."""
_PIPE_BYTES = 1024 * 1024
_MODULES = {
    "send": ("", ".places", ".wire", ".sender", ".pod"),
    "receive": ("", ".places", ".wire", ".receiver", ".pod"),
}
"""What the pod's end is made of, by its role."""
_ROOT = "host_client.ends"

POD_ARGV = (
    *("/usr/bin/python3", "-I", "-S", "-X", "utf8", "-c"),
    """\
import os
def take(n):
 b=b""
 while len(b)<n:
  c=os.read(0,n-len(b))
  if not c:os._exit(3)
  b+=c
 return b
exec(take(int(take(8))))""",
)
"""Reads the program and not a byte more: the next one belongs to a frame."""
_LOADER = """\
import sys
for name, text in {modules!r}:
    module = type(sys)(name)
    module.__path__ = []
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[{root!r} + ".pod"].main()
"""


@dataclass(slots=True)
class Meter:
    """How far a transfer is; written by its thread, read by whoever shows it."""

    files: int = 0
    total: int = 0
    done: int = 0
    verb: str = "looking at what is there"
    began: float = field(default_factory=time.monotonic)
    kept: list[str] = field(default_factory=list)
    """Unfinished files that an interrupted transfer left for the next one."""

    def expect(self, files: int, total: int) -> None:
        """The plan is known."""
        self.files, self.total, self.done = files, total, 0
        self.verb = "copying"

    def add(self, count: int) -> None:
        """Some bytes are through."""
        self.done += count

    def text(self) -> str:
        """One line for a person."""
        if not self.files:
            return self.verb
        rate = self.done / max(0.001, time.monotonic() - self.began)
        return (
            f"{self.verb} {self.files} files: {size_text(self.done)} of {size_text(self.total)}, "
            f"{size_text(rate)}/s"
        )


Show = Callable[[Meter], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A transfer that is done and verified.

    Args:
        files: how many are in place, their sums compared.
        bytes: how large they are together.
        unchanged: how many of the files were there already.
        seconds: from the first attempt to the last answer.
        refused: path and reason of what was left out on purpose.
        unlisted: how many more were, beyond those that are listed.
        removed: entries that `delete` removed.
        tries: channels that it took.
    """

    files: int
    bytes: int
    unchanged: int
    seconds: float
    refused: tuple[tuple[str, str], ...]
    unlisted: int
    removed: int
    tries: int

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "unchanged": self.unchanged,
            "seconds": round(self.seconds, 3),
            "refused": [{"path": shown(path), "reason": shown(why)} for path, why in self.refused],
            "refused_unlisted": self.unlisted,
            "removed": self.removed,
            "tries": self.tries,
            "verified": True,
        }

    def text(self) -> str:
        """For a person or a model."""
        rate = size_text(self.bytes / max(0.001, self.seconds))
        text = (
            f"{self.files} files, {size_text(self.bytes)} in {self.seconds:.1f} s ({rate}/s), "
            "each verified by SHA-256"
        )
        if self.unchanged:
            text += f"; {self.unchanged} of them were there already"
        if self.removed:
            text += f"; {self.removed} entries removed"
        return text


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def shown(text: str) -> str:
    """Text from a pod, without anything that a terminal obeys or that is not UTF-8."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode("ascii")
        for c in text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    )


def in_home(path: str) -> str:
    """A path in the sandbox, relative to the home.

    Raises:
        UsageError: it is elsewhere.
    """
    if "\0" in path:
        raise UsageError("a path cannot hold a NUL byte")
    for root in (HOME, WORKSPACE):
        if path == root or path.startswith(f"{root}/"):
            path = path[len(root) :].lstrip("/") or "."
            break
    plain = os.path.normpath(path or ".")
    if plain.startswith(("/", "../")) or plain == "..":
        raise UsageError(
            f"{path!r} is not in the sandbox's home: give a path relative to it, or below {HOME} or "
            f"{WORKSPACE}"
        )
    return plain


class _Line:
    """One `kubectl exec -i`, the pod's end behind it, and our end's talk with it.

    Args:
        argv: the call.
        environment: what kubectl is started with.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._argv = argv
        self._environment = environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: wire.Channel | None = None
        self._kill = threading.Event()
        self.stderr = b""

    def kill(self) -> None:
        """End kubectl, now or as soon as it would be started."""
        with self._lock:
            self._kill.set()
            if self._channel:
                self._channel.stop("it was interrupted")
        self._kill_group()

    def talk(self, job: Mapping[str, Any], work: Callable[[wire.Channel], None]) -> None:
        """Start the pod's end and do our part.

        Raises:
            wire.Lost: the channel broke.
            wire.Broken: the pod's end is none of ours.
            wire.Refused: either end cannot do the job at all.
            OSError: something here cannot be read or written, kubectl for one.
        """
        with self._lock:
            if self._kill.is_set():
                raise wire.Lost("it was interrupted")
            process = self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self._environment),
                bufsize=0,
                # Its credential plugins die with it, and a terminal's ctrl-C is for us alone.
                start_new_session=True,
            )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        drain = threading.Thread(target=self._drain, args=(process.stderr,), daemon=True)
        drain.start()
        for pipe in (process.stdin, process.stdout):
            _widen(pipe.fileno())
        channel = wire.Channel(process.stdout.fileno(), process.stdin.fileno(), self.kill)
        with self._lock:
            self._channel = channel
            if self._kill.is_set():
                channel.stop("it was interrupted")
        done = False
        try:
            _write(process.stdin.fileno(), _program(job["role"]))
            channel.start()
            channel.tell(wire.JOB, job)
            channel.flush()
            work(channel)
            done = True
        finally:
            channel.close()
            if not done:
                self.kill()
            with contextlib.suppress(OSError):
                process.stdin.close()
            # What was to be known is known; how kubectl ends is nobody's wait.
            ends = threading.Thread(target=self._see_off, args=(process, process.stdout, drain))
            ends.start()
            if not done:
                ends.join()

    def _see_off(
        self, process: subprocess.Popen[bytes], stdout: IO[bytes], drain: threading.Thread
    ) -> None:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill_group()
            process.wait()
        drain.join(END_SECONDS)
        stdout.close()

    def _kill_group(self) -> None:
        with self._lock:
            if self._process and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _drain(self, stderr: IO[bytes]) -> None:
        """Always: a kubectl whose stderr is not read stalls altogether."""
        with stderr:
            while chunk := stderr.read(65536):
                self.stderr = (self.stderr + chunk)[-STDERR_TAIL:]


def _program(role: str) -> bytes:
    folder = resources.files(_ROOT)
    modules = [("host_client", "")] + [
        (
            f"{_ROOT}{name}",
            (folder / f"{name[1:] or '__init__'}.py").read_text(encoding="utf-8"),
        )
        for name in _MODULES[role]
    ]
    text = _LOADER.format(modules=modules, root=_ROOT).encode()
    return b"%8d" % len(text) + text


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise wire.Lost(f"the channel broke: {error}") from error


def _widen(fd: int) -> None:
    """Give a pipe room for more than 64 KiB where that can be done: fewer switches."""
    try:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        pass


class _Up:
    """From here to the pod."""

    def __init__(self, sources: Sequence[sender.Source], target: Mapping[str, Any]) -> None:
        self._sources = sources
        self._target = target

    def job(self) -> dict[str, Any]:
        """What the pod's end has to do."""
        return {"role": "receive", **self._target}

    def attempt(self, channel: wire.Channel, meter: Meter) -> _Found:
        end = sender.Sender(channel, meter.add, meter.expect, on_lost=lambda: None)
        found = _Found()
        results = end.run(self._sources)
        left = set(end.sums)
        for result in results:
            match result:
                case ["file", int(number), str(digest)] if number in left:
                    left.remove(number)
                    mine = end.sums[number]
                    if digest == mine:
                        found.files += 1
                        found.bytes += end.sizes[number]
                    else:
                        why = f"its SHA-256 is {digest[:64]} in the sandbox and {mine} here"
                        found.failed.append((end.paths[number], why))
                case ["refused", str(path), str(why)]:
                    found.refused.append((path, why))
                case ["failed", str(path), str(why)]:
                    found.failed.append((path, why))
                case ["count", "unlisted", int(count)]:
                    found.unlisted = count
                case ["count", "removed", int(count)]:
                    found.removed = count
                case _:
                    raise wire.Broken("a result is none")
        if left and not found.failed:
            found.failed += [
                (end.paths[number], "its arrival was not confirmed") for number in left
            ]
        found.unchanged = end.unchanged
        return found


class _Down:
    """From the pod to here."""

    def __init__(self, sources: Sequence[tuple[str, str]], target: receiver.Target) -> None:
        self._sources = sources
        self._target = target

    def job(self) -> dict[str, Any]:
        """What the pod's end has to do; all the faster if nothing is here yet."""
        fresh = all(self._target.lacks(name) for name, _ in self._sources)
        return {"role": "send", "sources": self._sources, "eager": fresh}

    def attempt(self, channel: wire.Channel, meter: Meter) -> _Found:
        end = receiver.Receiver(channel, self._target, meter.add, meter.expect)
        try:
            end.run()
        finally:
            meter.kept = end.kept
        # Everything is here and compared; the pod's end may hear of it or not.
        with contextlib.suppress(wire.Lost):
            channel.send(wire.RESULTS_END)
            channel.flush()
        return _Found(
            len(end.sums),
            end.bytes,
            end.unchanged,
            end.removed,
            end.refused,
            end.failed,
            end.unlisted,
        )


@dataclass(slots=True)
class _Found:
    """What one attempt that came to its end has found."""

    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    removed: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    unlisted: int = 0


class Transfers:
    """All transfers of one process.

    Args:
        kubectl: makes their channels.
        sessions: start the sandbox if need be, and know its pod.
        tasks: where transfers live that outlast the call that began them.
    """

    def __init__(self, kubectl: Kubectl, sessions: Sessions, tasks: anyio.abc.TaskGroup) -> None:
        self._kubectl = kubectl
        self._sessions = sessions
        self._tasks = tasks
        self._running: dict[tuple[str, ...], _Running] = {}

    async def put(
        self, ref: str, local: Sequence[str], remote: str = "", meter: Meter | None = None
    ) -> Outcome:
        """Copy files and folders from here into a sandbox.

        Args:
            ref: id or name of the sandbox.
            local: what to copy; a link that is named here itself is followed.
            remote: where to; a folder that exists, or ends with `/`, is copied into.
            meter: shows how far it is.

        Raises:
            UsageError: something of it is not there, or not to be reached.
            TransferFailed: not everything arrived as it was.
            PodpipeError: as `Sessions.open`.
        """
        sources = [sender.Source(_name_of(path), _real(path)) for path in local]
        if len({source.name for source in sources}) < len(sources):
            raise UsageError("two of these have the same name, and would be one in the sandbox")
        target = {
            "path": in_home(remote),
            "contents": False,
            "into": len(sources) != 1 or remote.endswith("/"),
            "delete": False,
        }
        return await self._run(ref, _Up(sources, target), meter)

    async def get(
        self, ref: str, remote: str, local: str = ".", meter: Meter | None = None
    ) -> Outcome:
        """Copy a file or a folder from a sandbox to here; arguments and errors as `put`."""
        plain = in_home(remote)
        target = receiver.Target(
            _resolved(local),
            contents=plain == ".",
            into=local.endswith("/"),
            delete=False,
        )
        name = "" if plain == "." else os.path.basename(plain)
        return await self._run(ref, _Down([(name, plain)], target), meter)

    async def sync(
        self,
        ref: str,
        local: str,
        remote: str,
        *,
        delete: bool = False,
        from_sandbox: bool = False,
        meter: Meter | None = None,
    ) -> Outcome:
        """Make one folder like the other.

        Args:
            ref: id or name of the sandbox.
            local: the folder here.
            remote: the folder there.
            delete: also remove what only the copy has, unless anything failed.
            from_sandbox: the one here is the copy.
            meter: shows how far it is.

        Raises:
            PodpipeError: as `put`.
        """
        plain = in_home(remote)
        if from_sandbox:
            target = receiver.Target(_resolved(local), contents=True, into=True, delete=delete)
            return await self._run(ref, _Down([("", plain)], target), meter)
        source = sender.Source("", _real_folder(local))
        there = {"path": plain, "contents": True, "into": True, "delete": delete}
        return await self._run(ref, _Up([source], there), meter)

    async def _run(self, ref: str, way: _Up | _Down, meter: Meter | None) -> Outcome:
        meter = meter or Meter()
        began = time.monotonic()
        for number in range(1, TRIES + 1):
            session = await self._sessions.open(ref)
            line = _Line(
                self._kubectl.exec_argv(session.pod.name, POD_ARGV), self._kubectl.environment
            )
            try:
                found = await self._attempt(line, way, meter)
            except wire.Lost as lost:
                said = line.stderr.decode("utf-8", "replace").strip()[-500:]
                log.info("transfer with %s, try %d: %s %s", ref, number, lost, said)
                if number == TRIES:
                    raise TransferFailed(
                        f"the channel into sandbox {ref} broke {TRIES} times ({lost}"
                        f"{'; kubectl said: ' + shown(said) if said else ''}). What is complete is in "
                        "its place; the same command goes on from there" + kept_text(meter)
                    ) from lost
                meter.verb = "reconnecting"
                await anyio.sleep(RETRY_SECONDS * 2 ** (number - 1))
                continue
            except wire.Refused as refused:
                raise TransferFailed(f"nothing was transferred: {shown(str(refused))}") from refused
            except wire.Broken as broken:
                raise TransferFailed(
                    f"what answers in sandbox {ref} is not podpipe's end of a transfer: {broken}. "
                    "Nothing was written but complete files in the target"
                ) from broken
            except OSError as error:
                raise TransferFailed(f"{error.filename or 'transfer'}: {error.strerror}") from error
            if found.failed:
                raise _failure(found)
            return Outcome(
                found.files,
                found.bytes,
                found.unchanged,
                time.monotonic() - began,
                tuple(found.refused),
                found.unlisted,
                found.removed,
                number,
            )
        raise AssertionError("the last try either succeeds or raises")

    async def _attempt(self, line: _Line, way: _Up | _Down, meter: Meter) -> _Found:
        """One channel; whatever ends us ends kubectl, and with it the pod's end."""
        self._kubectl.target.check()
        outcome: list[_Found | Exception] = []
        ended = anyio.Event()

        def work() -> None:
            try:
                line.talk(way.job(), lambda channel: outcome.append(way.attempt(channel, meter)))
            except Exception as error:  # raised below, where it cannot hide a cancellation
                outcome[:] = [error]

        async def wait() -> None:
            await anyio.to_thread.run_sync(work)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            try:
                await ended.wait()
            finally:
                if not ended.is_set():
                    line.kill()
                with anyio.move_on_after(END_SECONDS * 2, shield=True):
                    await ended.wait()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    # --- transfers that tools begin ----------------------------------------------------------

    async def within(
        self,
        seconds: float,
        key: tuple[str, ...],
        begin: Callable[[Meter], Any],
    ) -> Outcome:
        """A transfer that a call begins, or joins if one with its key is under way.

        Args:
            seconds: how long this call waits.
            key: which transfer it is.
            begin: what makes the coroutine that does it.

        Raises:
            StillStarting: it is not done yet; a call with the same key joins it.
            PodpipeError: it failed.
        """
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running()
            self._tasks.start_soon(self._own, key, running, begin)
        try:
            with anyio.move_on_after(seconds):
                await running.ended.wait()
        except anyio.get_cancelled_exc_class():
            running.scope.cancel()
            raise
        if not running.ended.is_set():
            raise StillStarting(
                f"still {running.meter.text()}. It goes on; call again with the same arguments to "
                "wait for its end",
                detail=running.meter.text(),
            )
        self._running.pop(key, None)
        if running.error:
            raise running.error
        assert running.outcome
        return running.outcome

    async def _own(
        self, key: tuple[str, ...], running: _Running, begin: Callable[[Meter], Any]
    ) -> None:
        try:
            with running.scope:
                running.outcome = await begin(running.meter)
            if running.outcome is None:
                running.error = TransferFailed(
                    "the transfer was cancelled" + kept_text(running.meter)
                )
        except Exception as error:  # whoever waits for it gets it
            cause = root_cause(error)
            running.error = cause if isinstance(cause, Exception) else error
        finally:
            running.ended.set()
        await anyio.sleep(KEEP_SECONDS)
        if self._running.get(key) is running:
            del self._running[key]


class _Running:
    """A transfer under way, and what came of it."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()
        self.outcome: Outcome | None = None
        self.error: Exception | None = None


def kept_text(meter: Meter) -> str:
    """What an interrupted transfer left here; empty if nothing."""
    if not meter.kept:
        return ""
    return f". Unfinished, for the next try: {', '.join(map(shown, meter.kept))}"


def _failure(found: _Found) -> TransferFailed:
    lines = [f"{shown(path)}: {shown(why)}" for path, why in found.failed[:20]]
    more = len(found.failed) - len(lines) + found.unlisted
    return TransferFailed(
        f"{found.files} files arrived and were verified, {len(found.failed) + found.unlisted} did not: "
        + "; ".join(lines)
        + (f"; and {more} more" if more else "")
    )


def _name_of(path: str) -> str:
    """What a thing is called at the other end."""
    name = os.path.basename(path.rstrip("/"))
    if name in ("", ".", ".."):
        name = os.path.basename(os.path.realpath(path))
    if not name:
        raise UsageError(f"{path!r} has no name; use sync for the contents of a folder")
    return name


def _resolved(path: str) -> str:
    if "\0" in path:
        raise UsageError("a path cannot hold a NUL byte")
    return os.path.realpath(path)


def _real_folder(path: str) -> str:
    real = _real(path)
    if not os.path.isdir(real):
        raise UsageError(f"{path!r} is no folder; sync takes two folders, put takes files too")
    return real


def _real(path: str) -> str:
    real = _resolved(path)
    if not os.path.lexists(real):
        raise UsageError(f"there is no {path!r} on this machine")
    return real


def allowed(path: str, folders: Sequence[str]) -> str:
    """The real path of something on this machine that a tool may touch.

    Args:
        path: absolute, as the model gave it.
        folders: that the user allows (PODPIPE_ALLOWED_DIRS).

    Raises:
        UsageError: it is not below any of them, whatever links lie on the way.
    """
    if not folders:
        raise UsageError(
            "no folder of this machine is allowed for transfers. The user allows some by setting "
            f"PODPIPE_ALLOWED_DIRS (absolute paths, separated by {os.pathsep!r}) for `podpipe serve`"
        )
    if not os.path.isabs(path) or "\0" in path:
        raise UsageError(f"host_path has to be an absolute path, not {path!r}")
    real = os.path.realpath(path)
    for folder in folders:
        root = os.path.realpath(folder)
        if real == root or real.startswith(root.rstrip("/") + "/"):
            return real
    raise UsageError(
        f"{path!r} is not below a folder that the user allows ({', '.join(folders)}); "
        "PODPIPE_ALLOWED_DIRS names them"
    )
