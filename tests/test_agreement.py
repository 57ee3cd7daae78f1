"""What two files must agree on: imports, README, tool lists, scripts."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from host_client.cli import _parser
from host_client.config import SETTINGS_HELP, Settings
from host_client.host import Host
from host_client.server import build_server

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("host_client"), ids=str)
def test_the_host_knows_only_contract_and_wire_of_the_pod(path: Path) -> None:
    """Both ends speak MCP over the same connection, and pass bytes on; nothing else of the pod is the host's."""
    foreign = {name for name in imports(path) if name.split(".")[0] == "in_pod_server"}
    wire = ("connection", "contract", "lines", "splice", "streams")
    allowed = tuple(f"in_pod_server.{name}" for name in wire)
    assert {name for name in foreign if not name.startswith(allowed)} <= {
        "in_pod_server"  # `from in_pod_server import contract`
    }


def test_imports_go_one_way() -> None:
    """Those for types and those within functions too: what needs each other is one thing."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("host_client", "in_pod_server")
        for path in python_files(package)
    }
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    # `from package import module` names both; that the package is there at all is no need of its.
    needs = {name: (imports(path) & files.keys()) - packages for name, path in files.items()}
    tuple(graphlib.TopologicalSorter(needs).static_order())  # CycleError names those in a circle


@pytest.mark.parametrize("path", python_files("in_pod_server"), ids=str)
def test_the_pod_knows_nothing_of_the_host(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("host_client", "sh")}


def test_the_contract_and_dial_need_only_the_standard_library() -> None:
    for name in ("contract", "dial"):
        roots = {module.split(".")[0] for module in imports(ROOT / f"in_pod_server/{name}.py")}
        assert roots <= set(sys.stdlib_module_names)
    assert not any("in_pod_server" in m for m in imports(ROOT / "in_pod_server/dial.py"))


def test_only_kubectl_runs_sh() -> None:
    users = {path.name for path in python_files("host_client") if "sh" in imports(path)}
    assert users == {"kubectl.py"}


def test_only_the_settings_read_the_environment() -> None:
    """`local` serves scripts, with variables of its own."""
    readers = {
        path.name
        for path in python_files("host_client")
        if "local" not in path.parts and re.search(r"os\.(environ|getenv)", path.read_text("utf-8"))
    }
    assert readers == {"config.py"}


def table(heading: str) -> list[list[str]]:
    """The rows of the tables of a section of the README, without their heads."""
    section = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    return [row for row in rows if row[0].startswith("`")]


def test_the_readme_names_every_setting_with_its_default() -> None:
    rows = {
        row[0].strip("`"): (row[1].strip("`") if len(row) == 3 else "", row[-1])
        for row in table("Settings")
    }
    assert rows == dict(SETTINGS_HELP)


def test_the_readme_names_every_command() -> None:
    (commands,) = [a for a in _parser()._actions if a.dest == "name"]
    assert commands.choices
    named = [row[0].strip("`") for row in table("Commands")]
    assert [n for n in named if n.startswith("podpipe ")] == [
        f"podpipe {name}" for name in commands.choices
    ]
    scripts = {f"scripts/{p.name}" for p in (ROOT / "scripts").iterdir() if p.suffix != ".sh"}
    assert scripts == {name for name in named if name.startswith("scripts/")}


async def test_the_readme_names_every_tool_in_order() -> None:
    server = build_server(Host(Settings(toolsets=("default", "blobs"))))
    served = [tool.name for tool in await server.list_tools()]
    assert [row[0].strip("`") for row in table("Tools")] == served


def test_tools_json_is_what_the_daemon_offers() -> None:
    written = subprocess.run(
        [sys.executable, "-m", "in_pod_server", "tools"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept = (ROOT / "in_pod_server/tools.json").read_text(encoding="utf-8")
    assert json.loads(written.stdout) == json.loads(kept)


def test_a_wheel_holds_every_module_template_and_list(tmp_path: Path) -> None:
    """What works only in a checkout is not installed."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path),
         str(_copy(tmp_path / "source"))],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {
        str(path.relative_to(ROOT))
        for package in ("host_client", "in_pod_server", "manifests")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".json", ".j2")
    }


def _copy(target: Path) -> Path:
    """The tracked sources, so that the build writes nothing into the checkout."""
    for name in ("host_client", "in_pod_server", "manifests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


def test_every_script_shows_an_example_or_says_what_it_is() -> None:
    for path in (ROOT / "scripts").iterdir():
        if path.suffix != ".sh":
            assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
