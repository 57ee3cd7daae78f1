"""Open paths beneath one folder, and nothing else, whatever links lie on the way.

Linux does it in one call: openat2 with RESOLVE_BENEATH. Where a kernel or a seccomp profile has
none, a walk from descriptor to descriptor does the same: links are followed by hand, and only
while they stay beneath. Both refuse absolute links and the links of /proc.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final, Protocol

_SYS_OPENAT2: Final = 437
"""The same number on every architecture."""
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_RACES: Final = 64
"""openat2 says EAGAIN when any rename or mount of the system raced with `..`; so often it is tried
again, and then the walk does it."""
_MAX_PATH: Final = 4095
_MAX_LINKS: Final = 40
"""As many links as the kernel itself follows."""


class Opener(Protocol):
    """Opens `path` beneath the folder `root` (a descriptor); raises OSError (EXDEV: it escapes)."""

    def __call__(self, root: int, path: bytes, flags: int, mode: int = 0) -> int:
        """Return a descriptor that is not inherited."""
        ...


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_beneath(root: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Open by openat2, or by the walk if renames all around never let it."""
    libc = ctypes.CDLL(None, use_errno=True)
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_RACES):
        fd: int = libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EAGAIN:
            raise OSError(code, os.strerror(code), path)
    return walk_beneath(root, path, flags, mode)


def walk_beneath(root: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Open by a walk that follows no link but those it has read and judged itself."""
    if path.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    if len(path) > _MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    todo = [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]
    wants_folder = path.endswith((b"/", b"/.")) or not todo
    stack = [os.dup(root)]
    links = 0
    try:
        while todo:
            part = todo.pop()
            if part == b"..":
                if len(stack) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                os.close(stack.pop())
                continue
            target = _link_target(part, stack[-1])
            if target is not None and (todo or not flags & os.O_NOFOLLOW):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                if target.startswith(b"/"):
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                wants_folder = wants_folder or (not todo and target.endswith(b"/"))
                todo += [p for p in reversed(target.split(b"/")) if p not in (b"", b".")]
            elif todo or wants_folder:
                folder = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                stack.append(os.open(part, folder, dir_fd=stack[-1]))
            else:
                return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=stack[-1])
        return os.open(b".", flags | os.O_CLOEXEC, mode, dir_fd=stack[-1])
    finally:
        for fd in stack:
            os.close(fd)


def _link_target(name: bytes, folder: int) -> bytes | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def best_opener(root: int) -> Opener:
    """Return openat2 where it works, the walk where it does not."""
    try:
        os.close(open_beneath(root, b".", os.O_PATH | os.O_DIRECTORY))
    except OSError as exc:
        if exc.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return walk_beneath
        raise
    return open_beneath
