"""The .mcpb bundle: unpacked and started as Claude Desktop does, with nothing but what it names.

The packages that its uv would fetch are those of this environment; `tests/cluster/test_bundle.py` has
the format's own validator and a real cluster.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from host_client.host import Host
from host_client.local import bundle
from host_client.server import build_server
from tests.host_client.conftest import StubCluster

BOUND = 60


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    file = tmp_path / "podpipe.mcpb"
    bundle.write_bundle(file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "extension")
    return tmp_path / "extension"


def manifest(unpacked: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((unpacked / "manifest.json").read_text(encoding="utf-8"))
    return found


def started_by_desktop(unpacked: Path, home: Path, **answers: str) -> StdioServerParameters:
    """The command that the manifest makes of what a person answered."""
    shown = manifest(unpacked)
    values = {name: asked.get("default", "") for name, asked in shown["user_config"].items()}
    known = {f"user_config.{name}": value for name, value in (values | answers).items()}
    known |= {"__dirname": str(unpacked), "HOME": str(home)}

    def filled(text: str) -> str:
        for name, value in known.items():
            text = text.replace(f"${{{name}}}", value)
        assert "${" not in text
        return text

    config = shown["server"]["mcp_config"]
    offline = {"UV_OFFLINE": "1", "UV_NO_SYNC": "1", "UV_PROJECT_ENVIRONMENT": sys.prefix}
    return StdioServerParameters(
        command=str(Path(sys.prefix) / "bin" / config["command"]),
        args=[filled(word) for word in config["args"]],
        cwd="/",
        env={"HOME": str(home), **offline}
        | {name: filled(value) for name, value in config["env"].items()},
    )


async def test_the_bundle_answers_with_what_a_person_configured(
    unpacked: Path, stub: StubCluster
) -> None:
    server = started_by_desktop(
        unpacked, stub.folder, user="alice", kubeconfig=str(stub.kubeconfig), path="/usr/bin:/bin"
    )
    with anyio.fail_after(BOUND):
        async with Client(server, mode="legacy") as client:
            assert client.server_info
            assert client.server_info.name == "podpipe"
            listed = [tool.name for tool in (await client.list_tools()).tools]
    assert listed == [tool["name"] for tool in manifest(unpacked)["tools"]]


async def test_the_bundle_works_through_the_folders_and_the_sandbox_that_were_named(
    unpacked: Path, stub: StubCluster
) -> None:
    server = started_by_desktop(
        unpacked, stub.folder, user="alice", kubeconfig=str(stub.kubeconfig), sandbox="lasting",
        path=f"{stub.folder}:/usr/bin:/bin",
    )  # fmt: skip
    assert server.env
    server.env["STUB_DIR"] = str(stub.folder)
    with anyio.fail_after(BOUND):
        async with Client(server) as client:
            ran = await client.call_tool("run_command", {"command": "echo hello"})
    assert ran.structured_content, ran.content
    assert ran.structured_content["stdout"] == "hello\n"


def test_every_question_is_used_and_every_use_is_asked(unpacked: Path) -> None:
    """What has no default has to be required: the app leaves the name of it in the command."""
    shown = manifest(unpacked)
    used = json.dumps(shown["server"]["mcp_config"])
    for name, asked in shown["user_config"].items():
        assert f"${{user_config.{name}}}" in used
        assert asked.get("required") or "default" in asked
        assert asked["description"]
    assert used.count("${user_config.") == len(shown["user_config"])
    assert shown["compatibility"]["platforms"] == ["darwin", "linux"]


async def test_the_manifest_lists_the_tools_that_are_served(
    unpacked: Path, stub: StubCluster
) -> None:
    served = [tool.name for tool in await build_server(Host(stub.settings())).list_tools()]
    assert [tool["name"] for tool in manifest(unpacked)["tools"]] == served


def test_the_same_sources_make_the_same_bundle(tmp_path: Path) -> None:
    for name in ("a.mcpb", "b.mcpb"):
        bundle.write_bundle(tmp_path / "new" / name)
    assert (tmp_path / "new/a.mcpb").read_bytes() == (tmp_path / "new/b.mcpb").read_bytes()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.mcpb", "b.mcpb"]


def test_a_file_that_no_app_would_open_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle.main([str(tmp_path / "podpipe.zip")]) == 1
    assert "let it end with .mcpb" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert bundle.main([str(tmp_path / "file" / "podpipe.mcpb")]) == 1
    assert f"{tmp_path}/file/podpipe.mcpb" in capsys.readouterr().err
