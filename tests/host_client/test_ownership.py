"""Another's sandbox does not exist: for every tool, every command, by id and by name."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from host_client import cli
from host_client.config import Settings
from host_client.errors import SandboxNotFound
from host_client.host import Host
from host_client.identity import named_sandbox_id
from host_client.server import build_server
from in_pod_server import contract as c
from tests.host_client.conftest import StubCluster
from tests.host_client.test_launcher import launcher

ALL_TOOLSETS = ("default", "blobs")
NEVER_ARGUMENTS = {
    "user", "users", "namespace", "image", "label", "labels", "annotation", "annotations", "node",
    "volume", "volumes", "claim", "pvc", "storage", "class", "kubeconfig", "account",
    "owner", "uid", "token", "pod", "secret", "session", "role", "container", "kubectl",
}  # fmt: skip
"""Words of an argument's name: what they mean comes with the connection or from the settings."""


def properties(schema: Any) -> Iterator[str]:
    """Every name of an argument, also within arguments."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from properties(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from properties(part)


def filled(schema: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The least that a tool takes, besides the sandbox."""
    values = {
        "string": "x",
        "integer": 1,
        "number": 1.0,
        "boolean": True,
        "object": {},
        "array": [],
    }
    given = {
        name: schema["properties"][name].get("enum", [values[schema["properties"][name]["type"]]])[
            0
        ]
        for name in schema.get("required", [])
        if name != "sandbox_id"
    }
    return given | ({"host_path": str(folder)} if "host_path" in given else {})


async def test_no_tool_has_an_argument_that_names_what_the_connection_settles() -> None:
    server = build_server(Host(Settings(toolsets=ALL_TOOLSETS)))
    tools = await server.list_tools()
    assert len(tools) > 20
    for tool in tools:
        for name in properties(tool.input_schema):
            assert not set(name.lower().split("_")) & NEVER_ARGUMENTS, f"{tool.name}: {name}"


async def test_no_tool_takes_such_an_argument_unlisted_either(stub: StubCluster) -> None:
    with anyio.fail_after(60):
        async with (
            Host(stub.settings(PODPIPE_TOOLSET=",".join(ALL_TOOLSETS))) as host,
            Client(build_server(host)) as client,
        ):
            for tool in (await client.list_tools()).tools:
                arguments = filled(tool.input_schema, stub.folder) | {"sandbox_id": "work"}
                if "sandbox_id" not in tool.input_schema["properties"]:
                    del arguments["sandbox_id"]
                for name in ("user_id", "namespace", "image"):
                    refused = await client.call_tool(tool.name, arguments | {name: "bob"})
                    assert refused.is_error
                    assert f"no argument '{name}'" in str(refused.content), tool.name
    assert not (stub.folder / "calls.jsonl").exists()


async def test_anothers_sandbox_is_to_every_tool_as_one_that_never_was(stub: StubCluster) -> None:
    made = await launcher(stub).create(name="work")
    before, calls = stub.objects, len(stub.calls)
    absent = named_sandbox_id("nobody", "work")
    settings = stub.settings(
        PODPIPE_USER="bob",
        PODPIPE_TOOLSET=",".join(ALL_TOOLSETS),
        PODPIPE_ALLOWED_DIRS=str(stub.folder),
    )
    tried = set()
    with anyio.fail_after(240):
        async with Host(settings) as host, Client(build_server(host)) as client:
            for tool in (await client.list_tools()).tools:
                if "sandbox_id" not in tool.input_schema["properties"]:
                    continue
                tried.add(tool.name)
                rest = filled(tool.input_schema, stub.folder)
                said = []
                for ref in (made.sandbox.id, absent):
                    answer = await client.call_tool(tool.name, {"sandbox_id": ref} | rest)
                    assert answer.is_error, tool.name
                    said.append(str(answer.content).replace(ref, "REF"))
                assert said[0] == said[1]
                assert "no sandbox 'REF' of user 'bob'" in said[0]
                assert "alice" not in said[0]
            listed = await client.call_tool("list_sandboxes", {})
            assert listed.structured_content
            assert listed.structured_content["sandboxes"] == []
    assert {"run_command", "destroy_sandbox", "upload_file", "read_blob"} < tried
    assert stub.objects == before
    done = [call for call in stub.calls[calls:] if "--dry-run=server" not in call]
    assert done
    assert all("get" in call for call in done)


@pytest.mark.parametrize(
    "change",
    [
        {"annotations": {c.ANNOTATION_STATE: "Suspended"}},
        {"annotations": {c.ANNOTATION_EXPIRES_AT: "2020-01-01T00:00:00Z"}},
        {"annotations": {c.ANNOTATION_EXPIRES_AT: "soon"}},
        {"labels": {c.LABEL_USER: "bob"}},
        {"annotations": {c.ANNOTATION_USER_ID: "bob"}},
    ],
    ids=["suspended", "expired", "unreadable", "labelled as mine", "annotated as mine"],
)
async def test_nor_does_its_state_or_half_a_forgery_tell_of_it(
    stub: StubCluster, change: dict[str, dict[str, str]]
) -> None:
    made = await launcher(stub).create(name="work")
    record = stub.objects[f"ConfigMap/{made.sandbox.object_name}"]
    for part, values in change.items():
        record["metadata"][part] |= values
    stub.add(record)
    bob = launcher(stub, PODPIPE_USER="bob")
    for call in (bob.status, bob.running, bob.suspend, bob.destroy):
        with pytest.raises(SandboxNotFound, match="of user 'bob'"):
            await call(made.sandbox.id)
    with pytest.raises(SandboxNotFound):
        await bob.extend(made.sandbox.id, 5)
    assert await bob.list_all() == []
    assert not any("alice" in warning for warning in bob.warnings)


async def test_a_pod_that_only_has_the_labels_of_a_sandbox_is_neither_used_nor_deleted(
    stub: StubCluster,
) -> None:
    """L46: what somebody else had made was adopted, and went with the sandbox."""
    one = launcher(stub)
    made = await one.create(name="work")
    pod = stub.objects[f"Pod/{made.sandbox.pod_name}"]
    foreign = pod | {"metadata": pod["metadata"] | {"name": "foreign", "ownerReferences": []}}
    stub.add(foreign)
    _, used = await one.running("work")
    assert used.name == made.sandbox.pod_name
    await one.suspend("work")
    await one.destroy("work")
    assert stub.names("Pod") == ["foreign"]


async def test_a_user_whose_key_looks_like_anothers_is_another(stub: StubCluster) -> None:
    await launcher(stub, PODPIPE_USER="Alice").create(name="work")
    for user in ("alice", "alice ", "ALICE", "\uff21lice"):
        with pytest.raises(SandboxNotFound):
            await launcher(stub, PODPIPE_USER=user).status("work")


COMMANDS: dict[str, list[str]] = {
    "status": [],
    "run": ["--", "true"],
    "put": ["."],
    "get": ["x"],
    "sync": [".", "x"],
    "suspend": [],
    "resume": [],
    "extend": ["5"],
    "destroy": [],
    "connect": [],
    "apps": [],
    "expose": ["3000", "web"],
    "unexpose": ["web"],
    "access": [],
    "open": ["--no-browser"],
    "shell": ["--", "true"],
    "forward": ["38471:3000"],
    "ssh-config": [],
    "ssh-proxy": ["keys"],
}
"""What each command that takes a sandbox needs besides."""


def commands_on_a_sandbox() -> list[str]:
    (action,) = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return [
        name
        for name, parser in action.choices.items()
        if any(
            each.dest in ("sandbox", "target") and not each.option_strings
            for each in parser._actions
        )
    ]


def test_every_command_on_a_sandbox_is_tried_here() -> None:
    assert set(commands_on_a_sandbox()) == set(COMMANDS)


@pytest.fixture
def alices(stub: StubCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """The random id of a sandbox of alice, where everything else is bob's."""
    made = anyio.run(launcher(stub).create)
    stub.be_here(monkeypatch, PODPIPE_USER="bob")
    monkeypatch.chdir(stub.folder)
    return made.sandbox.id


@pytest.mark.parametrize("command", COMMANDS)
def test_anothers_sandbox_is_to_every_command_as_one_that_never_was(
    stub: StubCluster, alices: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    before = stub.objects
    said = []
    for ref in (alices, "s" + "a" * 16):
        code = cli.main([command, ref, *COMMANDS[command]])
        out, err = capsys.readouterr()
        assert (code, out) == (3, "")
        said.append(err.replace(ref, "REF"))
    assert said[0] == said[1]
    # What may be the name of an app too is refused in other words.
    assert re.search("no sandbox ('REF' )?of user 'bob'", said[0])
    assert stub.objects == before
    assert stub.execs() == 0


def test_a_list_shows_others_only_where_it_is_asked_to(
    stub: StubCluster, alices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == "no sandboxes\n"
    assert cli.main(["list", "--all-users", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["sandbox_id"], found["user"]) == (alices, "alice")
    assert cli.main(["list", "--all-users"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["USER", "SANDBOX"]
    assert row.split()[:2] == ["alice", alices]
