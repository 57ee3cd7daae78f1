"""What an entry of a folder is, and the refusal of all that is no regular file."""

from __future__ import annotations

import os
import stat
from typing import Literal

from in_pod_server.errors import FileFailedError, short

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]


def status_of(name: bytes, folder: int) -> os.stat_result | None:
    """Return the state of an entry, links not followed; None if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def kind_of(mode: int) -> Kind:
    """Return the kind that a mode tells."""
    kinds: dict[int, Kind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def expect_file(fd: int, path: str) -> os.stat_result:
    """Return the state of what is open.

    Raises:
        FileFailedError: It is no regular file.
    """
    status = os.fstat(fd)
    expect_kind(status, path)
    return status


def expect_kind(status: os.stat_result, path: str) -> None:
    """Refuse what is no regular file.

    Raises:
        FileFailedError: It is none.
    """
    kind = kind_of(status.st_mode)
    if kind == "directory":
        raise FileFailedError(
            f"{short(path)} is a directory, not a file: list_files shows what is in it"
        )
    if kind != "file":
        raise FileFailedError(f"{short(path)} is a {kind}, not a regular file")
