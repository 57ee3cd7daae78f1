"""No secret is written anywhere: not in logs, argv, objects of the cluster, or errors."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from host_client.errors import UsageError
from host_client.refusals import refusals
from host_client.target import Target
from tests.canaries import MARK, leaked, leaks
from tests.host_client.conftest import Podpipe, StubCluster
from tests.host_client.test_server import Serve

SECRET = f"{MARK}-call"


def test_a_search_finds_a_secret_in_every_form(tmp_path: Path) -> None:
    """A check that cannot fail proves nothing."""
    for before in ("", "a", "ab", "abc"):
        assert leaked(f"{before}{MARK} and more")
        assert leaked(base64.b64encode(f"{before}{MARK} and more".encode()))
    assert not leaked("nothing of the kind")
    for name in ("x/serve.log.2", "audit.jsonl", "pods/a/daemon.log", "state.json", "calls.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"…{MARK}…", encoding="utf-8")
        assert leaks(tmp_path) == [path]
        path.unlink()


@pytest.fixture
def loud(stub: StubCluster) -> dict[str, str]:
    """A server that says all that it can."""
    root = str(Path(__file__).resolve().parents[2])
    return stub.environment | {
        "PYTHONPATH": root,
        "PODPIPE_LOG_LEVEL": "DEBUG",
        "PODPIPE_LOG_FILE_LEVEL": "DEBUG",
        "PODPIPE_ALLOWED_DIRS": str(stub.folder),
    }


CARRIES: list[tuple[str, dict[str, Any]]] = [
    ("run_command", {"command": f"PASSWORD={SECRET} true"}),
    ("run_command", {"command": "cat >/dev/null", "stdin": SECRET}),
    ("run_command", {"command": "true", "env": {"API_KEY": SECRET}}),
    ("run_command", {"command": "kill -9 $PPID", "env": {"API_KEY": SECRET}}),
    ("start_background", {"command": f": {SECRET}; sleep 0"}),
    ("write_file", {"path": "key", "content": SECRET}),
    ("write_file", {"path": "key", "content": SECRET, "create_only": True}),
    ("write_file", {"path": "no/such/../../..", "content": SECRET}),
    ("edit_file", {"path": "key", "old": SECRET, "new": f"{SECRET}2"}),
    ("edit_file", {"path": "key", "old": f"{SECRET}-absent", "new": "x"}),
    ("search_files", {"pattern": SECRET}),
    ("send_input", {"process_id": "none", "data": SECRET}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("run_command", {"command": [SECRET]}),
    ("run_command", {"command": "true", "env": SECRET}),
    ("run_command", {"command": "true", "env": {"A": [SECRET]}}),
    ("run_command", {"command": "true", "timeout_seconds": SECRET}),
    ("write_file", {"path": "key", "content": {"a": SECRET}}),
    ("write_file", {"path": "key", "content": f"{SECRET}\ud800"}),
    ("send_input", {"process_id": "none", "data": {"a": SECRET}}),
    ("create_sandbox", {"ttl_minutes": [SECRET]}),
    ("nonesuch", {"token": SECRET}),
]
"""What is refused: its answer is for who sent it, but must not tell what it carried to a log."""


def test_what_calls_carry_is_written_nowhere(stub: StubCluster, loud: dict[str, str]) -> None:
    (stub.folder / "key.pem").write_text(SECRET, encoding="utf-8")
    stderr = stub.folder / "stderr"
    with stderr.open("wb") as loudly:  # more than a pipe holds
        serve = Serve(loud, loudly)
    serve.initialize()
    assert not serve.call("create_sandbox", name="work").get("isError")
    work = {"sandbox_id": "work"}
    for tool, arguments in CARRIES:
        serve.call(tool, **work, **arguments)
    for tool, arguments in WRONG:
        refused = serve.ask("tools/call", {"name": tool, "arguments": work | arguments})
        assert "error" in refused or refused["result"]["isError"], (tool, refused)
    serve.call("upload_file", **work, host_path=str(stub.folder / "key.pem"), path="pem")
    serve.ask("tools/call", {"name": "run_command", "arguments": SECRET})
    serve.ask(f"no/such/{SECRET}", {"x": SECRET})
    serve.send({"method": "notifications/cancelled", "params": {"requestId": {"a": SECRET}}})
    serve.send({"method": "notifications/progress", "params": {"progressToken": [SECRET]}})
    serve.send({"method": f"notifications/{SECRET}", "params": {"x": SECRET}})
    assert serve.process.stdin
    serve.process.stdin.write(b'{"jsonrpc": "2.0", "id": 99, "' + SECRET.encode() + b'": \n')
    serve.process.stdin.write(SECRET.encode() + b"\n")
    serve.process.stdin.flush()
    serve.call("suspend_sandbox", **work)
    serve.call("run_command", **work, command=f"echo {SECRET}")
    serve.process.communicate(timeout=30)
    said = stderr.read_bytes()
    assert b"host_client" in said  # it was as loud as it was asked to be
    assert not leaked(said), [line for line in said.split(b"\n") if leaked(line)]
    state = stub.folder / ".local/state/podpipe"
    assert {path.name for path in state.iterdir()} == {"serve.log", "audit.jsonl"}
    assert len((state / "audit.jsonl").read_bytes().splitlines()) > len(CARRIES) + len(WRONG)
    assert list((stub.folder / "pods").glob("*/daemon.log"))
    assert leaks(stub.folder) == []


def test_commands_tell_no_secret_of_this_machine(stub: StubCluster, podpipe: Podpipe) -> None:
    """The kubeconfig has a token and the environment a key, in every test; here all commands look."""
    assert leaked(stub.kubeconfig.read_bytes())
    assert leaked(json.dumps(stub.environment))
    for argv in (
        ("create", "--name", "work"), ("list", "--json"), ("status", "work"), ("settings",),
        ("settings", "--json"), ("doctor",), ("render",), ("reap", "--dry-run"),
        ("install", "claude-desktop", "--print"), ("install", "codex", "--dry-run"),
        ("run", "work", "--", "env"),
    ):  # fmt: skip
        podpipe(*argv)  # which looks at what it prints
    stub.faults(get={"stderr": "Error from server (Unauthorized): token of u"})
    assert podpipe("list").returncode == 1


def test_a_kubeconfig_that_does_not_parse_is_not_quoted(stub: StubCluster) -> None:
    for text in (
        f"users:\n- name: u\n  user: {{token: {SECRET}\n",
        f"token: {SECRET}: x: y",
        f"a: !{SECRET} b",
        f"a: *{SECRET}\n",
        f"{SECRET}\0",
    ):
        stub.kubeconfig.write_text(text, encoding="utf-8")
        with pytest.raises(Exception, match="kubeconfig") as refused:
            Target.resolve(stub.settings())
        assert not leaked(str(refused.value)), str(refused.value)


@pytest.mark.parametrize("line", ["{}", "export {}", "NAMESPACE='{}", "NAMESPACE=a {}", "'{}"])
def test_a_line_of_an_env_file_is_not_quoted(stub: StubCluster, line: str) -> None:
    """A project's own .env: a private key has many lines."""
    (stub.folder / ".env").write_text(line.format(SECRET) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1") as refused:
        stub.settings()
    assert not leaked(str(refused.value))


async def test_an_unexpected_error_is_located_and_not_quoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        pytest.raises(Exception, match="internal error of podpipe"),
        caplog.at_level(logging.DEBUG),
    ):
        async with refusals():
            raise ValueError(SECRET)
    assert "unexpected ValueError" in caplog.text
    assert Path(__file__).name in caplog.text
    assert not leaked(caplog.text.replace("raise ValueError(SECRET)", ""))
