"""Many requests to the API server over one `kubectl proxy`, where a kubectl for each takes too long.

The proxy listens on a unix socket in a folder of ours alone, and ends with this process however that
ends. Its answers are the API server's own: preconditions can be told apart from other refusals, and
each carries the server's clock, which is the one that expiry is judged by.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.abc
import httpx2

from host_client.errors import (
    STDERR_TAIL,
    ApiUnreachable,
    Forbidden,
    KubectlError,
    NotFound,
    root_cause,
)
from host_client.kubectl import REQUEST_TIMEOUT_SECONDS, Kubectl

Object = dict[str, Any]

START_SECONDS = 15.0
"""How long the proxy may take to listen, a slow credential plugin included."""
PAGE = 500
"""Objects in one answer, as kubectl itself asks for them."""
RELISTS = 3
"""How often a list is begun again whose pages have become too old to go on."""

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_ONE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_WATCHED = """\
exec 3<&0
"$@" 3<&- <&- & proxy=$!
{ read -r _ <&3; kill $proxy; } >/dev/null 2>&1 & watch=$!
wait $proxy
kill $watch
"""
"""Ends the proxy at the end of stdin, which is ours to close and the kernel's if we are killed."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object in a namespace.

    Args:
        plural: as in its path.
        group: path of its group and version.
    """

    plural: str
    group: str = "/api/v1"


Outcome = Literal["deleted", "gone", "changed"]
"""Of a deletion: done; there was nothing; the object is not as it was read, and was left."""


class Api:
    """The API server, for one namespace; see `proxied`.

    Args:
        client: reaches it.
        namespace: of all objects.
    """

    def __init__(self, client: httpx2.AsyncClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self.now: datetime | None = None
        """The server's clock at its newest answer, to the second; None before the first."""

    def _path(self, resource: Resource, name: str = "") -> str:
        path = f"{resource.group}/namespaces/{self._namespace}/{resource.plural}"
        return f"{path}/{name}" if name else path

    async def metadata(self, resource: Resource, selector: str) -> AsyncIterator[Object]:
        """The metadata of all objects of a kind that have these labels, page by page.

        An object may come twice where the list had to be begun again.

        Raises:
            KubectlError: or the subclass that tells why not.
        """
        for _ in range(RELISTS):
            page = {"labelSelector": selector, "limit": str(PAGE)}
            while True:
                answer = await self._ask(
                    "GET", self._path(resource), params=page, headers={"Accept": _METADATA_ONLY}
                )
                if answer.status_code == httpx2.codes.GONE:
                    break
                listed = self._checked(answer).json()
                for item in listed["items"] or []:
                    yield item["metadata"]
                if not (rest := listed["metadata"].get("continue")):
                    return
                page["continue"] = rest
        raise KubectlError(f"{resource.plural} cannot be listed: the list keeps becoming too old")

    async def objects(self, resource: Resource, selector: str) -> list[Object]:
        """The few objects of a kind that have these labels, whole. Raises as `metadata`."""
        answer = await self._ask(
            "GET", self._path(resource), params={"labelSelector": selector, "limit": str(PAGE)}
        )
        return self._checked(answer).json()["items"] or []

    async def one(self, resource: Resource, name: str) -> Object | None:
        """The metadata of one object, or None where the API says 404. Raises as `metadata`."""
        answer = await self._ask(
            "GET", self._path(resource, name), headers={"Accept": _ONE_METADATA}
        )
        try:
            found: Object = self._checked(answer).json()["metadata"]
        except NotFound:
            return None
        return found

    async def delete(self, resource: Resource, name: str, *, uid: str, version: str) -> Outcome:
        """Delete an object as it was read, and what it owns; whatever changed it since has won.

        Args:
            resource: its kind.
            name: its name.
            uid: of the object that was read.
            version: its resourceVersion then.

        Raises:
            KubectlError: or the subclass that tells why not.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, "resourceVersion": version},
        }
        answer = await self._ask("DELETE", self._path(resource, name), json=options)
        if answer.status_code == httpx2.codes.CONFLICT:
            return "changed"
        try:
            self._checked(answer)
        except NotFound:
            return "gone"
        return "deleted"

    async def _ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            answer = await self._client.request(method, path, **options)
        except httpx2.HTTPError as error:
            raise ApiUnreachable(
                f"the API server does not answer through kubectl proxy ({type(error).__name__} "
                f"{error}); check that the cluster is up, then try again"
            ) from error
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self.now = parsedate_to_datetime(answer.headers["Date"]).astimezone(UTC)
        return answer

    def _checked(self, answer: httpx2.Response) -> httpx2.Response:
        if answer.is_success:
            return answer
        said = answer.text[:STDERR_TAIL]
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = answer.json()["message"]
        kinds: Mapping[int, type[KubectlError]] = {
            401: Forbidden, 403: Forbidden, 404: NotFound,
            429: ApiUnreachable, 502: ApiUnreachable, 503: ApiUnreachable, 504: ApiUnreachable,
        }  # fmt: skip
        kind = kinds.get(answer.status_code, KubectlError)
        raise kind(f"{said.strip()} ({answer.request.method}, HTTP {answer.status_code})")


@asynccontextmanager
async def proxied(kubectl: Kubectl, *, connections: int) -> AsyncIterator[Api]:
    """The API server, for as long as the block lasts.

    Args:
        kubectl: the pinned cluster.
        connections: how many requests may be under way at once.

    Raises:
        ApiUnreachable: the proxy does not start.
        PrerequisiteError: the context points elsewhere by now.
    """
    kubectl.target.check()
    # A socket's path is short, and the platform's own temporary folder may not be.
    with tempfile.TemporaryDirectory(prefix="podpipe-", dir="/tmp") as folder:
        socket = Path(folder) / "s"
        argv = kubectl.argv("proxy", f"--unix-socket={socket}")
        async with await anyio.open_process(
            ["/bin/sh", "-c", _WATCHED, "sh", *argv],
            env=kubectl.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as proxy:
            try:
                await _listening(proxy, kubectl)
                async with (
                    anyio.create_task_group() as tasks,
                    httpx2.AsyncClient(
                        transport=httpx2.AsyncHTTPTransport(
                            uds=str(socket),
                            limits=httpx2.Limits(max_connections=connections),
                        ),
                        base_url="http://localhost",
                        timeout=REQUEST_TIMEOUT_SECONDS,
                        trust_env=False,
                    ) as client,
                ):
                    tasks.start_soon(_drained, proxy)
                    yield Api(client, kubectl.namespace)
                    tasks.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                raise root_cause(group) from None
            finally:
                assert proxy.stdin
                with anyio.CancelScope(shield=True):
                    await proxy.stdin.aclose()


async def _listening(proxy: anyio.abc.Process, kubectl: Kubectl) -> None:
    """Wait until the proxy says that it serves."""
    assert proxy.stdout
    said = b""
    with anyio.move_on_after(START_SECONDS):
        async for chunk in proxy.stdout:
            said += chunk
            if b"Starting to serve" in said:
                return
    text = said[-STDERR_TAIL:].decode("utf-8", "replace")
    if text.strip():
        raise kubectl.classified(kubectl.argv("proxy"), None, text)
    raise ApiUnreachable(
        f"kubectl proxy did not start within {START_SECONDS:.0f} s; check the credential plugin of "
        "the kubeconfig"
    )


async def _drained(proxy: anyio.abc.Process) -> None:
    """Whatever it still says must not stall it."""
    assert proxy.stdout
    async for _ in proxy.stdout:
        pass
