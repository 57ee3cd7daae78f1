"""Settings: the only reader of the environment on the host.

Every setting has one row in `SETTINGS_HELP` (README's table is held against it by a test). Values
come from the process environment first, then from a `.env` file (`PODPIPE_ENV_FILE`, or `.env` in
the working folder).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from host_client.errors import UsageError
from host_client.gateway import DOMAIN, OPEN_PORT, Gateway
from host_client.identity import default_user, user_key
from host_client.quantity import quantity, refuse_beyond_cap
from in_pod_server.contract import MAX_FILE_BYTES

IDLE_SECONDS = 600
REAPER_INTERVAL_SECONDS = 60
MAX_SANDBOXES_PER_USER = 20
MAX_SANDBOXES = 1000
DEFAULT_RUNTIME_CLASS = "gvisor"
DEFAULT_STORAGE_CLASS = "standard"
"""What is tried first where the setting is unset."""

SETTINGS_HELP: Mapping[str, tuple[str, str]] = {
    "NAMESPACE": ("sandbox-system", "where sandboxes live; made if absent and allowed"),
    "SANDBOX_IMAGE": ("sandbox-base:latest", "image of every sandbox"),
    "RUNTIME_CLASS": (
        DEFAULT_RUNTIME_CLASS,
        "pod runtime class; empty means the cluster default; unset falls back to it with a warning",
    ),
    "STORAGE_BACKEND": ("pvc", "where homes live; only pvc so far"),
    "DEFAULT_STORAGE_SIZE": ("10Gi", "size of a new home"),
    "DEFAULT_STORAGE_CLASS": (
        DEFAULT_STORAGE_CLASS,
        "storage class of a new home; unset falls back to the cluster's default with a warning",
    ),
    "STORAGE_ACCESS_MODE": (
        "ReadWriteOnce",
        "of a new home; ReadWriteMany, where the class can, lets one user's pods run on several nodes",
    ),
    "DEFAULT_TTL_MINUTES": ("60", "lifetime of a sandbox unless create says otherwise"),
    "MAX_TTL_MINUTES": ("1440", "longest lifetime; also the pod's activeDeadlineSeconds"),
    "IDLE_SUSPEND_MINUTES": (
        "0",
        "a sandbox that nobody uses for so long ends its pod, which suspends it; 0: never",
    ),
    "TTL_WHILE_SUSPENDED": (
        "runs",
        "stops: the time that a sandbox is suspended does not count against its lifetime",
    ),
    "DEFAULT_CPU_LIMIT": ("2", "CPU limit of a sandbox"),
    "DEFAULT_MEMORY_LIMIT": ("4Gi", "memory limit of a sandbox"),
    "MAX_CPU_LIMIT": ("8", "largest CPU limit that create may be asked for"),
    "MAX_MEMORY_LIMIT": ("16Gi", "largest memory limit that create may be asked for"),
    "MAX_SANDBOXES_PER_USER": (
        str(MAX_SANDBOXES_PER_USER),
        "sandboxes that a user may have, suspended ones too; expired ones do not count",
    ),
    "MAX_SANDBOXES": (str(MAX_SANDBOXES), "likewise of all users together in the namespace"),
    "CPU_REQUEST": ("100m", "CPU request, so that many sandboxes fit one node"),
    "MEMORY_REQUEST": ("256Mi", "memory request"),
    "EPHEMERAL_STORAGE_LIMIT": ("8Gi", "scratch disk of a sandbox: /tmp and logs"),
    "MAX_FILE_BYTES": (str(MAX_FILE_BYTES), "cap of read_file and write_file, in bytes"),
    "REAPER_INTERVAL_SECONDS": (
        str(REAPER_INTERVAL_SECONDS),
        "how often `podpipe reap --every` sweeps expired sandboxes",
    ),
    "IMAGE_PULL_SECRETS": ("", "names of pull secrets in the namespace, comma-separated"),
    "KUBECONFIG": ("~/.kube/config", "as kubectl reads it"),
    "PODPIPE_CONTEXT": ("", "kubeconfig context; empty means the current one, pinned at start"),
    "PODPIPE_KUBECTL": ("", "path of kubectl; empty means the first found"),
    "PODPIPE_USER": ("OS user @ machine", "whose sandboxes and home; never a tool's argument"),
    "PODPIPE_RESUME": ("auto", "auto: a call resumes a suspended sandbox; manual: it is refused"),
    "PODPIPE_IDLE_SECONDS": (
        str(IDLE_SECONDS),
        "an unused pipe closes after this; the next call opens another in a fifth of a second",
    ),
    "PODPIPE_OPEN_PORT": (
        str(OPEN_PORT),
        "port of this machine's loopback at which published apps are served",
    ),
    "GATEWAY": (
        "local",
        "local: apps are at this machine's address; ingress, httproute: each sandbox gets its own",
    ),
    "BASE_DOMAIN": (DOMAIN, "apps are at `<name>.<sandbox_id>.<BASE_DOMAIN>`"),
    "GATEWAY_SCHEME": (
        "https",
        "how browsers reach that Ingress or HTTPRoute; with the port if it is unusual: `http:8080`",
    ),
    "GATEWAY_ANNOTATIONS": (
        "",
        "annotations of each Ingress or HTTPRoute for its controller, NAME=VALUE, comma-separated",
    ),
    "INGRESS_CLASS": ("", "class of each Ingress; empty means the cluster's default"),
    "HTTPROUTE_PARENT": ("", "the Gateway of each HTTPRoute, NAMESPACE/NAME"),
    "PODPIPE_ACCESS_TOOL": (
        "off",
        "on: serve offers get_sandbox_access, which makes tokens for apps; for trusted gateways only",
    ),
    "PODPIPE_SESSION": ("", "free text recorded on the sandboxes that are made"),
    "PODPIPE_TOOLSET": ("default", "tools that serve offers, comma-separated: default, blobs"),
    "PODPIPE_ALLOWED_DIRS": (
        "",
        "folders here that upload_file and download_file may touch, separated by `:`; empty: none",
    ),
    "PODPIPE_ENV_FILE": (".env", "file with further settings, NAME=value a line"),
    "PODPIPE_LOG_LEVEL": ("WARNING", "what goes to stderr: DEBUG, INFO, WARNING, ERROR"),
    "PODPIPE_LOG_FILE": (
        "serve.log in the state folder",
        "log file of serve, one line a call; `none` for no file",
    ),
    "PODPIPE_LOG_FILE_LEVEL": ("INFO", "what goes to that file; WARNING leaves the calls out"),
    "PODPIPE_AUDIT_FILE": (
        "audit.jsonl in the state folder",
        "audit of serve and of the commands, one JSON line a call; `none` for no file",
    ),
}
"""Name of each setting: its default as a person reads it, and its meaning."""

ACCESS_MODES = ("ReadWriteOnce", "ReadWriteMany")
TOOLSETS = ("default", "blobs")
MAX_ENV_FILE_BYTES = 64 * 1024
MAX_TTL_LIMIT = 365 * 24 * 60
"""Minutes: beyond a year a sandbox is no sandbox, and dates run over."""

MAX_COUNT = 1_000_000
"""Of sandboxes: far more than a cluster has."""

_MAY_BE_EMPTY = ("RUNTIME_CLASS", "DEFAULT_STORAGE_CLASS")
"""Settings whose empty value is not their default."""


@dataclass(frozen=True, slots=True)
class Given:
    """A setting that somebody set.

    Args:
        value: as it was written.
        source: `environment`, or the path of the `.env` file.
    """

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, resolved once. `from_env` makes one; tests may build one directly."""

    namespace: str = "sandbox-system"
    image: str = "sandbox-base:latest"
    runtime_class: str | None = None
    """None: gvisor where the cluster has it. Empty: the cluster's default."""
    storage_size: str = "10Gi"
    storage_class: str | None = None
    """None: `standard` where the cluster has it, otherwise its default class."""
    storage_access_mode: str = "ReadWriteOnce"
    ttl_minutes: int = 60
    max_ttl_minutes: int = 1440
    idle_suspend_minutes: int = 0
    ttl_stops: bool = False
    """Whether suspended time counts for nothing."""
    """0: never."""
    cpu_limit: str = "2"
    memory_limit: str = "4Gi"
    max_cpu_limit: str = "8"
    max_memory_limit: str = "16Gi"
    max_sandboxes_per_user: int = MAX_SANDBOXES_PER_USER
    max_sandboxes: int = MAX_SANDBOXES
    cpu_request: str = "100m"
    memory_request: str = "256Mi"
    ephemeral_storage_limit: str = "8Gi"
    max_file_bytes: int = MAX_FILE_BYTES
    reaper_interval_seconds: int = REAPER_INTERVAL_SECONDS
    pull_secrets: tuple[str, ...] = ()
    context: str = ""
    kubectl: str = ""
    user: str = "user"
    session: str = ""
    toolsets: tuple[str, ...] = ("default",)
    allowed_dirs: tuple[str, ...] = ()
    """Absolute folders of this machine that the transfer tools may touch."""
    resumes: bool = True
    """Whether a call on a suspended sandbox resumes it."""
    idle_seconds: int = IDLE_SECONDS
    gateway: Gateway = field(default_factory=Gateway)
    """Where published apps are reached."""
    access_tool: bool = False
    """Whether a model, or what stands between it and us, may make tokens."""
    log_level: str = "WARNING"
    log_file: Path | None = None
    """Where `serve` logs to; None: nowhere but stderr."""
    log_file_level: str = "INFO"
    audit_file: Path | None = None
    """Where each call is recorded; None: nowhere."""
    env_file: Path | None = None
    """The `.env` file that was read, if any."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """Those of `SETTINGS_HELP` that are not at their defaults because somebody set them."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What kubectl and its credential plugins are started with."""

    @property
    def user_key(self) -> str:
        """The user's key in labels and object names."""
        return user_key(self.user)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Settings:
        """Read the environment and the `.env` file.

        Args:
            environ: the environment; the process's own by default.
            cwd: where a relative env file is looked for; the working folder by default.

        Raises:
            UsageError: a setting is malformed, or an env file that was named is not readable.
        """
        process = dict(os.environ if environ is None else environ)
        env_file, from_file = _read_env_file(process, cwd or Path.cwd())
        env = {**from_file, **process}
        given = {
            name: Given(env[name], "environment" if name in process else str(env_file))
            for name in SETTINGS_HELP
            if env.get(name, "").strip() or (name in env and name in _MAY_BE_EMPTY)
        }
        for name in SETTINGS_HELP:
            try:
                env.get(name, "").encode()
            except UnicodeEncodeError:
                raise UsageError(f"{name}={env[name]!a} is not valid UTF-8") from None

        def text(name: str, default: str) -> str:
            return env.get(name, default).strip() or default

        def minutes(name: str, default: int) -> int:
            return _integer(env.get(name, ""), name, default, 1, MAX_TTL_LIMIT)

        def count(name: str, default: int) -> int:
            return _integer(env.get(name, ""), name, default, 1, MAX_COUNT)

        if "PODPIPE_USER" in env and not env["PODPIPE_USER"].strip():
            raise UsageError("PODPIPE_USER is set but empty; name the user, or unset it")
        if (storage := text("STORAGE_BACKEND", "pvc")) != "pvc":
            raise UsageError(f"STORAGE_BACKEND={storage!r} is not supported; use pvc")
        defaults = cls()
        settings = cls(
            namespace=_label(text("NAMESPACE", defaults.namespace), "NAMESPACE"),
            image=text("SANDBOX_IMAGE", defaults.image),
            runtime_class=env.get("RUNTIME_CLASS"),
            storage_size=text("DEFAULT_STORAGE_SIZE", defaults.storage_size),
            storage_class=env.get("DEFAULT_STORAGE_CLASS"),
            storage_access_mode=_choice(
                env.get("STORAGE_ACCESS_MODE", ""), "STORAGE_ACCESS_MODE", ACCESS_MODES
            ),
            ttl_minutes=minutes("DEFAULT_TTL_MINUTES", defaults.ttl_minutes),
            max_ttl_minutes=minutes("MAX_TTL_MINUTES", defaults.max_ttl_minutes),
            idle_suspend_minutes=_integer(
                env.get("IDLE_SUSPEND_MINUTES", ""),
                "IDLE_SUSPEND_MINUTES",
                defaults.idle_suspend_minutes,
                0,
                MAX_TTL_LIMIT,
            ),
            ttl_stops=_choice(
                env.get("TTL_WHILE_SUSPENDED", ""), "TTL_WHILE_SUSPENDED", ("runs", "stops")
            )
            == "stops",
            cpu_limit=text("DEFAULT_CPU_LIMIT", defaults.cpu_limit),
            memory_limit=text("DEFAULT_MEMORY_LIMIT", defaults.memory_limit),
            max_cpu_limit=text("MAX_CPU_LIMIT", defaults.max_cpu_limit),
            max_memory_limit=text("MAX_MEMORY_LIMIT", defaults.max_memory_limit),
            max_sandboxes_per_user=count("MAX_SANDBOXES_PER_USER", MAX_SANDBOXES_PER_USER),
            max_sandboxes=count("MAX_SANDBOXES", MAX_SANDBOXES),
            cpu_request=text("CPU_REQUEST", defaults.cpu_request),
            memory_request=text("MEMORY_REQUEST", defaults.memory_request),
            ephemeral_storage_limit=text(
                "EPHEMERAL_STORAGE_LIMIT", defaults.ephemeral_storage_limit
            ),
            max_file_bytes=_integer(
                env.get("MAX_FILE_BYTES", ""), "MAX_FILE_BYTES", MAX_FILE_BYTES, 1, 1 << 30
            ),
            reaper_interval_seconds=_integer(
                env.get("REAPER_INTERVAL_SECONDS", ""),
                "REAPER_INTERVAL_SECONDS",
                REAPER_INTERVAL_SECONDS,
                1,
                86400,
            ),
            pull_secrets=tuple(_words(env.get("IMAGE_PULL_SECRETS", ""))),
            context=text("PODPIPE_CONTEXT", ""),
            kubectl=text("PODPIPE_KUBECTL", ""),
            user=env.get("PODPIPE_USER", "") or default_user(),
            session=env.get("PODPIPE_SESSION", ""),
            resumes=_choice(env.get("PODPIPE_RESUME", ""), "PODPIPE_RESUME", ("auto", "manual"))
            == "auto",
            idle_seconds=_integer(
                env.get("PODPIPE_IDLE_SECONDS", ""), "PODPIPE_IDLE_SECONDS", IDLE_SECONDS, 1, 86400
            ),
            gateway=Gateway.from_texts(
                lambda name: text(name, ""),
                _integer(
                    env.get("PODPIPE_OPEN_PORT", ""), "PODPIPE_OPEN_PORT", OPEN_PORT, 1024, 65535
                ),
            ),
            access_tool=_choice(
                env.get("PODPIPE_ACCESS_TOOL", ""), "PODPIPE_ACCESS_TOOL", ("off", "on")
            )
            == "on",
            toolsets=_toolsets(text("PODPIPE_TOOLSET", "default")),
            allowed_dirs=_folders(env.get("PODPIPE_ALLOWED_DIRS", ""), "PODPIPE_ALLOWED_DIRS"),
            log_level=_log_level(
                text("PODPIPE_LOG_LEVEL", defaults.log_level), "PODPIPE_LOG_LEVEL"
            ),
            log_file=_state_file("PODPIPE_LOG_FILE", "serve.log", env),
            log_file_level=_log_level(
                text("PODPIPE_LOG_FILE_LEVEL", defaults.log_file_level), "PODPIPE_LOG_FILE_LEVEL"
            ),
            audit_file=_state_file("PODPIPE_AUDIT_FILE", "audit.jsonl", env),
            env_file=env_file,
            given=given,
            environment=process | ({"KUBECONFIG": k} if (k := env.get("KUBECONFIG", "")) else {}),
        )
        user_key(settings.user)
        for name, value in (
            ("DEFAULT_STORAGE_SIZE", settings.storage_size),
            ("CPU_REQUEST", settings.cpu_request),
            ("MEMORY_REQUEST", settings.memory_request),
            ("EPHEMERAL_STORAGE_LIMIT", settings.ephemeral_storage_limit),
        ):
            quantity(value, name)
        for what, resource, default, most in (
            ("DEFAULT_CPU_LIMIT", "cpu", settings.cpu_limit, settings.max_cpu_limit),
            ("DEFAULT_MEMORY_LIMIT", "memory", settings.memory_limit, settings.max_memory_limit),
        ):
            refuse_beyond_cap(default, what, resource, most)
        if settings.ttl_minutes > settings.max_ttl_minutes:
            raise UsageError(
                f"DEFAULT_TTL_MINUTES={settings.ttl_minutes} is above "
                f"MAX_TTL_MINUTES={settings.max_ttl_minutes}"
            )
        return settings


def _read_env_file(process: Mapping[str, str], cwd: Path) -> tuple[Path | None, dict[str, str]]:
    named = process.get("PODPIPE_ENV_FILE", "")
    path = (cwd / (named or ".env")).resolve()
    try:
        if not path.is_file():
            if not named:
                return None, {}
            raise UsageError(f"PODPIPE_ENV_FILE={named!r} is not a file: {path}")
        with path.open("rb") as file:
            raw = file.read(MAX_ENV_FILE_BYTES)
    except OSError as error:
        if not named:
            return None, {}
        raise UsageError(f"PODPIPE_ENV_FILE={named!r} is not readable: {error.strerror}") from error
    values: dict[str, str] = {}
    for number, line in enumerate(raw.decode("utf-8-sig", "replace").split("\n"), 1):
        entry = line.strip().removeprefix("export ").strip()
        if not entry or entry.startswith("#"):
            continue
        name, equals, value = entry.partition("=")
        name = name.strip()
        if not equals:
            raise UsageError(  # without the line: it may be a part of somebody's private key
                f"{path}, line {number} is no NAME=value; begin a comment with #"
            )
        if name not in SETTINGS_HELP:
            continue  # a project's own .env holds other people's settings too
        try:
            words = shlex.split(value, comments=True)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error} in the value of {name}") from None
        if len(words) > 1:
            raise UsageError(
                f"{path}, line {number}: expected {name}=value, quoted if it has spaces"
            )
        values[name] = words[0] if words else ""
    return path, values


def _integer(text: str, name: str, default: int, low: int, high: int) -> int:
    if not text.strip():
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(f"{name}={text!r} has to be a whole number from {low} to {high}")
    return value


def _choice(text: str, name: str, known: tuple[str, ...]) -> str:
    """One of the known words; the first is the default."""
    chosen = text.strip() or known[0]
    if chosen not in known:
        raise UsageError(f"{name}={text!r} has to be {' or '.join(known)}")
    return chosen


def _label(text: str, name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise UsageError(
            f"{name}={text!r} is not a Kubernetes name: lower-case letters, digits, '-'"
        )
    return text


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text) if word]


def _folders(text: str, name: str) -> tuple[str, ...]:
    found = tuple(str(Path(part).expanduser()) for part in text.split(os.pathsep) if part.strip())
    for folder in found:
        if not Path(folder).is_absolute():
            raise UsageError(f"{name} names {folder!r}, which is not an absolute path")
    return found


def _toolsets(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(_words(text)))
    if unknown := [name for name in chosen if name not in TOOLSETS]:
        raise UsageError(
            f"PODPIPE_TOOLSET names {', '.join(unknown)}; known are {', '.join(TOOLSETS)}"
        )
    return chosen


def _log_level(text: str, name: str) -> str:
    if text.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise UsageError(f"{name}={text!r} has to be DEBUG, INFO, WARNING or ERROR")
    return text.upper()


def _state_file(setting: str, name: str, env: Mapping[str, str]) -> Path | None:
    """The file `name` where the platform keeps logs, unless the setting says otherwise."""
    text = env.get(setting, "").strip()
    if text == "none":
        return None
    home = Path(env.get("HOME", "~")).expanduser()
    if text:
        named = home / text[2:] if text.startswith("~/") else Path(text)
        if not named.is_absolute():
            raise UsageError(f"{setting}={text!r} has to be an absolute path, or none")
        return named
    if sys.platform == "darwin":
        return home / "Library/Logs/podpipe" / name
    state = Path(env.get("XDG_STATE_HOME", ""))  # to be ignored where relative, says its standard
    return (state if state.is_absolute() else home / ".local/state") / "podpipe" / name
