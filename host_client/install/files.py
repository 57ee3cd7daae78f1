"""Somebody else's configuration file, changed without harm.

What a change does not touch stays as it was, a file that does not parse stays altogether as it was,
what there was is kept beside it, and the new content appears in one step, with the old one's mode,
behind a link if it is one.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomlkit
from tomlkit.exceptions import TOMLKitError

from host_client.errors import PodpipeError

BACKUP_SUFFIX = ".podpipe-backup"
NEW_MODE = 0o600
"""Configurations of clients hold other servers' secrets."""
_MARK = "\ufeff"

State = Literal["added", "updated", "removed", "unchanged"]
Mutate = Callable[[dict[str, Any]], State]
"""Changes a parsed document in place and says what it did."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was, or would be, done to a file.

    Args:
        path: the file, links followed.
        state: what happened.
        diff: old and new content, unified; empty where nothing changes.
        backup: where the old content is kept; None where there was none.
    """

    path: Path
    state: State
    diff: str = ""
    backup: Path | None = None


def change_json(path: Path, mutate: Mutate, *, write: bool = True) -> Change:
    """Change a JSON file whose root is an object; an empty or absent one counts as `{}`.

    Args:
        path: the file; it and its folder are made if absent.
        mutate: what to change.
        write: False to only say what would be done.

    Raises:
        PodpipeError: it is not to be read or written, or not JSON; it was left as it was.
    """

    def change(text: str) -> tuple[State, str]:
        document = _parsed_json(path, text) if text.strip() else {}
        if not isinstance(document, dict):
            raise PodpipeError(f"{path}:1: not a JSON object; it was left as it is")
        state = mutate(document)
        return state, text if state == "unchanged" else _dumped_json(document, text)

    return _change(path, change, write=write)


def change_toml(path: Path, mutate: Mutate, *, write: bool = True) -> Change:
    """Change a TOML file, keeping its comments and layout; arguments and errors as `change_json`."""

    def change(text: str) -> tuple[State, str]:
        try:
            expected = tomllib.loads(text)
            document = tomlkit.parse(text)
        except (tomllib.TOMLDecodeError, TOMLKitError, RecursionError) as error:
            place = re.search(r"line (\d+)", str(error))
            line = place[1] if place else text.count("\n") + 1
            raise PodpipeError(
                f"{path}:{line}: not valid TOML ({error}); it was left as it is. Correct it, or "
                "move it away"
            ) from error
        state = mutate(expected)
        if state == "unchanged":
            return state, text
        mutate(document)
        new = tomlkit.dumps(document)
        # The writer is asked to keep the rest; that it did is looked at, not believed.
        try:
            kept = _filled(tomllib.loads(new)) == _filled(expected)
        except tomllib.TOMLDecodeError:
            kept = False
        if not kept:
            raise PodpipeError(
                f"{path} is laid out so that it cannot be changed without harm; it was left as it "
                "is. Paste what --print prints into it"
            )
        return state, new

    return _change(path, change, write=write)


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    """Without empty tables: one that had no line of its own goes with its last entry."""
    return {key: value for key, value in document.items() if value != {}}


def write_text(path: Path, text: str, *, write: bool = True) -> Change:
    """Make `text` the whole content of a file; arguments and errors as `change_json`."""

    def change(old: str) -> tuple[State, str]:
        return ("unchanged" if old == text else "updated" if old else "added"), text

    return _change(path, change, write=write, mode=0o644)


def _parsed_json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key!r} stands twice in one object")
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        reason = error.msg
    except (ValueError, RecursionError) as error:
        where = str(path)
        reason = str(error)
    raise PodpipeError(
        f"{where}: not valid JSON ({reason}); it was left as it is. Correct it, or move it away"
    )


def _dumped_json(document: dict[str, Any], like: str) -> str:
    """JSON with the indentation and line ends of `like`."""
    indent = re.search(r"\n([ \t]+)\"", like)
    options: dict[str, Any] = {"indent": indent[1] if indent else 2, "allow_nan": False}
    try:
        text = json.dumps(document, ensure_ascii=False, **options)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can hold
        text = json.dumps(document, **options)
    except ValueError as error:
        raise PodpipeError(f"a number is too large to be kept ({error})") from error
    if not like.strip() or like.endswith("\n"):
        text += "\n"
    return text.replace("\n", "\r\n") if "\r\n" in like else text


def _change(
    path: Path,
    change: Callable[[str], tuple[State, str]],
    *,
    write: bool,
    mode: int = NEW_MODE,
) -> Change:
    real = Path(os.path.realpath(path))
    try:
        if not write or not real.parent.exists():
            planned = _change_alone(real, change, write=False, mode=mode)
            if not write or planned.state == "unchanged":
                return planned
            real.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(real.parent):
            return _change_alone(real, change, write=True, mode=mode)
    except OSError as error:
        raise PodpipeError(
            f"{real} cannot be changed: {error.strerror or error}; it was left as it is"
        ) from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other install changes a file of this folder.

    Between the last look at a file and its replacement another's entry would be lost.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: as well as can be
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _change_alone(
    real: Path, change: Callable[[str], tuple[State, str]], *, write: bool, mode: int
) -> Change:
    old, facts = _read(real)
    try:
        text = old.decode()
    except UnicodeDecodeError as error:
        line = old[: error.start].count(b"\n") + 1
        raise PodpipeError(f"{real}:{line}: not UTF-8 text; it was left as it is") from error
    mark = _MARK if text.startswith(_MARK) else ""
    state, new = change(text.removeprefix(_MARK))
    if state == "unchanged":
        return Change(real, state)
    new = mark + new
    diff = "\n".join(
        difflib.unified_diff(text.splitlines(), new.splitlines(), str(real), str(real), lineterm="")
    )
    if not write:
        return Change(real, state, diff)
    if facts is None:
        _replace(real, new.encode(), mode, None)
        return Change(real, state, diff)
    if not (facts.st_mode & 0o222 and os.access(real, os.W_OK)):
        raise PodpipeError(
            f"{real} is read-only; it was left as it is. Make it writable (chmod u+w), or paste "
            "what --print prints into it"
        )
    backup = real.with_name(real.name + BACKUP_SUFFIX)
    _replace(backup, old, stat.S_IMODE(facts.st_mode), facts)
    if _read(real)[0] != old:
        raise PodpipeError(f"{real} was changed by somebody else just now; run this again")
    _replace(real, new.encode(), stat.S_IMODE(facts.st_mode), facts)
    return Change(real, state, diff, backup)


def _read(path: Path) -> tuple[bytes, os.stat_result | None]:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return b"", None
    if not stat.S_ISREG(facts.st_mode):
        raise PodpipeError(f"{path} is not a file; name the configuration file itself")
    return path.read_bytes(), facts


def _replace(path: Path, content: bytes, mode: int, owner: os.stat_result | None) -> None:
    """Put `content` at `path` in one step."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if owner and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
