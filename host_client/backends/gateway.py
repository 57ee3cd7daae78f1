"""What leads to a sandbox from outside its cluster: its Service, and its Ingress or HTTPRoute.

They are made before its first pod and stay for the next ones. They hang from the record, so whatever
deletes that deletes them; an object of the same name that somebody else made is refused, not adopted.
"""

from __future__ import annotations

import anyio

from host_client import manifest
from host_client.config import Settings
from host_client.errors import (
    Conflict,
    Forbidden,
    KubectlError,
    LaunchFailed,
    NameTaken,
    root_cause,
)
from host_client.kubectl import Kubectl, Object
from host_client.sandbox import Sandbox

GROUPS = {
    "Service": ("services", "/api/v1"),
    "Ingress": ("ingresses", "/apis/networking.k8s.io/v1"),
    "HTTPRoute": ("httproutes", "/apis/gateway.networking.k8s.io/v1"),
}
"""Resource and path of each kind's group."""
UNKNOWN_KIND = ("no matches for kind", "could not find the requested resource")
"""How kubectl says so, the second where it remembers a kind that has gone."""
LEFTOVER_SECONDS = 15.0
"""How long the garbage collector may take to come to those of a sandbox that had the same name."""
RETRY_SECONDS = 0.5


async def lead_to(kubectl: Kubectl, sandbox: Sandbox, settings: Settings) -> None:
    """Make what leads to a sandbox, or bring it up to date; nothing where apps are local.

    Args:
        kubectl: the pinned cluster.
        sandbox: a record that the API has given a uid.
        settings: say what leads to apps.

    Raises:
        NameTaken: an object of that name is not the sandbox's.
        Forbidden: the user may not make them.
        LaunchFailed: the API refused one, or those of a predecessor do not go.
    """
    wanted = manifest.gateway(sandbox, settings)
    if not wanted:
        return
    deadline = anyio.current_time() + LEFTOVER_SECONDS
    try:
        while left := await _left_over(kubectl, sandbox, wanted):
            if anyio.current_time() >= deadline:
                raise LaunchFailed(
                    f"sandbox {sandbox.id} cannot start: {left} of the sandbox that had this name "
                    "before is still there. Try again in a minute; if it stays, the cluster's "
                    "garbage collector does not run",
                    reason="Predecessor",
                )
            await anyio.sleep(RETRY_SECONDS)
        await kubectl.apply(wanted)
    except Conflict as error:
        raise NameTaken(
            f"what leads to sandbox {sandbox.id} exists and is managed by somebody else; it was left "
            f"untouched ({error})"
        ) from error
    except Forbidden as error:
        raise _denied(sandbox, settings, error) from error
    except KubectlError as error:
        if any(words in str(error) for words in UNKNOWN_KIND):
            raise LaunchFailed(
                f"sandbox {sandbox.id} cannot start: this cluster knows no HTTPRoute, which "
                "GATEWAY=httproute needs. Have the Gateway API installed, or set GATEWAY to ingress "
                "or local",
                reason="NoGatewayAPI",
            ) from error
        if " is invalid: " in str(error) or "admission webhook" in str(error):
            raise _refused(sandbox, error) from error
        raise


async def _left_over(kubectl: Kubectl, sandbox: Sandbox, wanted: list[Object]) -> str:
    """Kind and name of one that a sandbox of the same name has left; empty where there is none.

    Raises:
        NameTaken: one is somebody else's.
    """
    found: list[Object] = []

    async def look(kind: str, name: str) -> None:
        resource, group = GROUPS[kind]
        if there := await kubectl.get(resource, name, group):
            found.append(there | {"kind": kind})

    try:
        async with anyio.create_task_group() as tasks:
            for each in wanted:
                tasks.start_soon(look, each["kind"], each["metadata"]["name"])
    except BaseExceptionGroup as group:
        raise root_cause(group) from None
    for there in found:
        owners = there["metadata"].get("ownerReferences", [])
        name = f"{there['kind']} {there['metadata']['name']}"
        if not any((o["kind"], o["name"]) == ("ConfigMap", sandbox.object_name) for o in owners):
            raise NameTaken(
                f"{name} in namespace {kubectl.namespace} was not made by podpipe; it was left "
                "untouched. Choose another name for the sandbox, or have it removed"
            )
        if all(owner["uid"] != sandbox.uid for owner in owners):
            return name
    return ""


def _denied(sandbox: Sandbox, settings: Settings, error: Forbidden) -> KubectlError | LaunchFailed:
    """What to do about a refusal by a policy, or by the roles."""
    if "ValidatingAdmissionPolicy" in str(error) or "exceeded quota" in str(error):
        return _refused(sandbox, error)
    return Forbidden(
        f"sandbox {sandbox.id} cannot be led to: {error}. Have an administrator render the roles with "
        f"GATEWAY={settings.gateway.kind} set (`podpipe render admin`), or set GATEWAY=local",
        argv=error.argv,
        returncode=error.returncode,
        stderr=error.stderr,
    )


def _refused(sandbox: Sandbox, error: KubectlError) -> LaunchFailed:
    return LaunchFailed(
        f"sandbox {sandbox.id} cannot start: what leads to its apps was refused by the cluster: "
        f"{error}. Are the settings GATEWAY, BASE_DOMAIN, INGRESS_CLASS and GATEWAY_ANNOTATIONS those "
        "that the administrator rendered?",
        reason="Gateway",
    )
