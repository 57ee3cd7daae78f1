"""What a sandbox is: its record, and what that and its pods say together. Pure data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Literal, Self, get_args

from host_client.clock import parse_timestamp
from host_client.config import MAX_TTL_LIMIT, Settings
from host_client.errors import PodpipeError, UsageError
from host_client.identity import named_sandbox_id, new_sandbox_id
from host_client.pod_view import Object, PodView
from host_client.quantity import quantity, refuse_beyond_cap
from in_pod_server import contract as c

RecordState = Literal["Creating", "Running", "Suspended"]
"""What the record asks for; the pod shows what is. Creating asks for a pod too, but nobody has been
told of the sandbox yet: if it stays so, its maker is gone, and the reaper takes it."""

Phase = Literal["running", "starting", "stopping", "suspended", "expired", "failed"]
"""What a person is told; `failed` carries a reason."""

ORPHAN_GRACE_SECONDS = 600
"""Younger than this, what looks left behind may be a create under way: the longest takes two minutes."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox was asked to be; kept in the record, so that resume makes the same again."""

    image: str
    cpu_limit: str
    memory_limit: str
    cpu_request: str
    memory_request: str
    ephemeral_storage_limit: str
    max_ttl_minutes: int
    max_file_bytes: int
    idle_suspend_minutes: int = 0
    """0: never; also in the records of a podpipe that knew no idle sandboxes."""
    ttl_stops: bool = False
    """Whether its time stands still while it is suspended; likewise."""

    @classmethod
    def from_settings(cls, settings: Settings, cpu_limit: str = "", memory_limit: str = "") -> Self:
        """The spec that settings and the caller's limits make.

        Args:
            settings: defaults and requests.
            cpu_limit: a Kubernetes quantity; empty for the default.
            memory_limit: likewise.

        Raises:
            UsageError: a limit is no quantity, or none that a sandbox may have.
        """
        cpu = cpu_limit or settings.cpu_limit
        memory = memory_limit or settings.memory_limit
        refuse_beyond_cap(cpu, "cpu_limit", "cpu", settings.max_cpu_limit)
        refuse_beyond_cap(memory, "memory_limit", "memory", settings.max_memory_limit)
        return cls(
            image=settings.image,
            cpu_limit=cpu,
            memory_limit=memory,
            # A request above the limit is refused by the API, so a small sandbox asks for less.
            cpu_request=_smaller(settings.cpu_request, cpu, "cpu_limit"),
            memory_request=_smaller(settings.memory_request, memory, "memory_limit"),
            ephemeral_storage_limit=settings.ephemeral_storage_limit,
            max_ttl_minutes=settings.max_ttl_minutes,
            max_file_bytes=settings.max_file_bytes,
            idle_suspend_minutes=settings.idle_suspend_minutes,
            ttl_stops=settings.ttl_stops,
        )

    def to_json(self) -> str:
        """The form in which the record keeps it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; what a newer podpipe added is left out.

        Raises:
            ValueError, TypeError, KeyError: a fact is missing or is none.
        """
        found = json.loads(text)
        known = {"idle_suspend_minutes": 0, "ttl_stops": False} | found
        spec = cls(**{spec_field.name: known[spec_field.name] for spec_field in fields(cls)})
        if not 1 <= spec.max_ttl_minutes <= MAX_TTL_LIMIT or spec.max_file_bytes < 1:
            raise ValueError("a number in the spec is out of range")
        if not 0 <= spec.idle_suspend_minutes <= MAX_TTL_LIMIT:
            raise ValueError("idle_suspend_minutes is out of range")
        if not isinstance(spec.ttl_stops, bool):
            raise TypeError("ttl_stops")
        for name in ("cpu_limit", "memory_limit", "cpu_request", "memory_request"):
            if not isinstance(getattr(spec, name), str):
                raise TypeError(name)
        return spec


def _smaller(request: str, limit: str, what: str) -> str:
    return limit if quantity(limit, what) < quantity(request, "request") else request


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A record, as read from the cluster or about to be written.

    `uid` and `version` are empty until the API has given them.
    """

    id: str
    name: str
    user_key: str
    user_id: str
    session_id: str
    created_at: datetime
    expires_at: datetime
    state: RecordState
    incarnation: int
    spec: SandboxSpec
    suspended_at: datetime | None = None
    """Since when its time stands still; None where it does not."""
    apps: str = ""
    """The published apps, as ANNOTATION_APPS."""
    access: str = ""
    """Who may open them, as ANNOTATION_ACCESS."""
    uid: str = ""
    version: str = ""

    @property
    def object_name(self) -> str:
        """Name of the record."""
        return object_name(self.id)

    @property
    def pod_name(self) -> str:
        """Name of the present pod: two hosts that resume at once make the same one.

        It carries the record's uid, so that a sandbox made again under the same name never takes
        the dying pod of the old one for its own.
        """
        return f"{self.object_name}-{self.uid[:5]}-{self.incarnation}"

    def expired(self, now: datetime) -> bool:
        """Whether its time is over."""
        return now >= self.counted(now).expires_at

    def counted(self, now: datetime) -> Sandbox:
        """The same as it is now: time that stood still has not passed."""
        if self.suspended_at is None or now <= self.suspended_at:
            return self
        later = self.expires_at + (now - self.suspended_at)
        return replace(self, expires_at=later, suspended_at=now)

    def suspended(self, now: datetime) -> Sandbox:
        """The same, suspended from now on."""
        since = now.replace(microsecond=0) if self.spec.ttl_stops else None
        return replace(self, state="Suspended", suspended_at=since)

    def resumed(self, now: datetime) -> Sandbox:
        """The same in its next incarnation."""
        return replace(
            self.counted(now), state="Running", incarnation=self.incarnation + 1, suspended_at=None
        )

    def seen_with(self, pods: Sequence[PodView]) -> Sandbox:
        """The same, as its pods show it: one that ended by itself has been suspended since then."""
        pod = current_pod(self, pods)
        if not self.spec.ttl_stops or pod is None or pod.phase != "Succeeded":
            return self
        since = [when for when in (self.suspended_at, pod.finished_at) if when]
        return replace(self, suspended_at=max(since)) if since else self

    @classmethod
    def from_record(cls, record: Object) -> Self:
        """Parse a record.

        Raises:
            PodpipeError: a fact in it is missing or unreadable; the message names it.
        """
        metadata = record["metadata"]
        labels, notes = metadata.get("labels", {}), metadata.get("annotations", {})
        try:
            state = notes[c.ANNOTATION_STATE]
            if state not in get_args(RecordState):
                raise ValueError(f"state {state!r}")
            return cls(
                id=labels[c.LABEL_SANDBOX],
                name=notes.get(c.ANNOTATION_NAME, ""),
                user_key=labels[c.LABEL_USER],
                user_id=notes[c.ANNOTATION_USER_ID],
                session_id=notes.get(c.ANNOTATION_SESSION_ID, ""),
                created_at=parse_timestamp(notes[c.ANNOTATION_CREATED_AT]),
                expires_at=parse_timestamp(notes[c.ANNOTATION_EXPIRES_AT]),
                state=state,
                incarnation=int(notes[c.ANNOTATION_INCARNATION]),
                spec=SandboxSpec.from_json(record["data"]["spec"]),
                suspended_at=parse_timestamp(since)
                if (since := notes.get(c.ANNOTATION_SUSPENDED_AT))
                else None,
                apps=notes.get(c.ANNOTATION_APPS, ""),
                access=notes.get(c.ANNOTATION_ACCESS, ""),
                uid=metadata["uid"],
                version=metadata["resourceVersion"],
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PodpipeError(
                f"the record ConfigMap {metadata.get('name')} is unreadable ({error!r}); it was left "
                "untouched. Look at it with `kubectl get configmap -o yaml`; deleting it removes "
                "the sandbox, never the home"
            ) from error

    def born_at(self, when: datetime) -> Sandbox:
        """The same, with a life that begins then and lasts as long."""
        return replace(self, created_at=when, expires_at=self.expires_at + (when - self.created_at))

    def with_lifetime(self, now: datetime, ttl_minutes: int) -> Sandbox:
        """The same, to expire `ttl_minutes` from now, as far as its pods can live.

        Raises:
            UsageError: outside 1 to the sandbox's own maximum.
        """
        if not 1 <= ttl_minutes <= self.spec.max_ttl_minutes:
            raise UsageError(
                f"ttl_minutes={ttl_minutes} has to be from 1 to {self.spec.max_ttl_minutes} "
                "(setting MAX_TTL_MINUTES)"
            )
        wanted = now + timedelta(minutes=ttl_minutes)
        latest = self.created_at + timedelta(minutes=self.spec.max_ttl_minutes)
        return replace(self, expires_at=min(wanted, latest).replace(microsecond=0))


def draft_sandbox(
    settings: Settings,
    now: datetime,
    name: str = "",
    ttl_minutes: int | None = None,
    cpu_limit: str = "",
    memory_limit: str = "",
) -> Sandbox:
    """A sandbox of the settings' user that does not exist yet.

    Args:
        settings: whose, and the defaults of what is None or empty.
        now: when its life begins.
        name: for one that is found again by it; empty for a random id.
        ttl_minutes: lifetime.
        cpu_limit: Kubernetes quantity.
        memory_limit: Kubernetes quantity.

    Raises:
        UsageError: an argument makes no sense.
    """
    key = settings.user_key
    return Sandbox(
        id=named_sandbox_id(key, name) if name else new_sandbox_id(),
        name=name,
        user_key=key,
        user_id=settings.user,
        session_id=settings.session,
        created_at=now,
        expires_at=now,
        state="Creating",
        incarnation=1,
        spec=SandboxSpec.from_settings(settings, cpu_limit, memory_limit),
    ).with_lifetime(now, settings.ttl_minutes if ttl_minutes is None else ttl_minutes)


def object_name(sandbox_id: str) -> str:
    """Name of a sandbox's record, and the stem of its pods' names."""
    return f"sandbox-{sandbox_id}"


def phase(sandbox: Sandbox, pods: Sequence[PodView], now: datetime) -> Phase:
    """What to tell of a sandbox, from its record and all its pods."""
    if sandbox.expired(now):
        return "expired"
    if sandbox.state == "Suspended":
        return "stopping" if any(not pod.ended for pod in pods) else "suspended"
    pod = current_pod(sandbox, pods)
    if pod is None or pod.deleting:
        return "starting" if not any(p.ended for p in pods) else "suspended"
    if pod.ended:
        return "suspended" if pod.phase == "Succeeded" else "failed"
    if pod.failure(now):
        return "failed"
    return "running" if pod.container_running else "starting"


def current_pod(sandbox: Sandbox, pods: Sequence[PodView]) -> PodView | None:
    """The pod of the record's present incarnation, if the cluster has it."""
    return next((pod for pod in pods if pod.name == sandbox.pod_name), None)
