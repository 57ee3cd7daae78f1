"""OpenSSH into a sandbox: what its client here needs, and how it gets there.

The connection is a `kubectl exec -i` that starts an sshd for it alone. Nothing of the person's own ssh
goes along: an `-F` file of ours says all, the key is made for the purpose, and the sandbox's host key is
known before, from its daemon.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from host_client.errors import PodpipeError, PrerequisiteError
from in_pod_server import contract as c

if TYPE_CHECKING:
    from host_client.kubectl import Kubectl
    from host_client.sessions import Sessions

HOST = "sandbox"
"""What our `-F` file calls the one sandbox that it leads to."""
_OWN, _SHARED = "ssh-", "config-"
_USED = "used.lock"
KEPT_SECONDS = 3600.0
"""How long the key of plain ssh stays after its last use; whoever comes later makes another."""
LOST = 255
"""What ssh ends with when it could not connect, or the connection broke."""

OPTIONS = {
    "AddKeysToAgent": "no",
    "CheckHostIP": "no",
    # The fastest on any processor of the last ten years; the carrier is encrypted already.
    "Ciphers": "^aes128-gcm@openssh.com",
    "Compression": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "GlobalKnownHostsFile": "/dev/null",
    "HostKeyAlgorithms": "ssh-ed25519",
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "PreferredAuthentications": "publickey",
    "SendEnv": "-*",
    "ServerAliveCountMax": "4",
    "ServerAliveInterval": "15",
    "StrictHostKeyChecking": "yes",
    "Tunnel": "no",
    "UpdateHostKeys": "no",
}
"""For every connection; the person's configuration, their agent and environment have no part in it."""


def program(environment: Mapping[str, str]) -> str:
    """The ssh of this machine.

    Raises:
        PrerequisiteError: there is none.
    """
    found = shutil.which("ssh", path=environment.get("PATH"))
    if not found:
        raise PrerequisiteError(
            "there is no ssh on PATH: install OpenSSH's client (Debian, Ubuntu: apt-get install "
            "openssh-client). `podpipe run` and `podpipe connect` do without"
        )
    return found


def runtime_folder(environment: Mapping[str, str]) -> Path:
    """A folder of the user's alone for what lives no longer than a process.

    Raises:
        PrerequisiteError: what is there is another's, or open to others.
    """
    session = Path(environment.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and session.is_dir() and session.stat().st_uid == os.getuid():
        folder = session / "podpipe"
    else:
        folder = Path(environment.get("TMPDIR") or "/tmp") / f"podpipe-{os.getuid()}"  # noqa: S108
    return _own(folder)


def _own(folder: Path) -> Path:
    """Make a folder that nobody else may look into, or see that it is one."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise PrerequisiteError(
            f"{folder} cannot be made ({error.strerror}): set TMPDIR to a folder of yours"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PrerequisiteError(
            f"{folder} is to hold keys and is not yours alone: remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a sandbox has let us in: its present pod, and what serves ssh in it."""

    sandbox_id: str
    pod: str
    user: str
    host_key: str
    argv: tuple[str, ...]


class Keys:
    """The files of one client: a key, the known host, and perhaps a configuration.

    Args:
        folder: of the user's alone.
    """

    def __init__(self, folder: Path) -> None:
        self.private = folder / "key"
        self.public = folder / "key.pub"
        self.known_hosts = folder / "known_hosts"
        self.config = folder / "config"

    def make(self) -> None:
        """Make the key, unless it is there."""
        if self.public.exists():
            return
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        _write(self.private, private)
        _write(self.public, key.public_key().public_bytes(*openssh))

    async def admitted(self, sessions: Sessions, ref: str) -> Admission:
        """Have the key admitted by a sandbox, which is started if need be, and know its host key.

        Raises:
            PodpipeError: as `Sessions.call`, or the sandbox cannot do ssh.
        """
        self.make()
        given = {c.SSH_KEY: self.public.read_text("ascii")}
        answer = await sessions.call(ref, c.ADMIT_SSH, given, reads_only=True)
        session = sessions.existing(ref)
        facts = answer.get("structuredContent") or {}
        if answer.get("isError") or session is None:
            said = " ".join(block.get("text", "") for block in answer.get("content", []))
            if "there is no tool" in said:
                said = "its image is older than this podpipe; build and load it, and make it anew"
            raise PodpipeError(f"sandbox {ref} lets nobody in by ssh: {said}")
        admission = Admission(
            session.sandbox.id,
            session.pod.name,
            str(facts[c.SSH_USER]),
            str(facts[c.SSH_HOST_KEY]),
            tuple(map(str, facts[c.SSH_ARGV])),
        )
        _write(self.known_hosts, f"{admission.sandbox_id} {admission.host_key}\n".encode("ascii"))
        return admission

    def configure(self, kubectl: Kubectl, admission: Admission, **more: str) -> list[str]:
        """Write an `-F` file for one pod.

        Args:
            kubectl: for its cluster.
            admission: by it.
            more: further options.

        Returns:
            The options of ssh that have it use the file, and nothing else.
        """
        carrier = shlex.join(kubectl.exec_argv(admission.pod, admission.argv))
        text = stanza(HOST, self, admission.sandbox_id, admission.user, carrier, **more)
        _write(self.config, text.encode())
        return ["-F", str(self.config)]


def stanza(alias: str, keys: Keys, sandbox_id: str, user: str, proxy: str, **more: str) -> str:
    """What an ssh configuration says of one sandbox.

    Args:
        alias: what it is called there.
        keys: its files.
        sandbox_id: by which its host key is known.
        user: whom to enter as.
        proxy: the command that reaches it.
        more: further options.
    """
    options = OPTIONS | {
        "HostKeyAlias": sandbox_id,
        "HostName": sandbox_id,
        "IdentityFile": _quoted(keys.private),
        "ProxyCommand": proxy.replace("%", "%%"),
        "User": user,
        "UserKnownHostsFile": _quoted(keys.known_hosts),
    }
    lines = [f"    {name} {value}" for name, value in sorted((options | more).items())]
    return "\n".join([f"Host {alias}", *lines, ""])


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'


def _write(path: Path, data: bytes) -> None:
    """Write a file of the user's alone, in one step."""
    handle, fresh = tempfile.mkstemp(dir=path.parent)  # 0600
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(fresh).rename(path)


@contextmanager
def own_keys(environment: Mapping[str, str]) -> Iterator[Keys]:
    """Keys for one process, which go with it. Raises as `runtime_folder`."""
    runtime = runtime_folder(environment)
    with ExitStack() as stack:
        with _locked(runtime):
            _sweep(runtime)
            folder = tempfile.mkdtemp(prefix=_OWN, dir=runtime)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            used = stack.enter_context((Path(folder) / _USED).open("w"))
            fcntl.flock(used, fcntl.LOCK_EX)
        yield Keys(Path(folder))


def shared_folder(environment: Mapping[str, str], sandbox_id: str) -> Path:
    """Where the keys of all connections of plain ssh to a sandbox lie. Raises as `runtime_folder`."""
    return runtime_folder(environment) / f"{_SHARED}{sandbox_id}"


@contextmanager
def shared_keys(folder: Path) -> Iterator[Keys]:
    """Keys in a place that a configuration names, for all who come by it.

    They stay for `KEPT_SECONDS` after the last use: ssh reads the key before it starts us, and what it
    has read must be what we have admitted.

    Args:
        folder: as `shared_folder` said.

    Raises:
        PrerequisiteError: it, or the one above, is not the user's alone.
    """
    runtime = _own(folder.parent)
    keys = Keys(folder)
    with ExitStack() as stack:
        with _locked(runtime):
            _own(folder)
            used = stack.enter_context((folder / _USED).open("w"))
            fcntl.flock(used, fcntl.LOCK_SH)
            _sweep(runtime)
            keys.make()
        try:
            yield keys
        finally:
            with suppress(OSError):
                os.utime(folder / _USED)


def _sweep(runtime: Path) -> None:
    """Remove what killed processes left, and what has not been used for long."""
    long_ago = time.time() - KEPT_SECONDS
    for left in (*runtime.glob(f"{_OWN}*"), *runtime.glob(f"{_SHARED}*")):
        with suppress(OSError), (left / _USED).open("r+") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if left.name.startswith(_OWN) or os.fstat(used.fileno()).st_mtime < long_ago:
                shutil.rmtree(left)


@contextmanager
def _locked(runtime: Path) -> Iterator[None]:
    """While keys are made or removed; never longer."""
    with (runtime / "change.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
