"""Short kubectl calls, and the argv of the long one. The only module that runs kubectl by `sh`.

The cluster is pinned when a `Kubectl` is made: kubeconfig files, context, server and namespace go
into every call, so a switched current-context cannot send a call elsewhere, and a context that was
edited to point to another server is refused. Credentials may change; they are read by kubectl anew.

kubectl's exit code is not evidence of what happened in the cluster: a call that succeeded is
believed by the JSON that it printed, one that failed is classified by its stderr.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import sh

from host_client.config import Settings
from host_client.errors import (
    STDERR_TAIL,
    AlreadyExists,
    ApiUnreachable,
    Conflict,
    Forbidden,
    KubectlError,
    NotFound,
    PrerequisiteError,
)
from host_client.target import Target, find_kubectl
from in_pod_server.contract import CONTAINER, FIELD_MANAGER

log = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 10.0
"""One short call, discovery and a slow credential plugin included; the user waits for it."""
REQUEST_TIMEOUT_SECONDS = 8
"""kubectl's own bound for one HTTP request within a call."""

SAID_CHARS = 500
"""How much of a plugin's words a message repeats."""

SPDY = {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false"}
"""The carrier that kubectl is asked for where much is carried. The API server passes SPDY on to the node
as it comes, while it unpacks WebSockets and packs them again, at four times the work. Whoever has set it
has the last word, and not every proxy on the way lets it through."""
CORE = "/api/v1"
"""Path of the API group that has pods and services."""
UNCHECKED = "--validate=ignore"
"""Spares kubectl the download of every schema (35 ms a call); a test has the server check ours."""

Object = dict[str, Any]
"""A Kubernetes object, list or review as parsed JSON."""


class Kubectl:
    """kubectl against one pinned cluster and namespace.

    Args:
        settings: which kubectl, kubeconfig, context and namespace.

    Raises:
        PrerequisiteError: from `find_kubectl` or `Target.resolve`.
    """

    def __init__(self, settings: Settings) -> None:
        self.path = find_kubectl(settings)
        self.target = Target.resolve(settings)
        self.namespace = settings.namespace
        self.environment = dict(settings.environment)
        if self.target.kubeconfig:
            self.environment["KUBECONFIG"] = os.pathsep.join(map(str, self.target.kubeconfig))

    def argv(self, *args: str) -> list[str]:
        """A whole kubectl command line with the pinned context and namespace."""
        context = [f"--context={self.target.context}"] if self.target.context else []
        return [self.path, *context, f"--namespace={self.namespace}", *args]

    def exec_argv(self, pod: str, command: Sequence[str]) -> list[str]:
        """The command line of `kubectl exec -i` into a sandbox pod; never a terminal."""
        return self.argv("exec", "-i", "-q", pod, "-c", CONTAINER, "--", *command)

    def raw_path(self, resource: str, name: str = "", group: str = CORE) -> str:
        """The API path of a resource in the namespace."""
        return f"{group}/namespaces/{self.namespace}/{resource}" + (f"/{name}" if name else "")

    async def run(self, *args: str, stdin: str = "", timeout: float = CALL_TIMEOUT_SECONDS) -> str:
        """One short call.

        Args:
            args: the subcommand and its arguments.
            stdin: what kubectl reads; nothing by default, so that no credential plugin can ask.
            timeout: seconds until kubectl is killed.

        Returns:
            What kubectl wrote to stdout.

        Raises:
            KubectlError: or the subclass that stderr tells.
            PrerequisiteError: the context points elsewhere by now.
        """
        self.target.check()
        argv = self.argv(f"--request-timeout={REQUEST_TIMEOUT_SECONDS}s", *args)
        return await anyio.to_thread.run_sync(self._call, argv, stdin, timeout)

    def _call(self, argv: list[str], stdin: str, timeout: float) -> str:
        log.debug("run %s", argv)
        expired = threading.Event()
        try:
            running = sh.Command(argv[0])(
                *argv[1:],
                _in=stdin,
                _tty_out=False,
                _env=self.environment,
                _encoding="utf-8",
                _decode_errors="replace",
                _truncate_exc=False,
                # sh's own _timeout looks only every 0.1 s, which every call would have to wait for.
                _bg=True,
                _bg_exc=False,
                # A group of its own: a plugin dies with it, and we do not.
                _new_session=True,
            )

            def expire() -> None:
                expired.set()
                with contextlib.suppress(ProcessLookupError):
                    running.process.kill_group()

            timer = threading.Timer(timeout, expire)
            timer.start()
            try:
                running.wait()
            finally:
                timer.cancel()
        except sh.ErrorReturnCode as error:
            stderr = error.stderr.decode("utf-8", "replace")
            if expired.is_set():
                said = f"; it said: {stderr.strip()[-SAID_CHARS:]}" if stderr.strip() else ""
                raise ApiUnreachable(
                    f"no answer from kubectl within {timeout:g} s ({self._where()}){said}; check the "
                    "network, and the credential plugin of the kubeconfig",
                    argv=argv,
                    stderr=stderr[-STDERR_TAIL:],
                ) from None
            raise self.classified(argv, error.exit_code, stderr) from None
        except (OSError, sh.CommandNotFound) as error:
            raise PrerequisiteError(f"kubectl cannot be started ({argv[0]}): {error}") from error
        stdout: bytes = running.stdout
        return stdout.decode("utf-8", "replace")

    def _where(self) -> str:
        return f"API server {self.target.server}, context {self.target.context!r}"

    def classified(self, argv: Sequence[str], returncode: int | None, stderr: str) -> KubectlError:
        """The error that kubectl's stderr tells of, with what to do about it.

        Args:
            argv: the call that failed.
            returncode: what it ended with; None where that is not known.
            stderr: all that it printed.
        """
        # klog lines (E1129 ...) repeat what the last plain line says better.
        lines = [s for s in stderr.strip().split("\n") if s and not re.match(r"[EIWF]\d{4} ", s)]
        text = ("\n".join(lines) or stderr.strip())[-STDERR_TAIL:]
        kind, message = KubectlError, text or f"kubectl ended with code {returncode} and no word"
        if "(NotFound)" in text:
            kind = NotFound
        elif "(AlreadyExists)" in text:
            kind = AlreadyExists
        elif "(Conflict)" in text or "Apply failed with" in text:
            kind = Conflict
        elif "(Forbidden)" in text or "(Unauthorized)" in text or "must be logged in" in text:
            kind = Forbidden
        elif _UNREACHABLE.search(text):
            kind = ApiUnreachable
            # What a credential plugin says itself, such as how to log in, comes before the last line.
            said = text[-SAID_CHARS:] if "getting credentials" in text else text.splitlines()[-1]
            message = (
                f"{self._where()} does not answer: {said}; check that the cluster "
                "is up and that the kubeconfig is current"
            )
        return kind(message, argv=argv, returncode=returncode, stderr=stderr[-STDERR_TAIL:])

    async def json(self, *args: str, stdin: str = "") -> Object:
        """A call that prints JSON, parsed.

        Raises:
            KubectlError: the call failed, or printed something else than a JSON object.
        """
        out = await self.run(*args, stdin=stdin)
        try:
            parsed = json.loads(out)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise KubectlError(
                f"kubectl succeeded but printed no JSON object: {out[:200]!r}",
                argv=self.argv(*args),
            )
        return parsed

    async def get(self, resource: str, name: str, group: str = CORE) -> Object | None:
        """One object, or None where the API says 404."""
        try:
            return await self.json("get", "--raw", self.raw_path(resource, name, group))
        except NotFound:
            return None

    async def select(self, resources: str, selector: str) -> list[Object]:
        """All objects of the kinds `resources` (comma-separated) with these labels."""
        listed = await self.json("get", resources, "-l", selector, "-o", "json")
        return [item for item in listed.get("items", []) if isinstance(item, dict)]

    async def create(self, manifest: Object) -> Object:
        """Create an object that must not exist yet; the API decides who is first.

        Raises:
            AlreadyExists: it does.
        """
        return await self.json(
            "create", "-f", "-", "-o", "json", f"--field-manager={FIELD_MANAGER}", UNCHECKED,
            stdin=json.dumps(manifest),
        )  # fmt: skip

    async def would_create(self, manifest: Object) -> Object:
        """What the API server would make of an object; nothing is made.

        Raises:
            KubectlError: it would refuse it, and why.
        """
        return await self.json(
            "create", "--dry-run=server", "-f", "-", "-o", "json", UNCHECKED,
            stdin=json.dumps(manifest),
        )  # fmt: skip

    async def apply(self, manifests: Sequence[Object]) -> list[Object]:
        """Apply objects server-side, as they are now in the cluster.

        Conflicts are never forced: a field that somebody else owns is theirs.

        Raises:
            Conflict: an object of that name has fields of another manager.
        """
        bundle = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        out = await self.json(
            "apply", "--server-side", f"--field-manager={FIELD_MANAGER}", "-f", "-", "-o", "json",
            UNCHECKED,
            stdin=json.dumps(bundle),
        )  # fmt: skip
        return out["items"] if out.get("kind") == "List" else [out]

    async def annotate(self, resource: str, name: str, changes: Object, *, version: str) -> Object:
        """Change annotations of an object if it still is at `version` (compare-and-swap).

        Raises:
            Conflict: it has changed since.
            NotFound: it is gone.
        """
        patch = {"metadata": {"resourceVersion": version, "annotations": changes}}
        return await self.json(
            "patch", resource, name, "--type=merge", f"--field-manager={FIELD_MANAGER}",
            "-o", "json", "-p", json.dumps(patch),
        )  # fmt: skip

    async def delete(self, resource: str, name: str, *, uid: str) -> bool:
        """Delete the very object that has this uid, its dependants with it.

        Returns:
            Whether there was one; False also where the name now belongs to another object.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self.run(
                "delete", "--raw", self.raw_path(resource, name), "-f", "-",
                stdin=json.dumps(options),
            )  # fmt: skip
        except (NotFound, Conflict):
            return False
        return True


_UNREACHABLE = re.compile(
    r"was refused - did you specify the right host|connection refused|Unable to connect to the server|"
    r"i/o timeout|no such host|deadline exceeded|TLS handshake timeout|connection reset by peer|"
    r"no route to host|network is unreachable|Client\.Timeout|\bEOF$|certificate|"
    r"ServiceUnavailable|TooManyRequests|\(Timeout\)|\(ServerTimeout\)|getting credentials",
    re.MULTILINE,
)
