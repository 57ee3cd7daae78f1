"""The .mcpb bundle by its format's own tools, and a real cluster through what they make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from host_client.local import bundle
from tests.cluster.conftest import ROOT, Cluster, does_the_main_job
from tests.node import installed, node

BOUND = 120
MCPB = "@anthropic-ai/mcpb@2.1.2"

SUBSTITUTE = """\
import fs from 'node:fs';
const [library, extensionPath, home, answers] = process.argv.slice(2);
const { getMcpConfigForManifest } = await import(library);
console.log(JSON.stringify(await getMcpConfigForManifest({
  manifest: JSON.parse(fs.readFileSync(`${extensionPath}/manifest.json`)),
  extensionPath,
  systemDirs: { HOME: home },
  userConfig: JSON.parse(answers),
  pathSeparator: '/',
})));
"""
"""What Claude Desktop does with a manifest and the user's answers, by the format's own library."""


def ran(*argv: str | Path) -> str:
    """What a Node program prints."""
    done = subprocess.run(
        [node(), *map(str, argv)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    """The bundle, found valid and unpacked by the format's own tools."""
    mcpb = installed(MCPB) / "dist/cli/cli.js"
    file, folder = tmp_path / "podpipe.mcpb", tmp_path / "extension"
    bundle.write_bundle(file)
    ran(mcpb, "unpack", file, folder)
    assert "passes" in ran(mcpb, "validate", folder / "manifest.json")
    assert "podpipe" in ran(mcpb, "info", file)
    assert "Output" in ran(mcpb, "pack", folder, tmp_path / "again.mcpb")
    return folder


@pytest.fixture
def desktop(extension: Path, cluster: Cluster, user: str, tmp_path: Path) -> StdioServerParameters:
    """As the app starts the extension, with what a person answered."""
    kubectl = Path(cluster.environment["PODPIPE_KUBECTL"])
    answers = {
        "user": user,
        "kubeconfig": cluster.environment["KUBECONFIG"],
        "context": cluster.environment["PODPIPE_CONTEXT"],
        "namespace": cluster.namespace,
        "image": cluster.settings().image,
        "path": f"{kubectl.parent}:/usr/bin:/bin",
    }
    script = tmp_path / "substitute.mjs"
    script.write_text(SUBSTITUTE, encoding="utf-8")
    library = installed(MCPB) / "dist/index.js"
    made = ran(script, library, extension, tmp_path, json.dumps(answers))
    assert "${" not in made
    config: dict[str, Any] = json.loads(made)
    # The packages that uv would fetch are those of this environment.
    offline = {"UV_OFFLINE": "1", "UV_NO_SYNC": "1", "UV_PROJECT_ENVIRONMENT": sys.prefix}
    return StdioServerParameters(
        command=str(Path(sys.prefix) / "bin" / config["command"]),
        args=config["args"],
        cwd="/",
        env=config["env"] | offline | {"HOME": str(tmp_path)},
    )


async def test_the_bundle_does_the_main_job_as_the_app_starts_it(
    desktop: StdioServerParameters,
) -> None:
    with anyio.fail_after(BOUND):
        await does_the_main_job(desktop)


async def test_two_servers_bound_to_one_absent_name_make_one_sandbox(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "host_client", "serve", "--sandbox", "lasting"],
        env={
            **cluster.environment,
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PODPIPE_USER": user,
            "PYTHONPATH": str(ROOT),
        },
    )
    outputs: list[str] = []
    with anyio.fail_after(BOUND):
        async with Client(server) as first, Client(server) as second:

            async def call(client: Client, number: int) -> None:
                command = {"command": f"echo {number} $HOSTNAME"}
                answer = await client.call_tool("run_command", command)
                assert answer.structured_content, answer.content
                outputs.append(answer.structured_content["stdout"])

            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(call, (first, second)[number % 2], number)
            assert not (await second.call_tool("destroy_sandbox", {})).is_error
    assert sorted(line.split()[0] for line in outputs) == list("012345")
    assert len({line.split()[1] for line in outputs}) == 1, "one pod"
