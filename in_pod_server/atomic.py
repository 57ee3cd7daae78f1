"""Writes and moves that happen wholly or not at all, beside the file they are for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Callable
from typing import Final

_TEMP_PREFIX: Final = b".podpipe-"
_RENAME_NOREPLACE: Final = 1


class ChangedMeanwhileError(Exception):
    """What was to be replaced is not any more what the new content was made from."""


def replace(
    folder: int,
    name: bytes,
    data: bytes,
    mode: int,
    *,
    create_only: bool = False,
    unchanged: Callable[[], bool] = lambda: True,
) -> None:
    """Give `name` in the folder (a descriptor) this content and mode, wholly or not at all.

    Args:
        folder: descriptor of the folder.
        name: of the file in it.
        data: the new content.
        mode: the new permission bits.
        create_only: fail if it is there already.
        unchanged: asked when all is stored but the name, which is then given only if it says so.

    Raises:
        ChangedMeanwhileError: `unchanged` said no; what is there was left alone.
        OSError: it could not be stored, or is there already; what is there was left alone.
    """
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
        if not unchanged():
            raise ChangedMeanwhileError
        if create_only:
            os.link(temp, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(temp, dir_fd=folder)
        else:
            os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
        _store_names(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp, dir_fd=folder)
        raise


def _store_names(folder: int) -> None:
    """Make a new name last, too, where the folder may be read and its disk can do that."""
    with contextlib.suppress(OSError):
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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


def move(folder: int, name: bytes, other: int, new_name: bytes, *, overwrite: bool) -> None:
    """Rename between two folders (descriptors); unless `overwrite`, never onto what is there."""
    if overwrite:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=other)
        _leave_no_twin(folder, name, other, new_name)
        return
    try:
        _rename_noreplace(folder, name, other, new_name)
    except OSError as exc:
        # Also what a file system says that knows no such flag.
        if exc.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        _move_by_hand(folder, name, other, new_name)


def _leave_no_twin(folder: int, name: bytes, other: int, new_name: bytes) -> None:
    """Where both names were links to one file, renaming has done nothing, and said that it did."""
    if name == new_name and os.path.samestat(os.fstat(folder), os.fstat(other)):
        return
    with contextlib.suppress(FileNotFoundError):
        left = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if os.path.samestat(left, os.stat(new_name, dir_fd=other, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)


def _rename_noreplace(folder: int, name: bytes, other: int, new_name: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(
        ctypes.c_int(folder),
        ctypes.c_char_p(name),
        ctypes.c_int(other),
        ctypes.c_char_p(new_name),
        ctypes.c_uint(_RENAME_NOREPLACE),
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _move_by_hand(folder: int, name: bytes, other: int, new_name: bytes) -> None:
    """Claim the new name by what fails if it is taken, then move."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=other, follow_symlinks=False)
        os.unlink(name, dir_fd=folder)
        return
    os.mkdir(new_name, dir_fd=other)
    try:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=other)
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(new_name, dir_fd=other)
        raise


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
