"""Apps of sandboxes, as the record keeps them: what is published, who may open it, at which address.

The daemon's table of apps is the truth while its pod lives, and carries a version that only rises;
the record has the newest that any host has seen, for the next pod. Grants are the host's: it makes
the tokens, and writes down nothing but hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from host_client.clock import parse_timestamp
from host_client.errors import UsageError
from host_client.gateway import Gateway
from host_client.pod_view import PodView
from in_pod_server import contract as c

REDACTED = "redacted"
EXPOSE, LIST, UNEXPOSE = "expose_port", "list_apps", "unexpose_port"
APP_TOOLS = (EXPOSE, LIST, UNEXPOSE)
TABLE = "table"
"""In the results of these: the daemon's table."""


def version_of(text: str) -> int:
    """The version of a table or of grants; 0 for what is none."""
    try:
        version = json.loads(text)["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return version if type(version) is int else 0


def apps_of(text: str) -> Mapping[str, int]:
    """The apps of a table by name; none for what is no table."""
    try:
        found = dict(json.loads(text)["apps"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    known = {name: port for name, port in found.items() if isinstance(name, str)}
    return {name: port for name, port in sorted(known.items()) if type(port) is int}


def new_token() -> str:
    """A token that nobody can guess, for `Authorization: Bearer` or `?token=`."""
    return secrets.token_urlsafe(c.TOKEN_BYTES)


def hash_of(token: str) -> str:
    """What is written down of a token: SHA-256 of its cookie, as hex."""
    cookie = hmac.new(token.encode(), c.COOKIE_OF_TOKEN, hashlib.sha256).hexdigest()
    return hashlib.sha256(cookie.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Grants:
    """Who may open the apps of a sandbox."""

    version: int = 0
    entries: Sequence[Mapping[str, str]] = field(default_factory=tuple)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; what is unreadable grants nothing."""
        try:
            found = json.loads(text)
            entries = [
                {name: str(entry.get(name, "")) for name in ("hash", "app", "until")}
                for entry in found["grants"]
            ]
            return cls(int(found["version"]), entries)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(version_of(text))

    def to_json(self) -> str:
        """The form in which annotations hold it."""
        return json.dumps({"version": self.version, "grants": list(self.entries)}, sort_keys=True)

    def with_token(self, token: str, now: datetime, app: str = "", until: str = "") -> Self:
        """The same with one more, without those that have run out.

        Raises:
            UsageError: there are too many.
        """
        living = [entry for entry in self.entries if not _over(entry["until"], now)]
        if len(living) >= c.MAX_GRANTS:
            raise UsageError(
                f"this sandbox has {c.MAX_GRANTS} tokens: `podpipe access --rotate` clears them all"
            )
        entry = {"hash": hash_of(token), "app": app, "until": until}
        return replace(self, version=self.version + 1, entries=[*living, entry])

    def cleared(self) -> Self:
        """The same without any."""
        return replace(self, version=self.version + 1, entries=())


def first_grant(token: str, now: datetime) -> str:
    """What a new sandbox's record says of who may open its apps: its first token, all of them."""
    return Grants().with_token(token, now).to_json()


def _over(until: str, now: datetime) -> bool:
    try:
        return bool(until) and parse_timestamp(until) <= now
    except ValueError:
        return True


def out_of_reach(gateway: Gateway, sandbox_id: str, pod: PodView) -> str:
    """Why no address of a sandbox leads to the pod that it has now; empty where they do."""
    if not gateway.in_cluster or pod.led_by == gateway.name:
        return ""
    return (
        f"sandbox {sandbox_id} was started before GATEWAY={gateway.kind} and "
        f"BASE_DOMAIN={gateway.domain} were set, so its addresses do not lead to it yet: suspend and "
        f"resume it (`podpipe suspend {sandbox_id}`)"
    )


def told_with_addresses(result: dict[str, Any], gateway: Gateway) -> dict[str, Any]:
    """A result of one of APP_TOOLS as a model sees it: with addresses, without the table."""
    facts = result.get("structuredContent")
    if not isinstance(facts, dict):
        return result
    shown = {name: value for name, value in facts.items() if name != TABLE}
    listed = [_with_address(app, gateway) for app in shown.get("apps", [])]
    lines = [f"{app['name']}: {app['url']}" for app in listed]
    if "host" in shown:
        _, _, sandbox_id = str(shown["host"]).partition(".")
        shown = _with_address(shown, gateway)
        lines.append(
            f"{shown['url']} is its address, with ?token= and the token of create_sandbox; a person "
            f"opens it by `podpipe open {sandbox_id} {shown['name']}`"
        )
    if "apps" in shown:
        shown["apps"] = listed
    content = [*result.get("content", []), *({"type": "text", "text": line} for line in lines)]
    return result | {"structuredContent": shown, "content": content}


def _with_address(app: Mapping[str, Any], gateway: Gateway) -> dict[str, Any]:
    name, _, sandbox_id = str(app["host"]).partition(".")
    rest = {key: value for key, value in app.items() if key != "host"}
    return {**rest, "url": gateway.address(sandbox_id, name)}
