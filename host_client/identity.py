"""Who a connection belongs to, and the names that follow from it.

Identity comes from the connection or its settings, never from a tool's argument. A user id that is
a plain DNS label keeps its name in the cluster; any other becomes a readable hint and a hash, and
the true id is kept in an annotation and compared, so that two ids never share a home.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import re
import secrets
import socket

from host_client.errors import UsageError

MAX_USER_ID_BYTES = 256
MAX_NAME = 32
"""Longest sandbox name: with all its suffixes a pod's name stays a DNS label, and so a host name."""

_HASH_CHARS = 26  # 130 bits in base32
_ID_CHARS = 16  # 80 random bits in base32
_NAME_SUFFIX_CHARS = 8
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_LOOKS_HASHED = re.compile(rf"(.*-)?[a-z2-7]{{{_HASH_CHARS}}}")
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?")


def default_user() -> str:
    """The OS user at this machine, so that two `root`s on one cluster share nothing."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _base32(data: bytes, chars: int) -> str:
    return base64.b32encode(data).decode("ascii").lower().rstrip("=")[:chars]


def user_key(user_id: str) -> str:
    """The user's key: a DNS label of at most 43 characters, used in labels and object names.

    Args:
        user_id: the true id, 1 to 256 bytes of UTF-8 without control characters.

    Returns:
        `user_id` itself where it is a plain label of at most 40 characters that does not look
        like a hashed key, otherwise `hint-hash`. Distinct ids have distinct keys: nothing is
        folded or normalised before hashing.

    Raises:
        UsageError: the id is empty, too long, or holds control or unencodable characters.
    """
    try:
        raw = user_id.encode()
    except UnicodeEncodeError:
        raise UsageError(f"user id {user_id!a} is not valid Unicode text") from None
    if not 1 <= len(raw) <= MAX_USER_ID_BYTES or any(c < 0x20 or c == 0x7F for c in raw):
        raise UsageError(
            f"user id {user_id[:40]!r} is not usable: it has to be 1 to {MAX_USER_ID_BYTES} bytes "
            "without control characters; set PODPIPE_USER"
        )
    if _LABEL.fullmatch(user_id) and not _LOOKS_HASHED.fullmatch(user_id):
        return user_id
    digest = _base32(hashlib.sha256(b"podpipe-user\0" + raw).digest(), _HASH_CHARS)
    hint = re.sub(r"[^a-z0-9]+", "-", user_id.lower()).strip("-")[:16].strip("-") or "u"
    return f"{hint}-{digest}"


def home_claim(key: str) -> str:
    """Name of the user's PersistentVolumeClaim."""
    return f"user-{key}-pvc"


def new_sandbox_id() -> str:
    """A random id of 80 bits that is a DNS label and starts with a letter."""
    return "s" + _base32(secrets.token_bytes(10), _ID_CHARS)


def is_random_id(text: str) -> bool:
    """Whether `text` has the form of an id that `new_sandbox_id` makes."""
    return bool(re.fullmatch(rf"s[a-z2-7]{{{_ID_CHARS}}}", text))


def named_sandbox_id(key: str, name: str) -> str:
    """The id of a user's sandbox called `name`; the same for ever, and no other user's.

    Raises:
        UsageError: the name is not a lower-case DNS label of at most 40 characters that starts
            with a letter.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"sandbox name {name[:80]!r} is not usable: lower-case letters, digits and '-', "
            f"starting with a letter, at most {MAX_NAME} characters, for example 'build-1'"
        )
    digest = hashlib.sha256(f"podpipe-name\0{key}\0{name}".encode()).digest()
    return f"{name}-{_base32(digest, _NAME_SUFFIX_CHARS)}"


def is_sandbox_id(text: str) -> bool:
    """Whether `text` has the form of a sandbox id or name, so that it may enter an argv."""
    return len(text) <= MAX_NAME + 1 + _NAME_SUFFIX_CHARS and bool(
        re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text)
    )
