"""ssh into this sandbox: what an sshd needs that `kubectl exec -i` starts, for one connection each.

No port listens: who may exec may enter. The keys prove to either end that it talks to the one that
podpipe has introduced, and everything that ssh could carry beyond a session is off.
"""

from __future__ import annotations

import os
import pwd
import re
import threading
from pathlib import Path
from typing import Final

from in_pod_server import contract
from in_pod_server.errors import ArgumentError, FileFailedError, StartFailedError
from in_pod_server.launch import Launcher

SSHD: Final = "/usr/sbin/sshd"
KEPT_KEYS: Final = 64
"""Of those that were admitted last. A key is admitted anew before each connection."""

_PUBLIC_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{68}")
_FOR_A_PERSON: Final = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "XDG_CACHE_HOME")
"""What a session has of a command's environment: not what keeps programs from asking or drawing."""
_START: Final = 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$0" -i -e -f "$1"'
"""Sessions inherit it: where memory runs out, one of theirs dies before the daemon."""
_CONFIG: Final = """\
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/authorized_keys"
AllowUsers {user}
AuthenticationMethods publickey
UsePAM no
StrictModes no
PidFile none
LogLevel ERROR
PrintMotd no
PrintLastLog no
UseDNS no
Compression no
MaxSessions 100
ClientAliveInterval 15
ClientAliveCountMax 4
AllowAgentForwarding no
AllowTcpForwarding local
AllowStreamLocalForwarding no
X11Forwarding no
PermitTunnel no
PermitUserRC no
PermitUserEnvironment no
SetEnv {environment}
Subsystem sftp internal-sftp
"""


class Ssh:
    """The ssh of one sandbox.

    Args:
        launcher: knows what environment a command has.
        folder: for keys and configuration; only memory, so that a key ends with its pod.
    """

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder
        self._lock = threading.Lock()

    def admit(self, public_key: str) -> dict[str, object]:
        """Let whoever holds a key in, until `KEPT_KEYS` more have come.

        Args:
            public_key: as OpenSSH writes an Ed25519 one, without a comment.

        Returns:
            The `contract.SSH_*` facts: whom to enter as, by which host key to know this end, and
            the command that serves one connection on its stdin and stdout.

        Raises:
            ArgumentError: That is no such key.
            StartFailedError: The image has no sshd.
            FileFailedError: There is no room for a key.
        """
        if not _PUBLIC_KEY.fullmatch(public_key):
            raise ArgumentError("the key is not an Ed25519 public key of OpenSSH")
        if not os.access(SSHD, os.X_OK):
            raise StartFailedError(
                f"the sandbox's image has no {SSHD}: add openssh-server to it, and make the sandbox anew"
            )
        user = pwd.getpwuid(os.getuid()).pw_name
        config = self._folder / "sshd_config"
        try:
            with self._lock:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                host_key = self._host_key()
                self._authorize(public_key)
                text = _CONFIG.format(
                    folder=self._folder, user=user, environment=self._environment()
                )
                _write(config, text)
        except OSError as error:
            raise FileFailedError(
                f"ssh cannot be prepared in {self._folder} of the sandbox: {error.strerror}; suspend "
                "and resume it, or free what fills its memory-backed files"
            ) from error
        return {
            contract.SSH_USER: user,
            contract.SSH_HOST_KEY: host_key,
            contract.SSH_ARGV: ["/bin/sh", "-c", _START, SSHD, str(config)],
        }

    def _host_key(self) -> str:
        """The public half of the pod's own key, which is made when it is first wanted."""
        private, public = self._folder / "host_key", self._folder / "host_key.pub"
        if not public.exists():
            from cryptography.hazmat.primitives import serialization  # 50 ms, once in a pod
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            key = Ed25519PrivateKey.generate()
            _write(
                private,
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.OpenSSH,
                    serialization.NoEncryption(),
                ).decode("ascii"),
            )
            openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            _write(public, key.public_key().public_bytes(*openssh).decode("ascii"))
        return public.read_text("ascii")

    def _authorize(self, public_key: str) -> None:
        path = self._folder / "authorized_keys"
        line = f"restrict,pty,port-forwarding {public_key}"
        known = path.read_text("ascii").splitlines() if path.exists() else []
        kept = [each for each in known if each != line][-(KEPT_KEYS - 1) :]
        _write(path, "\n".join([*kept, line, ""]))

    def _environment(self) -> str:
        """What a session gets beyond sshd's own, as SetEnv takes it."""
        known = self._launcher.environment("", {})
        return " ".join(f'{name}="{known[name]}"' for name in _FOR_A_PERSON if name in known)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    fresh.rename(path)
