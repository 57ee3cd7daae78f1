"""What host and pod must agree on. Constants only, standard library only.

The host imports this module and nothing else of `in_pod_server`; a test holds the Dockerfile and
the manifests against it. Raise `CONTRACT_VERSION` when an older peer could misread a newer one.
"""

from __future__ import annotations

from typing import Final

CONTRACT_VERSION: Final = 1

# --- who and where -----------------------------------------------------------------------------
CONTAINER: Final = "sandbox"
USER: Final = "sandbox"
UID: Final = 1000
HOME: Final = "/home/sandbox"
WORKSPACE: Final = "/workspace"
"""The same volume as HOME, mounted a second time: the agent-sandbox example's paths hold."""

APP_DIR: Final = "/app"
RUN_DIR: Final = "/run/podpipe"
"""A memory-backed emptyDir: sockets, journal, process logs. Survives a container restart."""
LOG_DIR: Final = "/var/log/podpipe"
"""An emptyDir on disk, outside the home and outside /tmp: what commands wrote."""
PODINFO_DIR: Final = "/run/podinfo"
"""A downwardAPI volume: the files of PODINFO_FILES, kept current by the kubelet."""
TMP_DIR: Final = "/tmp"  # noqa: S108 - the path inside the pod, an emptyDir of its own
TMP_LIMIT: Final = "2Gi"
"""A pod that has more in /tmp is evicted by the kubelet, a while later."""
SOCKET: Final = f"{RUN_DIR}/daemon.sock"

TERMINATION_LOG: Final = "/dev/termination-log"
"""What is written here the pod's status tells as its container's last message."""

PODINFO_UID: Final = "uid"
PODINFO_ANNOTATIONS: Final = "annotations"

# --- what is started ---------------------------------------------------------------------------
PYTHON: Final = "/opt/podpipe/bin/python"
"""The image's own interpreter with the pinned requirements; commands do not see it on PATH."""
DAEMON_ARGV: Final = ("/usr/bin/tini", "--", PYTHON, "-I", "-m", "in_pod_server", "serve")
DIAL_ARGV: Final = (
    "/usr/bin/python3",
    "-I",
    "-S",
    "-u",
    f"{APP_DIR}/in_pod_server/dial.py",
    SOCKET,
)
"""What `kubectl exec -i` starts: -I and -S, because every import here is latency."""

# --- names in the cluster ----------------------------------------------------------------------
PREFIX: Final = "podpipe"
FIELD_MANAGER: Final = "podpipe"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_SANDBOX: Final = f"{PREFIX}/sandbox"
LABEL_USER: Final = f"{PREFIX}/user"
ANNOTATION_USER_ID: Final = f"{PREFIX}/user-id"
ANNOTATION_SESSION_ID: Final = f"{PREFIX}/session-id"
ANNOTATION_NAME: Final = f"{PREFIX}/name"
ANNOTATION_CREATED_AT: Final = f"{PREFIX}/created-at"
ANNOTATION_EXPIRES_AT: Final = f"{PREFIX}/expires-at"
ANNOTATION_STATE: Final = f"{PREFIX}/state"
ANNOTATION_SUSPENDED_AT: Final = f"{PREFIX}/suspended-at"
"""Only on records whose time stands still while they are suspended: since when, or empty."""
ANNOTATION_INCARNATION: Final = f"{PREFIX}/incarnation"
ANNOTATION_APPS: Final = f"{PREFIX}/apps"
"""The published apps, as the daemon's table reads: {"version": 3, "apps": {"web": 3000}}."""
ANNOTATION_ACCESS: Final = f"{PREFIX}/access"
"""Who may open them: {"version": 2, "grants": [{"hash": HEX, "app": "", "until": ""}]}. A hash is
SHA-256 of the cookie that a token stands for; an app or a time (RFC 3339) limits it."""

ANNOTATION_GATEWAY: Final = f"{PREFIX}/gateway"
"""On pods that a proxy of the cluster leads to: by what, and at which domain."""

# --- the hello: MCP `initialize`, its server info and capabilities.experimental[HELLO] -----------
SERVER_NAME: Final = "podpipe-sandbox"
HELLO: Final = "podpipe"
HELLO_CONTRACT: Final = "contract"
HELLO_BOOT_ID: Final = "boot_id"
HELLO_POD_UID: Final = "pod_uid"
HELLO_APPS: Final = "apps"
"""The table of published apps: what was exposed over a bare `connect` is learnt from it."""

# --- environment of the container, set by the manifest and read once by the daemon ---------------
ENV_MAX_FILE_BYTES: Final = "PODPIPE_MAX_FILE_BYTES"
ENV_IDLE_SECONDS: Final = "PODPIPE_IDLE_SUSPEND_SECONDS"
"""After which a daemon that nobody uses ends its pod; 0 or unset: never."""

ENV_SANDBOX_ID: Final = "PODPIPE_SANDBOX_ID"
"""By which the gateway knows its own hosts."""

ENV_GATEWAY_ADDRESS: Final = "PODPIPE_GATEWAY_ADDRESS"
"""Where the gateway listens for the proxy in front of it, whose word it takes for the scheme and the
client of a request; unset: on the loopback, and nobody's word."""
EVERY_ADDRESS: Final = "::"
"""IPv4 and IPv6: which of them the pod has is the cluster's choice."""

# --- the gateway -----------------------------------------------------------------------------------
GATEWAY_PORT: Final = 8080
"""Of the pod: apps by the first labels of the host, `<name>.<sandbox_id>.<any domain>`."""
RESERVED_PORTS: Final = (GATEWAY_PORT, 2019)
"""Not for apps: the gateway's, and what Caddy uses for its administration unless it is told not to."""
LOWEST_APP_PORT: Final = 1024
"""Those below are the system's; a sandbox's user may not listen there."""
APP_NAME: Final = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
"""A DNS label, and short enough for a host of three."""
MAX_APPS: Final = 32
MAX_GRANTS: Final = 64
TOKEN_BYTES: Final = 32
COOKIE_OF_TOKEN: Final = b"podpipe app cookie"
"""A token's cookie is HMAC-SHA256 of this under it: from the cookie nobody gets the token."""

# --- calls: `_meta` of tools/call and of its result ------------------------------------------------
META_CALL_ID: Final = "podpipe/call-id"
"""Names a call for good: the daemon runs it once, however often it is asked."""
META_BOOT_ID: Final = "podpipe/boot-id"
"""The boot id of the daemon that the call was first sent to."""
META_CALL_AGE: Final = "podpipe/call-age"
"""Seconds since the call was first sent, where it is asked for again."""
CANCEL_CALL: Final = "podpipe/cancel-call"
"""A tool that is not listed: the call that its argument names ends, or never begins. An older daemon
says that it has no such tool."""
CANCEL_ID: Final = "call_id"
ADMIT_SSH: Final = "podpipe/admit-ssh"
"""Another: the holder of the key that its argument gives may enter by ssh. It answers with the rest."""
SSH_KEY: Final = "key"
SSH_USER: Final = "user"
SSH_HOST_KEY: Final = "host_key"
SSH_ARGV: Final = "argv"
"""The command that serves one connection on its stdin and stdout."""
METHOD_PART: Final = "podpipe/part"
"""A request with one part of an argument that is too long for a message: its id, number and text."""
METHOD_PARTS_DROPPED: Final = "podpipe/parts-dropped"
"""A notification with the ids of texts that no call will name."""
META_PARTS: Final = "podpipe/parts"
"""Which arguments of the call came in parts: name to id and count."""
META_LEASE: Final = "podpipe/lease"
"""On a ping: the daemon closes the connection that brings nothing for so many seconds after it."""
META_EXPIRES_AT: Final = "podpipe/expires-at"
"""On a ping: the sandbox's expiry as the host knows it, RFC 3339. A daemon takes it up if it is later
than what it knows: it is told so before the kubelet has brought the annotation up to date."""
META_ACCESS: Final = "podpipe/access"
"""On a ping: ANNOTATION_ACCESS as the host knows it. A daemon takes it up if its version is higher."""
META_FATE: Final = "podpipe/fate"
"""On a result that stands for a lost one, FATE_UNKNOWN, or for a call that never ran."""
FATE_UNKNOWN: Final = "unknown"
FATE_NOT_STARTED: Final = "not-started"
"""The daemon is ending and refused it: it may be sent to the next one."""
METHOD_ENDING: Final = "podpipe/ending"
"""A notification that the daemon sends when it begins to end: from now on it starts no named call."""
ENDING_TAKEN: Final = "taken"
"""The id of the last request that it had read by then; null for none."""

# --- limits ------------------------------------------------------------------------------------
MAX_MESSAGE_BYTES: Final = 1 << 20
"""No message on the pipe is longer; the SDK's reader is quadratic in a message's length."""
MAX_REQUEST_BYTES: Final = 16 << 20
"""A request to a server of ours may be longer: our reader is linear, and a file of MAX_FILE_BYTES as
base64 has to fit."""
MAX_ERROR_CHARS: Final = 8000
"""An error repeats what it was given, and that may be longer than a reply: its middle is left out."""
IN_FLIGHT_LIMIT: Final = 256
"""Requests of one client that may be in work; nothing more is read until one of them is answered."""
PART_CHARS: Final = 128 * 1024
"""Arguments longer than this travel in parts of so much: others' messages go between them."""
MAX_STAGED_BYTES: Final = 64 << 20
"""What a daemon holds of arguments in parts, all its connections together."""
MAX_FILE_BYTES: Final = 5 * 1024 * 1024
"""Default cap of the content tools (setting MAX_FILE_BYTES)."""
CALL_LIMIT_SECONDS: Final = 45.0
"""No call runs longer: MCP clients give up at 60 s, so it answers "still running" before that."""
COMMAND_PROCESSES: Final = 2000
"""What has more at once is ended: a pod often gets 4,096 (podPidsLimit), and others need some."""
STOP_GRACE_SECONDS: Final = 10
"""terminationGracePeriodSeconds of a pod with a PVC home."""
