"""Who may open the apps: hashes of what was granted, never a token. The host makes and clears them."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from in_pod_server import contract

MAX_TOKEN_CHARS: Final = 256
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(contract.APP_NAME)

logger = logging.getLogger(__name__)


def cookie_of(token: str) -> str:
    """The cookie that stands for a token in a browser."""
    key = token.encode("utf-8", "surrogateescape")
    return hmac.new(key, contract.COOKIE_OF_TOKEN, hashlib.sha256).hexdigest()


def now() -> datetime:
    """The time by which grants run out."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token opens: everything, or one app, for good or until a time."""

    hash: bytes
    app: str = ""
    until: datetime | None = None

    def lives(self, when: datetime) -> bool:
        """Whether it has not run out."""
        return self.until is None or when < self.until

    def lasts(self) -> float:
        """Until when, as seconds that can be compared."""
        return self.until.timestamp() if self.until else math.inf

    def opens(self, app: str, when: datetime) -> bool:
        """Whether it opens an app then; the sandbox's own page has no name."""
        return self.lives(when) and self.app in ("", app)

    @classmethod
    def from_entry(cls, entry: dict[str, str]) -> Self:
        """Read one entry of ANNOTATION_ACCESS.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        app, until = entry.get("app", ""), entry.get("until", "")
        if not _HASH.fullmatch(entry["hash"]) or (app and not _NAME.fullmatch(app)):
            raise ValueError("no grant")
        when = datetime.fromisoformat(until) if until else None
        if when and when.tzinfo is None:
            raise ValueError("no time zone")
        return cls(bytes.fromhex(entry["hash"]), app, when)


class Access:
    """The grants that this daemon knows: those of the highest version that it was told."""

    def __init__(self) -> None:
        self.version = -1
        self.grants: Sequence[Grant] = ()

    def take(self, told: object) -> None:
        """Take up what an annotation or a host says, if it is newer; what cannot be read is left.

        Args:
            told: as ANNOTATION_ACCESS.
        """
        if not isinstance(told, str) or not told:
            return
        try:
            found = json.loads(told)
            version = found["version"]
            if type(version) is not int or version <= self.version:
                return
            grants = [Grant.from_entry(entry) for entry in found["grants"]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            logger.warning("the grants of this sandbox cannot be read, and stay as they were")
            return
        self.version, self.grants = version, grants[: contract.MAX_GRANTS]

    def opens(self, grant: Grant, app: str, when: datetime) -> bool:
        """Whether a grant that was found earlier is still there, and opens an app then."""
        return any(each.hash == grant.hash and each.opens(app, when) for each in self.grants)

    def of_cookie(self, cookie: str) -> Grant | None:
        """The grant that a cookie proves, whatever it opens; takes as long for a wrong one."""
        presented = hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()
        found = None
        for grant in self.grants:
            if hmac.compare_digest(presented, grant.hash):
                found = grant
        return found

    def of_token(self, token: str) -> Grant | None:
        """The grant that a token proves, whatever it opens."""
        return self.of_cookie(cookie_of(token)) if 0 < len(token) <= MAX_TOKEN_CHARS else None
