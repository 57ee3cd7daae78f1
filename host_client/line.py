"""One `kubectl exec -i` of a transfer, with the pod's end behind it, which is sent ahead."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import IO, Any

from host_client.ends import wire
from host_client.errors import STDERR_TAIL
from in_pod_server.contract import RUN_DIR

END_SECONDS = 5.0
"""kubectl ends by itself once the pod's end has; a frozen one is killed."""
_MODULES = {
    "send": ("", ".places", ".wire", ".sender", ".pod"),
    "receive": ("", ".places", ".wire", ".target", ".arrivals", ".receiver", ".pod"),
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
import marshal, os, sys
modules = {modules!r}
kept = {kept!r} + sys.implementation.cache_tag
try:
    with open(kept, "rb") as file:
        codes = list(marshal.load(file))
    codes[len(modules) - 1]
except (OSError, EOFError, ValueError, TypeError, IndexError):
    codes = [compile(text, name, "exec") for name, text in modules]
    fresh = kept + "." + str(os.getpid())
    try:
        with open(fresh, "xb") as file:
            marshal.dump(codes, file)
        os.rename(fresh, kept)
    except OSError:
        try:
            os.unlink(fresh)
        except OSError:
            pass
for (name, _), code in zip(modules, codes):
    module = type(sys)(name)
    module.__path__ = []
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, module)
    exec(code, module.__dict__)
sys.modules[{root!r} + ".pod"].main()
"""
"""Compiled once for a pod: it takes as long as a hundred small files. Who could change what is kept
runs as the same user, and could change the files too."""


class Line:
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

    @property
    def heard(self) -> bool:
        """Whether the pod's end has ever answered."""
        return self._channel is not None and self._channel.heard

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
    summed = hashlib.sha256(repr(modules).encode()).hexdigest()[:16]
    kept = f"{RUN_DIR}/transfer-{role}-{summed}."
    text = _LOADER.format(modules=modules, kept=kept, root=_ROOT).encode()
    return b"%8d" % len(text) + text


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise wire.Lost(f"the channel broke: {error}") from error
