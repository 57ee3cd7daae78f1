"""Which paths a transfer may name, at either end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from host_client.errors import UsageError
from in_pod_server.contract import HOME, WORKSPACE


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


def name_of(path: str) -> str:
    """What a thing is called at the other end. Raises `UsageError` if it has no name."""
    name = os.path.basename(path.rstrip("/"))
    if name in ("", ".", ".."):
        name = os.path.basename(os.path.realpath(path))
    if not name:
        raise UsageError(f"{path!r} has no name; use sync for the contents of a folder")
    return name


def resolved(path: str) -> str:
    """A path of this machine without links; what it leads to may still be made.

    Raises:
        UsageError: it is no path.
    """
    if "\0" in path:
        raise UsageError("a path cannot hold a NUL byte")
    return os.path.realpath(path)


def existing(path: str) -> str:
    """A path of this machine without links. Raises `UsageError` if nothing is there."""
    found = resolved(path)
    if not os.path.lexists(found):
        raise UsageError(f"there is no {path!r} on this machine")
    return found


def existing_folder(path: str) -> str:
    """As `existing`, of a folder."""
    found = existing(path)
    if not os.path.isdir(found):
        raise UsageError(f"{path!r} is no folder; sync takes two folders, put takes files too")
    return found


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
