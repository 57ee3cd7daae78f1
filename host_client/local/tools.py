"""What the local tools share: failures that carry an exit code, folders, a lock, child processes.

Nothing here knows Kubernetes. Everything a child writes is kept, and only its tail is shown.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

TAIL_BYTES: Final = 4096
"""How much of a child's output an error quotes: enough for a stack trace, short enough to read."""
SHORT_CALL_SECONDS: Final = 60.0
"""For commands that answer at once on a healthy machine; whatever takes longer says its own limit."""

CHECKOUT: Final = Path(__file__).resolve().parents[2]


class Failure(Exception):
    """Something did not work; the message names it, its cause and the next step."""

    exit_code = 1


class NotFound(Failure):
    """What was asked for does not exist."""

    exit_code = 3


class MissingPrerequisite(Failure):
    """This machine lacks something that has to be installed or started first."""

    exit_code = 4


def cache_home(env: Mapping[str, str] = os.environ) -> Path:
    """The folder for what can be made again: binaries, base images."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podpipe"


def state_home(env: Mapping[str, str] = os.environ) -> Path:
    """The folder for what cannot be made again: keys, objects, homes."""
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "podpipe"


def image_name(env: Mapping[str, str] = os.environ) -> str:
    """The sandbox image's name, as `IMAGE=` in the environment gives it."""
    return env.get("IMAGE") or "sandbox-base:latest"


def absolute_tool(name: str) -> str:
    """The absolute path of a program on PATH."""
    found = shutil.which(name)
    if found is None:
        raise MissingPrerequisite(f"{name} is not on PATH: install it and run this again")
    return str(Path(found).absolute())


def tail(text: str, limit: int = TAIL_BYTES) -> str:
    """The last whole lines of `text` that fit in `limit` bytes."""
    data = text.strip().encode()
    if len(data) <= limit:
        return data.decode()
    cut = data[-limit:].decode(errors="replace")
    return "[...]\n" + cut.partition("\n")[2]


def tail_of_file(path: Path, limit: int = TAIL_BYTES) -> str:
    """The tail of a log, or a sentence saying that there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            return tail(log.read().decode(errors="replace"), limit)
    except OSError as problem:
        return f"(no log: {problem})"


def run(
    argv: Sequence[str],
    *,
    text_in: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = SHORT_CALL_SECONDS,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; with `check`, a failure quotes the command and its last words."""
    try:
        done = subprocess.run(
            argv,
            input=text_in,
            stdin=subprocess.DEVNULL if text_in is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as problem:
        raise MissingPrerequisite(f"{argv[0]} is not on PATH: install it first") from problem
    except subprocess.TimeoutExpired as problem:
        raise Failure(f"no answer within {timeout:.0f} s from: {shlex.join(argv)}") from problem
    if check and done.returncode != 0:
        said = tail(done.stderr or done.stdout) or "(no output)"
        raise Failure(f"exit code {done.returncode} from: {shlex.join(argv)}\n{said}")
    return done


def run_json(argv: Sequence[str], *, timeout: float = SHORT_CALL_SECONDS) -> Any:
    """Run a command and read its standard output as JSON."""
    text = run(argv, timeout=timeout).stdout
    try:
        return json.loads(text)
    except ValueError as problem:
        raise Failure(f"no JSON from: {shlex.join(argv)}\n{tail(text)}") from problem


def write_private(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, never readable by others in between."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
    draft.replace(path)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two runs never build or start the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run that holds {path}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def stream(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a long command and hand over each line as it comes; a failure quotes the last ones.

    It has no time limit of its own: it shows what it does, and the person watching decides.
    """
    lines: deque[str] = deque(maxlen=60)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=env,
            cwd=cwd,
        )
    except FileNotFoundError as problem:
        raise MissingPrerequisite(f"{argv[0]} is not on PATH: install it first") from problem
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            on_line(line.rstrip())
    if child.returncode != 0:
        said = tail("\n".join(lines)) or "(no output)"
        raise Failure(f"exit code {child.returncode} from: {shlex.join(argv)}\n{said}")
