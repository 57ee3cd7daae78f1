"""Everything podpipe refuses or fails with, as one tree.

    PodpipeError                  a sentence that names the object, the cause and the next step
    ├── UsageError                what was asked for makes no sense (exit code 2)
    ├── PrerequisiteError         this machine or kubeconfig lacks something (4)
    ├── KubectlError              a kubectl call failed: argv, exit code, stderr
    │   ├── ApiUnreachable        no answer from the API server (4)
    │   ├── Forbidden             the verb is not allowed, or a policy or quota refused the object
    │   ├── NotFound              404: the only proof that something is gone
    │   ├── AlreadyExists         the name is taken
    │   └── Conflict              somebody else changed the object first
    ├── SandboxNotFound           no such sandbox of this user (3)
    ├── SandboxExpired            its time is over; the home is kept
    ├── SandboxSuspended          it is suspended, and a setting forbids calls to resume it
    ├── VersionMismatch           the sandbox's image and this podpipe do not fit together
    ├── LimitReached              there are as many sandboxes as there may be
    ├── PortTaken                 another program listens on a port of this machine
    ├── NameTaken                 an object with that name is not ours to touch
    ├── LaunchFailed              the pod cannot start, with Kubernetes' reason
    ├── StillStarting             not ready within this call; the next one goes on waiting
    ├── TransferFailed            not every file arrived as it was
    ├── RequestRefused            the daemon answered with an error of the protocol
    └── SessionLost               the pipe broke; what was sent on it may have run
        ├── PodReplaced           a call was under way in a pod that is gone
        ├── ContainerRestarted    a call was under way when its container ended
        └── SandboxEnded          a call was under way when its sandbox was destroyed or expired

Each message is for a person or a model to act on; fields are for code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_PREREQUISITE = 4

STDERR_TAIL = 4096
"""Bytes of a failed command's stderr that an error carries."""


class PodpipeError(Exception):
    """Base of all; `exit_code` is what the command line ends with."""

    exit_code = EXIT_FAILED


class UsageError(PodpipeError):
    """The request itself is wrong; nothing was touched."""

    exit_code = EXIT_USAGE


class PrerequisiteError(PodpipeError):
    """Something that podpipe needs on this machine is missing or unusable."""

    exit_code = EXIT_PREREQUISITE


class KubectlError(PodpipeError):
    """A kubectl call failed.

    Args:
        message: what it means, in a sentence.
        argv: the call, paste-ready.
        returncode: kubectl's exit code, or None where it was ended by a timeout.
        stderr: what it printed, tail only.
    """

    def __init__(
        self,
        message: str,
        *,
        argv: Sequence[str] = (),
        returncode: int | None = None,
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr


class ApiUnreachable(KubectlError):
    """The API server did not answer; nothing is known about the cluster."""

    exit_code = EXIT_PREREQUISITE


class Forbidden(KubectlError):
    """Authorization, admission or a quota refused the request."""


class NotFound(KubectlError):
    """The API answered 404."""


class AlreadyExists(KubectlError):
    """The API answered 409: an object of that name exists."""


class Conflict(KubectlError):
    """The API answered 409: the object changed since it was read."""


class SandboxNotFound(PodpipeError):
    """No sandbox of this user has that id or name."""

    exit_code = EXIT_NOT_FOUND


class SandboxExpired(PodpipeError):
    """The sandbox's time is over. Its home survives; nothing revives the sandbox."""


class SandboxSuspended(PodpipeError):
    """The sandbox is suspended and is to be resumed by request only. Nothing was sent."""


class VersionMismatch(PodpipeError):
    """Host and image speak different contracts. Nothing was sent; files survive."""


class LimitReached(PodpipeError):
    """There are as many sandboxes as the settings allow. Nothing was made."""


class PortTaken(PodpipeError):
    """Another program listens on a port of this machine."""


class NameTaken(PodpipeError):
    """The wanted name belongs to another object, which was left untouched."""


class LaunchFailed(PodpipeError):
    """The pod cannot start.

    Args:
        message: the whole sentence.
        reason: Kubernetes' own word, for example ErrImagePull or Unschedulable.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StillStarting(PodpipeError):
    """Not ready yet; nothing is wrong. Asking again goes on waiting.

    Args:
        message: the whole sentence.
        detail: what it is waiting for, for example "pulling image".
    """

    def __init__(self, message: str, *, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class TransferFailed(PodpipeError):
    """Not everything arrived as it was, or nothing can; the message names what did not."""


class RequestRefused(PodpipeError):
    """The daemon answered with an error of the protocol instead of a result.

    Args:
        message: as it said it.
        code: JSON-RPC's.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class SessionLost(PodpipeError):
    """The pipe into the pod broke.

    Args:
        message: the whole sentence.
        sent: whether the call may have reached the pod (then it may have run).
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class PodReplaced(SessionLost):
    """The pod of a call is gone and another runs. Files survive; processes and /tmp do not.

    Args:
        message: the whole sentence.
        old_uid: of the pod that the call was sent to.
        new_uid: of the pod that runs now.
        reason: why Kubernetes ended the old one, for example "Evicted: …"; empty where not known.
    """

    def __init__(self, message: str, *, old_uid: str, new_uid: str, reason: str) -> None:
        super().__init__(message, sent=True)
        self.old_uid = old_uid
        self.new_uid = new_uid
        self.reason = reason


class ContainerRestarted(SessionLost):
    """The container of a call ended and was started again. Files survive; processes do not.

    Args:
        message: the whole sentence.
        reason: why it ended, for example "OOMKilled, exit code 137"; empty where not known.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, sent=True)
        self.reason = reason


class SandboxEnded(SessionLost):
    """The sandbox of a call is no more. The home survives; processes and the sandbox do not.

    Args:
        message: the whole sentence.
        reason: "destroyed" or "expired".
    """

    def __init__(self, message: str, *, reason: Literal["destroyed", "expired"]) -> None:
        super().__init__(message, sent=True)
        self.reason = reason


def code_of(error: BaseException) -> str:
    """What went wrong as a word for scripts: the class of the PodpipeError behind it.

    Returns:
        For example sandbox_not_found; internal_error where nobody foresaw it.
    """
    cause: BaseException | None = root_cause(error)
    while cause and not isinstance(cause, PodpipeError):
        cause = cause.__cause__
    if cause is None:
        return "internal_error"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(cause).__name__).lower()


def root_cause(error: BaseException) -> BaseException:
    """The first exception within groups, which task groups wrap around everything."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
