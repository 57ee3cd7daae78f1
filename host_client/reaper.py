"""What is over in a namespace, and its deletion: sandboxes that expired or were never finished, and
what no sandbox has any more.

The decision is a pure function of the objects' metadata and the API server's time. What was decided
is deleted only as it was read, by uid and resourceVersion, so whoever extends a sandbox meanwhile has
won; what has changed is read and decided about again. Homes are never looked at.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

import anyio

from host_client.api import Api, Resource, proxied
from host_client.clock import parse_timestamp, timestamp
from host_client.errors import ApiUnreachable, Forbidden, KubectlError, NotFound
from host_client.kubectl import Kubectl
from host_client.pod_view import PodView
from host_client.sandbox import ORPHAN_GRACE_SECONDS, object_name
from in_pod_server import contract as c

CONNECTIONS = 8
"""Deletions under way at once: one API server on two cores is not faster with more."""
TRIES = 3
"""How often an object is decided about anew that changed between decision and deletion."""

RECORDS = "configmaps"
DEPENDANTS = ("pods", "services", "ingresses", "httproutes", "secrets")
RESOURCES: Mapping[str, Resource] = {
    RECORDS: Resource(RECORDS),
    "pods": Resource("pods"),
    "services": Resource("services"),
    "ingresses": Resource("ingresses", "/apis/networking.k8s.io/v1"),
    "httproutes": Resource("httproutes", "/apis/gateway.networking.k8s.io/v1"),
    "secrets": Resource("secrets"),
}
"""What a sandbox can consist of, beside its home."""
MAY_BE_HIDDEN = ("httproutes", "secrets")
"""What few reapers may read: the ones are made only where GATEWAY=httproute is set, the others never."""

SELECTOR = f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_SANDBOX}"

Object = Mapping[str, Any]
"""An object's metadata."""

Reason = Literal["expired", "unfinished", "orphaned"]


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object to delete, exactly as it was read.

    Args:
        resource: a key of `RESOURCES`.
        name: of the object.
        uid: of the object.
        version: its resourceVersion.
        reason: in a word.
        detail: in a sentence.
    """

    resource: str
    name: str
    uid: str
    version: str
    reason: Reason
    detail: str

    @property
    def ref(self) -> str:
        """Resource and name."""
        return f"{self.resource}/{self.name}"

    def to_json(self) -> dict[str, str]:
        """The form of `--json`."""
        return {"object": self.ref, "uid": self.uid, "reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that was kept because nobody can tell when it expires.

    Args:
        name: of the ConfigMap.
        detail: what is wrong with it.
    """

    name: str
    detail: str

    def to_json(self) -> dict[str, str]:
        """The form of `--json`."""
        return {"object": f"{RECORDS}/{self.name}", "detail": self.detail}


def decide_record(
    record: Object, now: datetime, grace: timedelta, ended_at: datetime | None = None
) -> Doomed | Unreadable | None:
    """Whether the record of a sandbox is over.

    Args:
        record: its metadata.
        now: the API server's time, aware.
        grace: age up to which a create may be under way.
        ended_at: when its pod ended by itself, if it did; counts where `may_stand_still`.

    Returns:
        The deletion and why, that its expiry cannot be read, or None while it lives or where it only
        wears a record's labels.
    """
    if "deletionTimestamp" in record or record["name"] != object_name(_sandbox_id(record)):
        return None
    notes = record.get("annotations", {})
    if notes.get(c.ANNOTATION_STATE) == "Creating" and _age(record, now) >= grace:
        return _doomed(RECORDS, record, "unfinished", "whoever created it went away")
    text = notes.get(c.ANNOTATION_EXPIRES_AT)
    if text is None:
        return Unreadable(record["name"], f"it has no annotation {c.ANNOTATION_EXPIRES_AT}")
    try:
        expires_at = parse_timestamp(text)
    except (TypeError, ValueError, OverflowError) as error:
        return Unreadable(record["name"], f"{c.ANNOTATION_EXPIRES_AT} is {text!r}: {error}")
    if now < expires_at or (may_stand_still(record) and _stood_still(notes, ended_at, expires_at)):
        return None
    return _doomed(RECORDS, record, "expired", f"expired at {timestamp(expires_at)}")


def may_stand_still(record: Object) -> bool:
    """Whether a sandbox's time stands still while it is suspended, or has ended by itself."""
    return c.ANNOTATION_SUSPENDED_AT in record.get("annotations", {})


def _stood_still(notes: Mapping[str, str], ended_at: datetime | None, expires_at: datetime) -> bool:
    """Whether it was suspended before its time was over; where nobody can tell, it was."""
    try:
        since = notes[c.ANNOTATION_SUSPENDED_AT] and parse_timestamp(
            notes[c.ANNOTATION_SUSPENDED_AT]
        )
    except (TypeError, ValueError, OverflowError):
        return True
    return any(when < expires_at for when in (since, ended_at) if when)


def decide_dependant(
    resource: str, found: Object, records: Iterable[str], now: datetime, grace: timedelta
) -> Doomed | None:
    """Whether an object that looks like part of a sandbox has lost it.

    It is ours only by label, name and owner together: whatever another controller owns, or is called
    otherwise, is somebody else's, whoever's labels it wears.

    Args:
        resource: its kind, of `DEPENDANTS`.
        found: its metadata.
        records: uids of the records that exist, and the ids of their sandboxes.
        now: the API server's time, aware.
        grace: age up to which its record may not be seen yet.

    Returns:
        The deletion and why, or None where it is to stay.
    """
    sandbox_id = _sandbox_id(found)
    stem = object_name(sandbox_id)
    if not sandbox_id or not f"{found['name']}-".startswith(f"{stem}-"):
        return None
    owners = found.get("ownerReferences", [])
    if any(owner["kind"] != "ConfigMap" or owner["name"] != stem for owner in owners):
        return None
    if any(owner["uid"] in records for owner in owners) or (not owners and sandbox_id in records):
        return None
    if "deletionTimestamp" in found or _age(found, now) < grace:
        return None
    return _doomed(resource, found, "orphaned", f"sandbox {sandbox_id} does not exist any more")


def _age(found: Object, now: datetime) -> timedelta:
    return now - parse_timestamp(found["creationTimestamp"])


def _sandbox_id(found: Object) -> str:
    return str(found.get("labels", {}).get(c.LABEL_SANDBOX, ""))


def _doomed(resource: str, found: Object, reason: Reason, detail: str) -> Doomed:
    return Doomed(resource, found["name"], found["uid"], found["resourceVersion"], reason, detail)


@dataclass(slots=True)
class Report:
    """What one sweep found and did.

    Args:
        dry_run: whether it only looked.
        sandboxes: how many it looked at.
        deleted: what it deleted, or would have.
        kept: what it was about to delete and somebody changed first, as resource/name.
        unreadable: records that nobody can tell the expiry of.
        failed: what could not be deleted or looked at, and why.
        skipped: kinds of `MAY_BE_HIDDEN` that this user may not look at.
    """

    dry_run: bool = False
    sandboxes: int = 0
    deleted: list[Doomed] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        return {
            "dry_run": self.dry_run,
            "sandboxes": self.sandboxes,
            "deleted": [doomed.to_json() for doomed in self.deleted],
            "kept": self.kept,
            "unreadable": [found.to_json() for found in self.unreadable],
            "failed": self.failed,
            "skipped": self.skipped,
        }


async def sweep(
    kubectl: Kubectl,
    *,
    grace_seconds: float = ORPHAN_GRACE_SECONDS,
    dry_run: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Look at a namespace once and delete what is over in it, whoever's it is.

    Args:
        kubectl: the cluster and namespace.
        grace_seconds: age up to which what looks left behind is kept.
        dry_run: only look.
        progress: told what is being done.

    Raises:
        KubectlError: the records cannot be listed; nothing was deleted.
        PrerequisiteError: the context points elsewhere by now.
    """
    async with proxied(kubectl, connections=CONNECTIONS) as api:
        run = _Sweep(api, timedelta(seconds=grace_seconds), Report(dry_run=dry_run), progress)
        await run.look()
        if not dry_run:
            await run.execute()
        return run.report


class _Sweep:
    """One reap of one namespace."""

    def __init__(
        self, api: Api, grace: timedelta, report: Report, progress: Callable[[str], None]
    ) -> None:
        self._api = api
        self._grace = grace
        self._progress = progress
        self._records: set[str] = set()
        self.report = report

    async def look(self) -> None:
        """Decide about everything; what is to go is in the report's `deleted`."""
        self._progress("looking at sandboxes")
        # What hangs from a record first: it is there before them, and gone after it.
        dependants = {
            resource: [d async for d in self._listed(resource)] for resource in DEPENDANTS
        }
        doomed: dict[str, Doomed] = {}
        async for record in self._api.metadata(RESOURCES[RECORDS], SELECTOR):
            self._records |= {record["uid"], record["labels"][c.LABEL_SANDBOX]}
            self.report.sandboxes += 1
            match await self._decided_record(record):
                case Doomed() as over:
                    doomed[over.ref] = over
                case Unreadable() as unreadable:
                    self.report.unreadable.append(unreadable)
        for resource, found in dependants.items():
            for each in found:
                if orphan := await self._decided(resource, each):
                    doomed[orphan.ref] = orphan
        self.report.deleted = list(doomed.values())

    async def _listed(self, resource: str) -> AsyncIterator[Object]:
        try:
            async for found in self._api.metadata(RESOURCES[resource], SELECTOR):
                yield {key: found[key] for key in _NEEDED if key in found}
        except NotFound as error:
            if resource != "httproutes":  # a cluster need not have the Gateway API
                self.report.failed[resource] = str(error)
        except Forbidden as error:
            if resource in MAY_BE_HIDDEN:
                self.report.skipped.append(resource)
            else:
                self.report.failed[resource] = str(error)
        except KubectlError as error:
            self.report.failed[resource] = str(error)

    def _now(self) -> datetime:
        if self._api.now is None:
            raise ApiUnreachable("the API server's answers carry no Date: expiry cannot be judged")
        return self._api.now

    async def _decided_record(self, record: Object) -> Doomed | Unreadable | None:
        decision = decide_record(record, self._now(), self._grace)
        if not isinstance(decision, Doomed) or not may_stand_still(record):
            return decision
        # Only here does it matter when a pod ended, which its metadata do not tell.
        ended = [
            pod.finished_at
            for item in await self._api.objects(
                RESOURCES["pods"], f"{SELECTOR},{c.LABEL_SANDBOX}={_sandbox_id(record)}"
            )
            if (pod := PodView.from_object(item)).phase == "Succeeded" and pod.finished_at
        ]
        return decide_record(record, self._now(), self._grace, max(ended, default=None))

    async def _decided(self, resource: str, found: Object) -> Doomed | None:
        if resource == RECORDS:
            decision = await self._decided_record(found)
            return decision if isinstance(decision, Doomed) else None
        return decide_dependant(resource, found, self._records, self._now(), self._grace)

    async def execute(self) -> None:
        """Delete what was decided, as it was read; the report says what became of it."""
        waiting = list(reversed(self.report.deleted))
        total = len(waiting)
        self.report.deleted = []

        async def work() -> None:
            while waiting:
                self._progress(f"deleting {total - len(waiting) + 1} of {total}")
                await self._delete(waiting.pop())

        async with anyio.create_task_group() as tasks:
            for _ in range(min(CONNECTIONS, total)):
                tasks.start_soon(work)

    async def _delete(self, doomed: Doomed) -> None:
        over: Doomed | None = doomed
        try:
            for _ in range(TRIES):
                if over is None:
                    break
                outcome = await self._api.delete(
                    RESOURCES[over.resource], over.name, uid=over.uid, version=over.version
                )
                if outcome != "changed":
                    self.report.deleted.append(over)
                    return
                found = await self._api.one(RESOURCES[over.resource], over.name)
                if found is None:
                    self.report.deleted.append(over)
                    return
                over = await self._decided(over.resource, found)
        except KubectlError as error:
            self.report.failed[doomed.ref] = str(error)
            return
        self.report.kept.append(doomed.ref)


_NEEDED = (
    "name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "labels",
    "ownerReferences",
)  # fmt: skip
"""What a decision about a dependant looks at: of ten thousand the rest is not kept."""
