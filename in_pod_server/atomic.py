"""Writes that happen wholly or not at all, beside the file they are for."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Final

_TEMP_PREFIX: Final = b".podpipe-"


def replace(folder: int, name: bytes, data: bytes, mode: int, *, create_only: bool) -> None:
    """Give `name` in the folder (a descriptor) this content and mode; or fail if it must be new."""
    temp = _TEMP_PREFIX + secrets.token_hex(8).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temp, flags, 0o600, dir_fd=folder)
    try:
        try:
            _write_all(fd, data)
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        if create_only:
            os.link(temp, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(temp, dir_fd=folder)
        else:
            os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp, dir_fd=folder)
        raise


def extend(fd: int, data: bytes) -> None:
    """Add to the end of an open file; what a failure left of it is taken back."""
    size = os.fstat(fd).st_size
    try:
        _write_all(fd, data)
        os.fsync(fd)
    except OSError:
        # Nobody else's bytes are cut: only if the file ends with what we began.
        now = os.fstat(fd).st_size
        if size < now <= size + len(data):
            os.ftruncate(fd, size)
        raise


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
