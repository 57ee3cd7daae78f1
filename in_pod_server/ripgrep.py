"""One run of ripgrep: started in a folder that is held open, ended after a bounded time."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

import anyio
from anyio.abc import Process

from in_pod_server.errors import ArgumentError, FileFailedError, short
from in_pod_server.launch import memory_file

RG: Final = "rg"
STDERR_BYTES: Final = 4096
_FAILED: Final = 2
_ENV: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
"""Neither HOME nor RIPGREP_CONFIG_PATH: no file of the home changes what a search does."""


class Running:
    """One ripgrep, until it ends or its time is over."""

    def __init__(self, process: Process, stderr: BinaryIO, until: float) -> None:
        self._process = process
        self._stderr = stderr
        self._until = until
        self._at_end = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Give its output until it ends or its time is over."""
        assert self._process.stdout is not None
        while True:
            piece = b""
            with anyio.move_on_at(self._until) as limit:
                try:
                    piece = await self._process.stdout.receive()
                except anyio.EndOfStream:
                    self._at_end = True
            if self._at_end or limit.cancelled_caught:
                return
            yield piece

    async def complete(self) -> bool:
        """Say whether it gave all there is.

        Raises:
            ArgumentError: It did not understand what it was given.
        """
        if not self._at_end:
            return False
        with anyio.move_on_at(self._until):
            await self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read(STDERR_BYTES).decode("utf-8", "replace").strip()
        if self._process.returncode == _FAILED and said:
            raise ArgumentError(_refused(said))
        return True


def _refused(said: str) -> str:
    reason = said.partition("error: ")[2] or said.splitlines()[-1].removeprefix("rg: ")
    reason = short(" ".join(reason.split()).partition(" Consider enabling PCRE2")[0])
    if "glob" in said and "regex" not in said:
        return f"the glob cannot be used: {reason}"
    return (
        f"the pattern cannot be used: {reason} (a backslash before ( [ {{ * + ? . | takes each as it "
        "is, literal=true takes all of them so)"
    )


@contextlib.asynccontextmanager
async def ripgrep(
    *options: str, folder: int, seconds: float, stdin: bytes | int | None = None
) -> AsyncIterator[Running]:
    """Run it in a folder (a descriptor) on what it is given to read.

    Raises:
        FileFailedError: It is missing, or cannot be started.
    """
    until = anyio.current_time() + seconds
    with contextlib.ExitStack() as files:
        stderr = files.enter_context(memory_file(b""))
        if isinstance(stdin, bytes):
            stdin = files.enter_context(memory_file(stdin)).fileno()
        try:
            process = await anyio.open_process(
                [RG, *options],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # The child's own copy of the descriptor: nobody can put another folder in its place.
                cwd=f"/proc/self/fd/{folder}",
                env=_ENV,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise FileFailedError(
                "ripgrep (rg) is missing in this sandbox's image: use grep or find in run_command"
            ) from None
        except OSError as exc:
            raise FileFailedError(f"ripgrep cannot be started: {exc.strerror}") from exc
        try:
            yield Running(process, stderr, until)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()
