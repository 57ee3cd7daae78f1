"""Settings are read once, checked at the door, and documented."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path

import pytest

from host_client.config import SETTINGS_HELP, Settings
from host_client.errors import UsageError
from host_client.quantity import quantity, refuse_beyond_cap


def test_the_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    settings = Settings.from_env({"PODPIPE_USER": "u"}, cwd=tmp_path)
    for name, attribute in (
        ("NAMESPACE", settings.namespace),
        ("SANDBOX_IMAGE", settings.image),
        ("DEFAULT_STORAGE_SIZE", settings.storage_size),
        ("DEFAULT_TTL_MINUTES", str(settings.ttl_minutes)),
        ("MAX_TTL_MINUTES", str(settings.max_ttl_minutes)),
        ("IDLE_SUSPEND_MINUTES", str(settings.idle_suspend_minutes)),
        ("STORAGE_ACCESS_MODE", settings.storage_access_mode),
        ("TTL_WHILE_SUSPENDED", "stops" if settings.ttl_stops else "runs"),
        ("DEFAULT_CPU_LIMIT", settings.cpu_limit),
        ("DEFAULT_MEMORY_LIMIT", settings.memory_limit),
        ("MAX_CPU_LIMIT", settings.max_cpu_limit),
        ("MAX_MEMORY_LIMIT", settings.max_memory_limit),
        ("MAX_SANDBOXES_PER_USER", str(settings.max_sandboxes_per_user)),
        ("MAX_SANDBOXES", str(settings.max_sandboxes)),
        ("CPU_REQUEST", settings.cpu_request),
        ("MEMORY_REQUEST", settings.memory_request),
        ("EPHEMERAL_STORAGE_LIMIT", settings.ephemeral_storage_limit),
        ("MAX_FILE_BYTES", str(settings.max_file_bytes)),
        ("PODPIPE_TOOLSET", ",".join(settings.toolsets)),
        ("PODPIPE_LOG_LEVEL", settings.log_level),
        ("PODPIPE_LOG_FILE_LEVEL", settings.log_file_level),
    ):
        assert SETTINGS_HELP[name][0] == attribute, name


def test_the_environment_wins_over_the_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        "# ours\nexport NAMESPACE=from-file\nSANDBOX_IMAGE='a:b'  # quoted\nOTHER=x y z\n",
        encoding="utf-8",
    )
    settings = Settings.from_env({"NAMESPACE": "from-env", "PODPIPE_USER": "u"}, cwd=tmp_path)
    assert (settings.namespace, settings.image) == ("from-env", "a:b")
    assert settings.env_file == tmp_path / ".env"


def test_a_named_env_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"PODPIPE_ENV_FILE='no\.env'"):
        Settings.from_env({"PODPIPE_ENV_FILE": "no.env"}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("NAMESPACE=a b", "line 1"),
        ("\nSANDBOX_IMAGE='x", "line 2"),
        ("NAMESPACE", "line 1"),
        ("# fine\nOTHER=x\nNAMESPACE team", r"\.env, line 3 is no NAME=value"),
    ],
)
def test_a_broken_line_in_the_env_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / ".env").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        Settings.from_env({"PODPIPE_USER": "u"}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NAMESPACE", "Bad_Name"),
        ("NAMESPACE", "-x"),
        ("DEFAULT_TTL_MINUTES", "0"),
        ("DEFAULT_TTL_MINUTES", "soon"),
        ("DEFAULT_TTL_MINUTES", "2000"),
        ("MAX_TTL_MINUTES", "-5"),
        ("DEFAULT_CPU_LIMIT", "two"),
        ("DEFAULT_MEMORY_LIMIT", "4GiB"),
        ("DEFAULT_STORAGE_SIZE", "0"),
        ("DEFAULT_CPU_LIMIT", "9"),
        ("DEFAULT_MEMORY_LIMIT", "500m"),
        ("MAX_CPU_LIMIT", "1"),
        ("MAX_MEMORY_LIMIT", "lots"),
        ("MAX_SANDBOXES_PER_USER", "0"),
        ("MAX_SANDBOXES", "many"),
        ("MAX_FILE_BYTES", "1e6"),
        ("PODPIPE_TOOLSET", "default,nonesuch"),
        ("PODPIPE_LOG_LEVEL", "LOUD"),
        ("PODPIPE_LOG_FILE_LEVEL", "LOUD"),
        ("PODPIPE_LOG_FILE", "relative/serve.log"),
        ("PODPIPE_AUDIT_FILE", "audit.jsonl"),
        ("STORAGE_BACKEND", "s3"),
        ("PODPIPE_USER", ""),
        ("PODPIPE_USER", "a\nb"),
        ("PODPIPE_SESSION", "\udcff"),
        ("SANDBOX_IMAGE", "x\udcff"),
    ],
)
def test_a_malformed_setting_is_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError) as refused:
        Settings.from_env({"PODPIPE_USER": "u", name: value}, cwd=tmp_path)
    assert name in str(refused.value) or "user id" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1.5", "1.5"), ("4Gi", "4294967296"), ("1k", "1000")],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, value: str) -> None:
    assert quantity(text, "x") == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "1 Gi",
        "1gi",
        "Gi",
        "1e3",
        "0",
        "0m",
        "١",
        "1\n",
        " 1",
        "10Gi ",
        "+1",
        "1_000",
        "0x10",
        "inf",
        "nan",
        "1e9",
        ".5",
        "1,5",
        "１",
    ],
)
def test_what_is_no_positive_quantity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="limit="):
        quantity(text, "limit")


@pytest.mark.parametrize(
    ("resource", "text", "message"),
    [
        ("cpu", "8", ""),
        ("cpu", "7999m", ""),
        ("cpu", "0.05", ""),
        ("cpu", "8001m", r"above the maximum of 8 \(setting MAX_CPU_LIMIT\)"),
        ("cpu", "1k", "above the maximum"),
        ("cpu", "49m", "needs 50m"),
        ("cpu", "1.5m", "needs 50m"),
        ("cpu", "100.5m", "whole number of 1m"),
        ("cpu", "1e9", "not a Kubernetes quantity such as 500m or 2$"),
        ("cpu", "0", "'0' has to be more than 0"),
        ("memory", "16Gi", ""),
        ("memory", "0.5Gi", ""),
        ("memory", "17179869185", r"above the maximum of 16Gi \(setting MAX_MEMORY_LIMIT\)"),
        ("memory", "1Ei", "above the maximum"),
        ("memory", "512m", "needs 128Mi"),
        ("memory", "1", "needs 128Mi"),
        ("memory", "200000000.5", "whole number of 1"),
        ("memory", "10Gi ", "not a Kubernetes quantity such as 512Mi or 4Gi$"),
        ("memory", "0Gi", "'0Gi' has to be more than 0"),
    ],
)
def test_a_limit_is_held_to_its_cap(resource: str, text: str, message: str) -> None:
    most = {"cpu": "8", "memory": "16Gi"}[resource]
    if not message:
        refuse_beyond_cap(text, f"{resource}_limit", resource, most)
        return
    with pytest.raises(UsageError, match=f"{resource}_limit=.*{message}"):
        refuse_beyond_cap(text, f"{resource}_limit", resource, most)


def test_runtime_class_unset_and_empty_are_different(tmp_path: Path) -> None:
    base = {"PODPIPE_USER": "u"}
    assert Settings.from_env(base, cwd=tmp_path).runtime_class is None
    assert Settings.from_env(base | {"RUNTIME_CLASS": ""}, cwd=tmp_path).runtime_class == ""


def test_a_byte_order_mark_hides_no_setting(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfNAMESPACE=marked\n")
    assert Settings.from_env({"PODPIPE_USER": "u"}, cwd=tmp_path).namespace == "marked"


def test_an_env_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a file"):
        Settings.from_env({"PODPIPE_ENV_FILE": "pipe"}, cwd=tmp_path)


def test_a_given_setting_says_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("NAMESPACE=file\nSANDBOX_IMAGE=a:b\n", encoding="utf-8")
    settings = Settings.from_env({"NAMESPACE": "process", "PODPIPE_USER": "u"}, cwd=tmp_path)
    assert {name: (given.value, given.source) for name, given in settings.given.items()} == {
        "NAMESPACE": ("process", "environment"),
        "SANDBOX_IMAGE": ("a:b", str(tmp_path / ".env")),
        "PODPIPE_USER": ("u", "environment"),
    }


@pytest.mark.parametrize(
    ("platform", "environ", "path"),
    [
        ("linux", {}, "/home/u/.local/state/podpipe/serve.log"),
        ("linux", {"XDG_STATE_HOME": "/state"}, "/state/podpipe/serve.log"),
        ("linux", {"XDG_STATE_HOME": "state"}, "/home/u/.local/state/podpipe/serve.log"),
        ("darwin", {"XDG_STATE_HOME": "/state"}, "/home/u/Library/Logs/podpipe/serve.log"),
        ("linux", {"PODPIPE_LOG_FILE": "~/x.log"}, "/home/u/x.log"),
        ("linux", {"PODPIPE_LOG_FILE": "none"}, None),
    ],
)
def test_the_log_file_is_where_the_platform_keeps_logs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    environ: dict[str, str],
    path: str | None,
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    settings = Settings.from_env({"PODPIPE_USER": "u", "HOME": "/home/u"} | environ, cwd=tmp_path)
    assert settings.log_file == (Path(path) if path else None)
    environ = {name.replace("LOG", "AUDIT"): value for name, value in environ.items()}
    settings = Settings.from_env({"PODPIPE_USER": "u", "HOME": "/home/u"} | environ, cwd=tmp_path)
    expected = path and path.replace("serve.log", "audit.jsonl")
    assert settings.audit_file == (Path(expected) if expected else None)
