"""The plain backend: a ConfigMap as the record, a Pod as its incarnation, a PVC as the home.

Everything that a sandbox owns carries an ownerReference to the record, so deleting the record
removes it all; the home is never owned. The record is claimed by `kubectl create`, where the API
decides who is first; home and pod are applied server-side without force, so an object of the same
name that somebody else made is refused, not adopted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import anyio

from host_client import manifest
from host_client.backends import gateway
from host_client.clock import parse_timestamp, timestamp
from host_client.config import DEFAULT_RUNTIME_CLASS, DEFAULT_STORAGE_CLASS, Settings
from host_client.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    KubectlError,
    LaunchFailed,
    NameTaken,
    NotFound,
    PodpipeError,
    SandboxNotFound,
    UsageError,
)
from host_client.identity import home_claim
from host_client.kubectl import Kubectl, Object
from host_client.pod_view import PodView
from host_client.quantity import quantity
from host_client.sandbox import Sandbox, SandboxSpec
from in_pod_server import contract as c

log = logging.getLogger(__name__)


SERVICE_ACCOUNT_WAIT_SECONDS = 10.0
"""A namespace's `default` ServiceAccount follows the namespace; until then pods are refused."""
LOG_LINES, LOG_BYTES = 5, 600
"""How much of a crashed container's log an error quotes."""
_RETRY_SECONDS = 0.3

_CONFIGMAPS = "configmaps"
_PODS = "pods"
_CLAIMS = "persistentvolumeclaims"


class PodBackend:
    """Sandboxes as plain objects, through one `Kubectl`.

    Args:
        kubectl: the pinned cluster.
        settings: whose sandboxes, and how they are made.
    """

    def __init__(self, kubectl: Kubectl, settings: Settings) -> None:
        self._kubectl = kubectl
        self._settings = settings
        self._classes: tuple[str, str] | None = None
        self.warnings: list[str] = []
        """What a person should know about how sandboxes are made here, each said once."""

    async def observe(self, sandbox_id: str) -> tuple[Sandbox, list[PodView]]:
        """The record and all pods of one sandbox.

        Raises:
            SandboxNotFound: there is no record of ours.
        """
        found = await self._select(f"{c.LABEL_SANDBOX}={sandbox_id}", strict=True)
        if sandbox_id not in found:
            raise SandboxNotFound(
                f"sandbox {sandbox_id} does not exist in namespace {self._settings.namespace}; "
                "`podpipe list` (list_sandboxes) shows what does"
            )
        return found[sandbox_id]

    async def owned_by(self, user_key: str) -> list[tuple[Sandbox, list[PodView]]]:
        """All sandboxes with their pods, oldest first.

        Args:
            user_key: of their user; empty for all users.
        """
        found = await self._select(f"{c.LABEL_USER}{'=' if user_key else ''}{user_key}")
        return sorted(found.values(), key=lambda pair: (pair[0].created_at, pair[0].id))

    async def records(self) -> list[Object]:
        """The records of all users, as the API has them."""
        return await self._kubectl.select(
            _CONFIGMAPS, f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_SANDBOX}"
        )

    async def _select(
        self, selector: str, *, strict: bool = False
    ) -> dict[str, tuple[Sandbox, list[PodView]]]:
        items = await self._kubectl.select(
            f"{_CONFIGMAPS},{_PODS}", f"{c.LABEL_MANAGED_BY}={c.PREFIX},{selector}"
        )
        found: dict[str, tuple[Sandbox, list[PodView]]] = {}
        by_uid: dict[str, list[PodView]] = {}
        for item in items:
            if item["kind"] != "ConfigMap":
                continue
            try:
                sandbox = Sandbox.from_record(item)
            except PodpipeError as error:
                if strict and self._is_own(item):
                    raise
                if strict:
                    continue  # that there is one is not for others to know
                self._warn(str(error))  # one broken record must not hide the others
                continue
            found[sandbox.id] = (sandbox, by_uid.setdefault(sandbox.uid, []))
        # A pod counts only by its owner's uid: a label alone can be anybody's.
        for item in items:
            for owner in item["metadata"].get("ownerReferences", []):
                if item["kind"] == "Pod" and owner["uid"] in by_uid:
                    by_uid[owner["uid"]].append(PodView.from_object(item))
        return {name: (sandbox.seen_with(pods), pods) for name, (sandbox, pods) in found.items()}

    def _is_own(self, item: Object) -> bool:
        labels = item["metadata"].get("labels", {})
        return bool(labels.get(c.LABEL_USER) == self._settings.user_key)

    async def claim(self, sandbox: Sandbox) -> Sandbox:
        """Write the record of a new sandbox, making the namespace if that is what is missing.

        Raises:
            NameTaken: an object of that name exists; it was not touched.
        """
        record = manifest.record(sandbox, self._settings)
        while True:
            try:
                made = await self._kubectl.create(record)
                return Sandbox.from_record(made).born_at(_made_at(made))
            except NotFound:
                await self._make_namespace()
            except AlreadyExists:
                found = await self._kubectl.get(_CONFIGMAPS, sandbox.object_name)
                if found:  # else it has just gone: the name is free
                    raise self._name_taken(sandbox, found) from None

    def _name_taken(self, sandbox: Sandbox, found: Object) -> NameTaken:
        labels = found["metadata"].get("labels", {})
        if labels.get(c.LABEL_SANDBOX) == sandbox.id:
            ref = sandbox.name or sandbox.id
            return NameTaken(
                f"sandbox {ref} exists already; use it, or destroy it first: "
                f"`podpipe destroy {ref}` (destroy_sandbox)"
            )
        return NameTaken(
            f"ConfigMap {sandbox.object_name} in namespace {self._settings.namespace} was not made "
            "by podpipe; it was left untouched. Choose another name"
        )

    async def _make_namespace(self) -> None:
        try:
            await self._kubectl.apply([manifest.namespace(self._settings)])
        except Forbidden as error:
            raise Forbidden(
                f"namespace {self._settings.namespace} does not exist and may not be made by you "
                f"({error}); ask an administrator for it, or set NAMESPACE to one that you may use",
                argv=error.argv,
                returncode=error.returncode,
                stderr=error.stderr,
            ) from error
        log.info("made namespace %s", self._settings.namespace)

    async def server_time(self) -> datetime | None:
        """The API server's clock to the second, from the answer to a create that makes nothing."""
        nothing = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"generateName": "podpipe-time-", "namespace": self._settings.namespace},
        }
        try:
            return _made_at(await self._kubectl.would_create(nothing))
        except KubectlError as error:
            log.info("the API server's clock is not told: %s", error)
            return None

    async def update(self, old: Sandbox, new: Sandbox) -> Sandbox:
        """Change state, incarnation, times, apps and grants of a record still as `old` was read.

        Raises:
            Conflict: somebody else changed it first.
            SandboxNotFound: it was destroyed.
        """
        changes = {
            c.ANNOTATION_STATE: new.state,
            c.ANNOTATION_INCARNATION: str(new.incarnation),
            c.ANNOTATION_CREATED_AT: timestamp(new.created_at),
            c.ANNOTATION_EXPIRES_AT: timestamp(new.expires_at),
        }
        if new.spec.ttl_stops:
            since = new.suspended_at
            changes[c.ANNOTATION_SUSPENDED_AT] = timestamp(since) if since else ""
        changes |= _of_apps(new)
        try:
            record = await self._kubectl.annotate(
                "configmap", old.object_name, changes, version=old.version
            )
        except NotFound:
            raise SandboxNotFound(f"sandbox {old.id} was destroyed meanwhile") from None
        return Sandbox.from_record(record)

    async def announce(self, sandbox: Sandbox, pod: PodView) -> None:
        """Tell the pod its expiry, apps and grants, by annotation; one that is gone needs none."""
        found = await self._kubectl.get(_PODS, pod.name)
        if found is None or found["metadata"]["uid"] != pod.uid:
            return
        try:
            await self._kubectl.annotate(
                "pod",
                pod.name,
                {c.ANNOTATION_EXPIRES_AT: timestamp(sandbox.expires_at), **_of_apps(sandbox)},
                version=found["metadata"]["resourceVersion"],
            )
        except (Conflict, NotFound) as error:
            log.info("pod %s keeps its old annotations: %s", pod.name, error)

    async def home(self) -> Object | None:
        """The user's home claim, or None if it has never been made.

        Raises:
            NameTaken: a claim of that name belongs to another user, or is not ours.
        """
        name = home_claim(self._settings.user_key)
        claim = await self._kubectl.get(_CLAIMS, name)
        if claim is None:
            return None
        metadata = claim["metadata"]
        owner = metadata.get("annotations", {}).get(c.ANNOTATION_USER_ID)
        ours = metadata.get("labels", {}).get(c.LABEL_MANAGED_BY) == c.PREFIX
        if not ours or owner != self._settings.user:
            whose = "belongs to another user" if ours else "was not made by podpipe"
            raise NameTaken(
                f"PersistentVolumeClaim {name} in namespace {self._settings.namespace} {whose}, not "
                f"to {self._settings.user!r}; it was left untouched. Set PODPIPE_USER to another id"
            )
        if "deletionTimestamp" in metadata:
            raise LaunchFailed(
                f"PersistentVolumeClaim {name} is being deleted; wait until it is gone, then try again",
                reason="Terminating",
            )
        return claim

    async def refuse_oversized(self, spec: SandboxSpec) -> None:
        """Refuse limits that no node of the cluster has; where nodes may not be read, let it be.

        The scheduler looks at requests only, so a limit beyond every node would be promised and
        never kept.

        Raises:
            UsageError: the message names the largest node.
        """
        try:
            nodes = (await self._kubectl.json("get", "nodes", "-o", "json")).get("items", [])
        except Forbidden:
            return
        for resource, limit in (("cpu", spec.cpu_limit), ("memory", spec.memory_limit)):
            sizes = [str(node["status"]["allocatable"][resource]) for node in nodes]
            largest = max(sizes, key=lambda size: quantity(size, resource), default=None)
            if largest and quantity(limit, resource) > quantity(largest, resource):
                raise UsageError(
                    f"{resource}_limit={limit} is more than any node of the cluster has (the "
                    f"largest has {largest}); ask for less, or add a node"
                )

    async def start(self, sandbox: Sandbox, home: Mapping[str, Any] | None) -> PodView:
        """Apply the pod of the record's present incarnation, and the home if there is none yet.

        Args:
            sandbox: the record as the API has it.
            home: what `home()` gave.

        Raises:
            LaunchFailed: the API refused the pod, or what leads to it: quota, Pod Security, policy.
            NameTaken: an object of that name is not ours.
        """
        await gateway.lead_to(self._kubectl, sandbox, self._settings)
        runtime_class, storage_class = await self.cluster_classes()
        claim = [] if home else [manifest.home(self._settings, storage_class)]
        access_modes = (home or claim[0])["spec"]["accessModes"]
        deadline = anyio.current_time() + SERVICE_ACCOUNT_WAIT_SECONDS
        while True:
            pod = manifest.pod(sandbox, self._settings, runtime_class, access_modes)
            try:
                applied = await self._kubectl.apply([*claim, pod])
                break
            except Conflict as error:
                raise NameTaken(
                    f"Pod {sandbox.pod_name} or its home exists and is managed by somebody else; "
                    f"it was left untouched ({error})"
                ) from error
            except KubectlError as error:
                if _no_runtime_class(error, runtime_class) and self._settings.runtime_class is None:
                    self._warn_no_gvisor()
                    runtime_class = ""
                    self._classes = ("", storage_class)
                elif "error looking up service account" not in str(error) or (
                    anyio.current_time() > deadline
                ):
                    raise _refused(sandbox, error) from error
                else:
                    await anyio.sleep(_RETRY_SECONDS)
        view = next(o for o in applied if o["kind"] == "Pod")
        owners = [owner["uid"] for owner in view["metadata"].get("ownerReferences", [])]
        if owners != [sandbox.uid]:
            raise NameTaken(
                f"Pod {sandbox.pod_name} exists and does not belong to sandbox {sandbox.id}"
            )
        return PodView.from_object(view)

    async def predecessors(self, sandbox: Sandbox) -> list[PodView]:
        """Pods of an earlier sandbox of the same name that still exist."""
        items = await self._kubectl.select(
            _PODS, f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_SANDBOX}={sandbox.id}"
        )
        return [
            PodView.from_object(item)
            for item in items
            if all(o["uid"] != sandbox.uid for o in item["metadata"].get("ownerReferences", []))
        ]

    async def users_of_home(self) -> list[str]:
        """Records, readable or not, and pods that carry the user's label and are not going away."""
        items = await self._kubectl.select(
            f"{_CONFIGMAPS},{_PODS}",
            f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_USER}={self._settings.user_key}",
        )
        return [
            f"{item['kind']} {item['metadata']['name']}"
            for item in items
            if "deletionTimestamp" not in item["metadata"]
        ]

    async def stop(self, pod: PodView) -> None:
        """Ask for the end of this very pod; returns before it is gone."""
        await self._kubectl.delete(_PODS, pod.name, uid=pod.uid)

    async def delete(self, sandbox: Sandbox) -> None:
        """Delete the record, and with it all that it owns; returns before the pod is gone."""
        await self._kubectl.delete(_CONFIGMAPS, sandbox.object_name, uid=sandbox.uid)

    async def pods_left(self, sandbox: Sandbox) -> list[PodView]:
        """The sandbox's pods that still exist, its record gone or not."""
        items = await self._kubectl.select(
            _PODS, f"{c.LABEL_MANAGED_BY}={c.PREFIX},{c.LABEL_SANDBOX}={sandbox.id}"
        )
        return [
            PodView.from_object(item)
            for item in items
            if any(o["uid"] == sandbox.uid for o in item["metadata"].get("ownerReferences", []))
        ]

    async def delete_home(self, uid: str) -> bool:
        """Delete the user's home claim if it is the one with this uid; False if it was not there."""
        return await self._kubectl.delete(_CLAIMS, home_claim(self._settings.user_key), uid=uid)

    async def last_words(self, pod: PodView) -> str:
        """The end of what the container wrote before it ended; empty where it cannot be read."""
        for previous in (["--previous"], []):
            try:
                said = await self._kubectl.run(
                    "logs", pod.name, "-c", c.CONTAINER, f"--tail={LOG_LINES}", *previous
                )
            except KubectlError as error:
                log.info("no logs of %s: %s", pod.name, error)
            else:
                if "unable to retrieve container logs" not in said:
                    return said.strip()[-LOG_BYTES:]
        return ""

    async def cluster_classes(self) -> tuple[str, str]:
        """Runtime class and storage class to ask for; empty means the cluster's default.

        The cluster is asked once.
        """
        if self._classes is None:
            runtime, storage = self._settings.runtime_class, self._settings.storage_class
            known: set[str] | None = set()
            if runtime is None or storage is None:
                known = await self._known_classes()
            if runtime is None:
                if known is None or f"RuntimeClass/{DEFAULT_RUNTIME_CLASS}" in known:
                    runtime = DEFAULT_RUNTIME_CLASS  # where unknown, the API's refusal will tell
                else:
                    self._warn_no_gvisor()
                    runtime = ""
            if storage is None:
                if known is not None and f"StorageClass/{DEFAULT_STORAGE_CLASS}" in known:
                    storage = DEFAULT_STORAGE_CLASS
                else:
                    self._warn(
                        f"storage class {DEFAULT_STORAGE_CLASS!r} is not known here: homes use the "
                        "cluster's default class (set DEFAULT_STORAGE_CLASS to choose)"
                    )
                    storage = ""
            self._classes = (runtime, storage)
        return self._classes

    async def _known_classes(self) -> set[str] | None:
        """`Kind/name` of all runtime and storage classes; None where they may not be read."""
        try:
            listed = await self._kubectl.json("get", "runtimeclasses,storageclasses", "-o", "json")
        except Forbidden:
            return None
        return {f"{item['kind']}/{item['metadata']['name']}" for item in listed.get("items", [])}

    def _warn_no_gvisor(self) -> None:
        self._warn(
            f"this cluster has no RuntimeClass {DEFAULT_RUNTIME_CLASS!r}: sandboxes share the "
            "node's kernel (set RUNTIME_CLASS to choose, empty to accept)"
        )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            log.info("%s", text)


def _of_apps(sandbox: Sandbox) -> dict[str, str]:
    """The annotations of apps and grants, where there are any."""
    notes = {c.ANNOTATION_APPS: sandbox.apps, c.ANNOTATION_ACCESS: sandbox.access}
    return {name: text for name, text in notes.items() if text}


def _no_runtime_class(error: KubectlError, runtime_class: str) -> bool:
    """Whether the API refuses the class: it has none, or another host found so and made the pod."""
    missing = f'RuntimeClass "{runtime_class}" not found'
    return bool(runtime_class) and (
        missing in str(error) or _WITHOUT_CLASS.search(str(error)) is not None
    )


_WITHOUT_CLASS = re.compile(
    r'pod updates may not change.*\n-\s+"RuntimeClassName": null,', re.DOTALL
)
"""How the API server shows that the pod exists and has no runtime class."""


def _made_at(found: Object) -> datetime:
    return parse_timestamp(found["metadata"]["creationTimestamp"])


_REFUSALS: Mapping[str, str] = {
    "exceeded quota": "Quota",
    "violates PodSecurity": "PodSecurity",
    "ValidatingAdmissionPolicy": "AdmissionPolicy",
    "maximum .* usage per": "LimitRange",
    "RuntimeClass": "RuntimeClass",
    "Invalid value": "Invalid",
}


def _refused(sandbox: Sandbox, error: KubectlError) -> KubectlError | LaunchFailed:
    """The refusal of a pod as the launch failure it is; other errors stay what they are."""
    for pattern, reason in _REFUSALS.items():
        if re.search(pattern, str(error)):
            return LaunchFailed(
                f"sandbox {sandbox.id} was refused by the cluster ({reason}): {error}",
                reason=reason,
            )
    return error
