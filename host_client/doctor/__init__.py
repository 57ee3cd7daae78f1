"""`podpipe doctor`: what podpipe needs, looked at one by one, each with its fix.

Every check is one line: ok, warning, failure, or unknown where the user may not look. What the API
server would say to a sandbox is found out by asking it to try (a server-side dry run), for which the
launcher's own rights are enough. Later checks that cannot be made without an earlier one are left
out, so that the first failure is the one to mend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from host_client import ssh
from host_client.config import Settings
from host_client.doctor import access, cluster
from host_client.doctor.findings import Finding, shell
from host_client.errors import ApiUnreachable, KubectlError, NotFound, PodpipeError
from host_client.kubectl import Kubectl
from host_client.status import Progress, silent
from host_client.target import find_kubectl


async def examine(
    settings: Settings, *, deep: bool = False, progress: Progress = silent
) -> AsyncIterator[Finding]:
    """Look at everything that `settings` needs, in the order in which it is needed.

    Args:
        settings: whose they are.
        deep: whether two sandboxes are made, for what shows only in them.
        progress: told what these do meanwhile.
    """
    env_file = f", settings from {settings.env_file}" if settings.env_file else ""
    yield Finding("user", "ok", f"{settings.user!r}, key {settings.user_key}{env_file}")
    try:
        find_kubectl(settings)
    except PodpipeError as error:
        fix = "install kubectl, or set PODPIPE_KUBECTL to the absolute path of one"
        yield Finding("kubectl", "failure", str(error).partition("; ")[0], fix)
        return
    try:
        kubectl = Kubectl(settings)
    except PodpipeError as error:
        fix = (
            "set KUBECONFIG to the file that reaches your cluster and PODPIPE_CONTEXT to a context "
            "that `kubectl config get-contexts` lists; `scripts/cluster up` makes a cluster"
        )
        what, _, own = str(error).partition("; ")
        yield Finding("kubeconfig", "failure", what, own or fix)
        return
    where = f"context {kubectl.target.context!r}, server {kubectl.target.server}"
    yield Finding("kubectl", "ok", kubectl.path)
    yield Finding("kubeconfig", "ok", where)
    yield _ssh(settings)
    try:
        version = await kubectl.json("version", "-o", "json")
        for finding in access.versions(version):
            yield finding
    except ApiUnreachable as error:
        yield Finding(
            "API server",
            "failure",
            str(error),
            (
                f"start the cluster, or renew the login, until this works: {shell(kubectl)} get --raw /readyz"
            ),
        )
        return
    except KubectlError as error:
        yield Finding(
            "API server",
            "failure",
            str(error),
            f"renew the kubeconfig's credentials, until this works: {shell(kubectl)} auth whoami",
        )
        return
    wrong = False
    try:
        async for finding in cluster.examined(kubectl, settings, deep=deep):
            wrong = wrong or finding.result == "failure"
            yield finding
    except NotFound:
        return  # the namespace, of which there is a line
    except KubectlError as error:
        yield Finding("API server", "failure", str(error), "try again; it answered a moment ago")
        return
    if deep and not wrong:
        from host_client.doctor.deep import tried  # makes sandboxes, which no other check needs

        async for finding in tried(settings, progress):
            yield finding


def _ssh(settings: Settings) -> Finding:
    try:
        return Finding("ssh", "ok", ssh.program(settings.environment))
    except PodpipeError:
        detail = (
            "not on PATH: no shell, no ssh-config; open and forward need pods/portforward instead"
        )
        fix = "install OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)"
        return Finding("ssh", "warning", detail, fix)
