"""`podpipe install`: other programs' files are changed without harm, and what is in them starts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import skills_ref
from mcp import Client, StdioServerParameters

from host_client.cli import _parser
from host_client.errors import PodpipeError, UsageError
from host_client.install.clients import config_file, put_in
from host_client.install.entry import Entry, checked_name, client_entry
from host_client.install.files import BACKUP_SUFFIX, change_json
from tests.host_client.conftest import Podpipe, StubCluster

BOUND = 60
ENTRY = Entry("/p/bin/podpipe", ("serve",), {"PODPIPE_USER": "alice", "NAMESPACE": "n"})
DESKTOP = ".config/Claude/claude_desktop_config.json"


@pytest.fixture
def podpipe(stub: StubCluster) -> Podpipe:
    return Podpipe(stub)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "client" / "config.json"


def desktop(path: Path, entry: Entry | None = ENTRY) -> str:
    return put_in("claude-desktop", "podpipe", entry, path).state


def given(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- what is written ---------------------------------------------------------------------------


def test_the_entry_holds_all_that_a_client_starts_without(stub: StubCluster) -> None:
    (stub.folder / ".env").write_text("DEFAULT_TTL_MINUTES=90\n", encoding="utf-8")
    settings = stub.settings(PODPIPE_CONTEXT="stub", AWS_PROFILE="dev")
    entry = client_entry(settings, "work")
    assert Path(entry.command).is_absolute()
    assert entry.args == ("serve", "--sandbox", "work")
    assert entry.env["KUBECONFIG"] == str(stub.kubeconfig)
    assert entry.env["PODPIPE_CONTEXT"] == "stub"
    assert entry.env["NAMESPACE"] == "sandbox-system"
    assert entry.env["PODPIPE_USER"] == "alice"
    assert entry.env["DEFAULT_TTL_MINUTES"] == "90", "a client starts it where no .env is"
    assert entry.env["AWS_PROFILE"] == "dev"
    assert "STUB_DIR" not in entry.env
    assert all(Path(folder).is_absolute() for folder in entry.env["PATH"].split(":"))


def test_the_path_leads_to_every_credential_plugin_of_the_caller(
    stub: StubCluster, tmp_path: Path
) -> None:
    for folder, program in (("a", "corp-login"), ("b", "aws"), ("c", "unrelated")):
        file = tmp_path / folder / program
        file.parent.mkdir()
        file.write_text("#!/bin/sh\n", encoding="utf-8")
        file.chmod(0o755)
    config = json.loads(stub.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"exec": {"command": "corp-login"}}
    stub.kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    caller = f"{tmp_path}/c:relative:{tmp_path}/b:{tmp_path}/a:/usr/bin"
    entry = client_entry(stub.settings(PATH=caller))
    folders = entry.env["PATH"].split(":")
    assert folders[:2] == [f"{tmp_path}/b", f"{tmp_path}/a"]
    assert not {f"{tmp_path}/c", "relative"} & set(folders)
    assert entry.warnings == ()


def test_a_plugin_that_is_missing_and_a_secret_of_the_shell_are_told_and_not_written(
    stub: StubCluster,
) -> None:
    config = json.loads(stub.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"exec": {"command": "corp-login"}}
    stub.kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    entry = client_entry(
        stub.settings(AWS_SECRET_ACCESS_KEY="hunter2", HTTPS_PROXY="http://me:hunter2@proxy:1")
    )
    assert "hunter2" not in json.dumps(entry.to_json())
    assert "hunter2" not in str(entry.warnings)
    assert [word in " ".join(entry.warnings) for word in ("corp-login", "AWS_SECRET", "PROXY")] == [
        True, True, True,
    ]  # fmt: skip


async def test_what_is_installed_starts_with_nothing_but_itself(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    assert podpipe("install", "claude-desktop", "--sandbox", "work").returncode == 0
    written = json.loads((stub.folder / DESKTOP).read_text(encoding="utf-8"))
    server = written["mcpServers"]["podpipe"]
    with anyio.fail_after(BOUND):
        async with Client(
            StdioServerParameters(
                command=server["command"],
                args=server["args"],
                cwd="/",
                env=server["env"] | {"HOME": str(stub.folder), "STUB_DIR": str(stub.folder)},
            )
        ) as client:
            ran = await client.call_tool("run_command", {"command": "echo hello"})
    assert ran.structured_content
    assert ran.structured_content["stdout"] == "hello\n"


# --- into which file ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "client", "environment", "path"),
    [
        ("linux", "claude-desktop", {}, ".config/Claude/claude_desktop_config.json"),
        (
            "linux",
            "claude-desktop",
            {"XDG_CONFIG_HOME": "x"},
            "x/Claude/claude_desktop_config.json",
        ),
        (
            "darwin",
            "claude-desktop",
            {},
            "Library/Application Support/Claude/claude_desktop_config.json",
        ),
        ("linux", "claude-code", {}, ".claude.json"),
        ("linux", "claude-code", {"CLAUDE_CONFIG_DIR": "c"}, "c/.claude.json"),
        ("darwin", "codex", {}, ".codex/config.toml"),
        ("linux", "codex", {"CODEX_HOME": "c"}, "c/config.toml"),
    ],
)
def test_each_client_has_its_file(
    stub: StubCluster,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    client: Any,
    environment: dict[str, str],
    path: str,
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    absolute = {name: str(stub.folder / folder) for name, folder in environment.items()}
    assert config_file(client, stub.settings(**absolute)) == stub.folder / path


# --- without harm ------------------------------------------------------------------------------


def test_a_file_and_folder_that_are_not_there_are_made(path: Path) -> None:
    assert desktop(path) == "added"
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "mcpServers": {"podpipe": ENTRY.to_json()}
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", " \n", "{}", '{"mcpServers": {}}'])
def test_an_empty_file_is_filled(path: Path, text: str) -> None:
    assert desktop(given(path, text)) == "added"
    assert "podpipe" in json.loads(path.read_text(encoding="utf-8"))["mcpServers"]


OTHERS = """{
    "theme": "dark",
    "mcpServers": {
        "z-first": {"command": "/z", "args": ["-x"], "env": {"TOKEN": "s3cret"}},
        "a-second": {"url": "https://example.com", "unknown": [1, 2.50, null, "é\\ud800"]}
    },
    "globalShortcut": ""
}"""


def test_what_others_have_in_the_file_stays_in_its_order(path: Path) -> None:
    assert desktop(given(path, OTHERS)) == "added"
    text = path.read_text(encoding="utf-8")
    after, before = json.loads(text), json.loads(OTHERS)
    assert list(after) == list(before)
    assert list(after["mcpServers"]) == ["z-first", "a-second", "podpipe"]
    del after["mcpServers"]["podpipe"]
    assert after == before
    assert text.startswith('{\n    "theme"'), "the file's own indentation"
    assert not text.endswith("\n")


def test_what_was_there_is_kept_beside_it(path: Path) -> None:
    given(path, OTHERS).chmod(0o640)
    change = put_in("claude-desktop", "podpipe", ENTRY, path)
    backup = path.with_name(path.name + BACKUP_SUFFIX)
    assert change.backup == backup
    assert backup.read_text(encoding="utf-8") == OTHERS
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, backup)} == {0o640}


def test_a_second_time_changes_nothing(path: Path) -> None:
    desktop(path)
    before = path.stat()
    assert desktop(path) == "unchanged"
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_another_entry_replaces_ours_and_keeps_what_a_person_added(path: Path) -> None:
    desktop(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["mcpServers"]["podpipe"] |= {"disabled": True}
    content["mcpServers"]["podpipe"]["env"] |= {"MINE": "1", "DEFAULT_TTL_MINUTES": "5"}
    given(path, json.dumps(content))
    assert desktop(path, Entry("/new/podpipe", ("serve",), {"PODPIPE_USER": "bob"})) == "updated"
    assert json.loads(path.read_text(encoding="utf-8"))["mcpServers"]["podpipe"] == {
        "command": "/new/podpipe",
        "args": ["serve"],
        "env": {"MINE": "1", "PODPIPE_USER": "bob"},
        "disabled": True,
    }


def test_taking_it_out_leaves_the_rest(path: Path) -> None:
    desktop(given(path, OTHERS))
    assert desktop(path, None) == "removed"
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(OTHERS)
    assert desktop(path, None) == "unchanged"


def test_taking_it_out_of_nothing_makes_nothing(path: Path) -> None:
    assert desktop(path, None) == "unchanged"
    assert not path.parent.exists()


def test_a_byte_order_mark_and_line_ends_stay(path: Path) -> None:
    given(path, b'\xef\xbb\xbf{\r\n\t"a": 1\r\n}\r\n')
    desktop(path)
    raw = path.read_bytes()
    assert raw.startswith(b'\xef\xbb\xbf{\r\n\t"a": 1,\r\n')
    assert raw.count(b"\n") == raw.count(b"\r\n")
    assert json.loads(raw.decode("utf-8-sig"))["a"] == 1


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}", encoding="utf-8")
    path.parent.mkdir()
    path.symlink_to(real)
    assert desktop(path) == "added"
    assert path.is_symlink()
    assert "podpipe" in real.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "a": 1,\n}', r"config\.json:3:1: not valid JSON"),
        (b'{"mcpServers": {}} // mine', r"config\.json:1:20: not valid JSON"),
        (b"[]", r"config\.json:1: not a JSON object"),
        (b'{"mcpServers": []}', "no table of servers"),
        (b'{"mcpServers": {"podpipe": 1}}', "no table of servers"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": 1e999}', "too large"),
        (b'{\n"a": "\xff"}', r"config\.json:2: not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_kept_whole_is_refused_and_untouched(
    path: Path, content: bytes, message: str
) -> None:
    given(path, content)
    with pytest.raises(PodpipeError, match=message):
        desktop(path)
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_read_only_file_is_refused_and_told(path: Path) -> None:
    given(path, "{}").chmod(0o444)
    with pytest.raises(PodpipeError, match="is read-only; it was left as it is"):
        desktop(path)
    assert path.read_text(encoding="utf-8") == "{}"


def test_what_is_no_file_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(PodpipeError, match="is not a file"):
        desktop(path)
    os.mkfifo(path / "fifo")
    with pytest.raises(PodpipeError, match="is not a file"):
        desktop(path / "fifo")
    (path / "loop").symlink_to("loop")
    with pytest.raises(PodpipeError, match="loop"):
        desktop(path / "loop")


def test_a_disk_that_is_full_leaves_the_file_and_nothing_half_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(path, OTHERS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PodpipeError, match=r"No space left on device; it was left as it is"):
        desktop(path)
    assert path.read_text(encoding="utf-8") == OTHERS
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_that_changes_meanwhile_is_not_overwritten(path: Path) -> None:
    given(path, "{}")

    def mutate(document: dict[str, Any]) -> Any:
        path.write_text('{"theirs": 1}', encoding="utf-8")
        document["ours"] = 1
        return "added"

    with pytest.raises(PodpipeError, match="changed by somebody else"):
        change_json(path, mutate)
    assert path.read_text(encoding="utf-8") == '{"theirs": 1}'


@pytest.mark.parametrize("before", ["", OTHERS])
def test_installs_at_once_lose_no_entry(path: Path, before: str) -> None:
    names = [f"n{number}" for number in range(8)]
    for _ in range(5):
        given(path, before)
        if not before:
            path.unlink()
        with ThreadPoolExecutor(len(names)) as threads:
            states = threads.map(lambda n: put_in("claude-desktop", n, ENTRY, path).state, names)
            assert set(states) == {"added"}
        assert set(names) <= set(json.loads(path.read_text(encoding="utf-8"))["mcpServers"])


# --- Codex -------------------------------------------------------------------------------------

CODEX = """\
# my settings
model = "o3"   # the good one

[mcp_servers.other]
command = "/o"

[mcp_servers.other.env]
TOKEN = 's3cret'

[profiles.fast]
model = "mini"
"""


@pytest.mark.parametrize(
    "before",
    ["", CODEX, 'mcp_servers = {other = {command = "/o"}}\n', "mcp_servers.other.command = '/o'\n",
     "[mcp_servers]\n", "[a]\nx=1\n[mcp_servers.b]\ncommand='/b'\n[c]\n[mcp_servers.d]\ncommand='/d'\n"],
)  # fmt: skip
def test_codex_keeps_comments_and_everybody_elses_tables(tmp_path: Path, before: str) -> None:
    path = given(tmp_path / "config.toml", before)
    assert put_in("codex", "podpipe", ENTRY, path).state == "added"
    text = path.read_text(encoding="utf-8")
    after = tomllib.loads(text)
    assert after["mcp_servers"].pop("podpipe") == ENTRY.to_json()
    expected = tomllib.loads(before)
    expected.setdefault("mcp_servers", {})
    assert after == expected
    assert all(line in text for line in before.splitlines() if line.startswith(("#", "model")))
    assert put_in("codex", "podpipe", ENTRY, path).state == "unchanged"
    assert put_in("codex", "podpipe", None, path).state == "removed"
    assert (
        tomllib.loads(path.read_text(encoding="utf-8")).get("mcp_servers", {})
        == (expected["mcp_servers"])
    )


def test_codex_keeps_what_a_person_added_to_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    put_in("codex", "podpipe", ENTRY, path)
    text = path.read_text(encoding="utf-8")
    place = "[mcp_servers.podpipe]\n"
    given(path, text.replace(place, f"{place}tool_timeout_sec = 90 # slow\n"))
    entry = Entry("/new", ENTRY.args, ENTRY.env)
    assert put_in("codex", "podpipe", entry, path).state == "updated"
    assert "tool_timeout_sec = 90 # slow\n" in path.read_text(encoding="utf-8")
    assert tomllib.loads(path.read_text("utf-8"))["mcp_servers"]["podpipe"]["command"] == "/new"


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("a = 1\nb = \n", r"config\.toml:2: not valid TOML"),
        ("a = 1\na = 2\n", "not valid TOML"),
        ("mcp_servers = 1\n", "no table of servers"),
    ],
)
def test_codex_file_that_does_not_parse_is_untouched(
    tmp_path: Path, before: str, message: str
) -> None:
    path = given(tmp_path / "config.toml", before)
    with pytest.raises(PodpipeError, match=message):
        put_in("codex", "podpipe", ENTRY, path)
    assert path.read_text(encoding="utf-8") == before


# --- Claude Code -------------------------------------------------------------------------------

CLAUDE = """#!{python}
import json, pathlib, sys
path = pathlib.Path({folder!r}, ".claude.json")
content = json.loads(path.read_text()) if path.exists() else {{}}
servers = content.setdefault("mcpServers", {{}})
_, verb, name, *rest = sys.argv[1:]
if verb == "add-json" and (name in servers or "refuse" in rest[0]):
    sys.exit("MCP server already exists")
if verb == "add-json":
    servers[name] = json.loads(rest[0])
else:
    del servers[name]
path.write_text(json.dumps(content))
with open({folder!r} + "/verbs", "a") as log:
    log.write(verb + " ")
"""


@pytest.fixture
def claude(tmp_path: Path) -> Path:
    """Claude Code's own command as far as it is used, in an empty folder of its own."""
    command = tmp_path / "bin" / "claude"
    command.parent.mkdir()
    command.write_text(CLAUDE.format(python=sys.executable, folder=str(tmp_path)), "utf-8")
    command.chmod(0o755)
    return command


def code(path: Path, claude: Path, entry: Entry | None) -> str:
    return put_in("claude-code", "podpipe", entry, path, claude=str(claude)).state


def test_claude_code_changes_its_own_configuration(tmp_path: Path, claude: Path) -> None:
    path = tmp_path / ".claude.json"
    assert code(path, claude, ENTRY) == "added"
    written = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]["podpipe"]
    assert written == {"type": "stdio", **ENTRY.to_json()}
    assert code(path, claude, ENTRY) == "unchanged"
    assert code(path, claude, Entry("/new", (), {})) == "updated"
    assert code(path, claude, None) == "removed"
    assert code(path, claude, None) == "unchanged"
    verbs = (tmp_path / "verbs").read_text(encoding="utf-8").split()
    assert verbs == ["add-json", "remove", "add-json", "remove"]


def test_an_entry_that_claude_code_refuses_leaves_the_old_one(tmp_path: Path, claude: Path) -> None:
    path = tmp_path / ".claude.json"
    code(path, claude, ENTRY)
    before = path.read_text(encoding="utf-8")
    with pytest.raises(PodpipeError, match=r"add-json podpipe` failed with exit code 1: MCP"):
        code(path, claude, Entry("/refuse", (), {}))
    assert path.read_text(encoding="utf-8") == before


def test_claude_code_without_its_command_or_for_a_project_is_a_file(
    podpipe: Podpipe, stub: StubCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    for scope, file in (("user", tmp_path / ".claude.json"), ("project", Path(".mcp.json"))):
        ran = podpipe("install", "claude-code", "--scope", scope, PATH="/usr/bin:/bin")
        assert ran.returncode == 0, ran.stderr
        written = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]["podpipe"]
        assert written["type"] == "stdio"


# --- skill -------------------------------------------------------------------------------------


def test_the_skill_is_valid_by_its_format_and_names_every_tool(
    podpipe: Podpipe, tmp_path: Path
) -> None:
    ran = podpipe("install", "skill", str(tmp_path / "skills"), "--name", "team-sandboxes")
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "skills" / "team-sandboxes"
    text = (folder / "SKILL.md").read_text(encoding="utf-8")
    assert skills_ref.validate(folder) == []
    for tool in ("create_sandbox", "run_command", "upload_file", "delete_file"):
        assert f"- `{tool}`: " in text
    config = json.loads((folder / "mcp-config.json").read_text(encoding="utf-8"))
    assert config["mcpServers"]["team-sandboxes"]["args"] == ["serve"]
    again = podpipe("install", "skill", str(tmp_path / "skills"), "--name", "team-sandboxes")
    assert again.stdout.count("unchanged: ") == 2


def test_a_skill_for_a_bound_server_sends_nobody_to_create_one(
    podpipe: Podpipe, tmp_path: Path
) -> None:
    assert podpipe("install", "skill", str(tmp_path), "--sandbox", "work").returncode == 0
    text = (tmp_path / "podpipe" / "SKILL.md").read_text(encoding="utf-8")
    assert "1. Leave `sandbox_id` out" in text
    assert "`create_sandbox` once" not in text


def test_a_name_that_is_no_skills_name_is_refused(podpipe: Podpipe, tmp_path: Path) -> None:
    ran = podpipe("install", "skill", str(tmp_path / "skills"), "--name", "Team_1")
    assert ran.returncode == 2
    assert not (tmp_path / "skills").exists()


# --- the command -------------------------------------------------------------------------------


def test_a_dry_run_and_print_touch_nothing(podpipe: Podpipe, stub: StubCluster) -> None:
    dry = podpipe("install", "claude-desktop", "--dry-run")
    assert (dry.returncode, "would be added" in dry.stdout) == (0, True)
    printed = podpipe("install", "claude-desktop", "--print", "--name", "mine")
    assert json.loads(printed.stdout)["mcpServers"]["mine"]["args"] == ["serve"]
    as_json = podpipe("install", "codex", "--print", "--json")
    assert json.loads(as_json.stdout)["args"] == ["serve"]
    toml = podpipe("install", "codex", "--print")
    assert tomllib.loads(toml.stdout)["mcp_servers"]["podpipe"]["env"]["PODPIPE_USER"] == "alice"
    assert not (stub.folder / ".config").exists()
    assert not (stub.folder / ".codex").exists()


def test_an_install_says_what_it_did_and_what_to_do_next(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    first = podpipe("install", "claude-desktop")
    assert first.stdout.startswith(f"added: podpipe in {stub.folder / DESKTOP}\n")
    assert "next: quit Claude Desktop fully" in first.stdout
    second = podpipe("install", "claude-desktop")
    assert second.stdout.startswith("unchanged: ")
    assert "next:" not in second.stdout
    facts = json.loads(podpipe("install", "claude-desktop", "--uninstall", "--json").stdout)
    assert (facts["change"], facts["written"], facts["client"]) == (
        "removed", True, "claude-desktop",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "environment", "code"),
    [
        (["claude-desktop"], {"KUBECONFIG": "/nonexistent"}, 4),
        (["claude-desktop", "--name", "no/slash"], {}, 2),
        (["claude-desktop", "--sandbox", "Bad Name"], {}, 2),
        (["nonesuch"], {}, 2),
        (["claude-desktop", "--print", "--uninstall"], {}, 2),
    ],
)
def test_what_makes_no_sense_is_refused_and_writes_nothing(
    podpipe: Podpipe, stub: StubCluster, argv: list[str], environment: dict[str, str], code: int
) -> None:
    ran = podpipe("install", *argv, **environment)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr
    assert not (stub.folder / ".config").exists()


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 33, "-", "a/b"])
def test_a_name_that_some_client_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not usable"):
        checked_name(name)


def test_every_client_has_help_with_an_example() -> None:
    commands = next(a for a in _parser()._actions if a.dest == "name")
    assert commands.choices
    kinds = next(a for a in dict(commands.choices)["install"]._actions if a.dest == "client")
    assert kinds.choices
    for name, kind in dict(kinds.choices).items():
        assert f"example:\n  podpipe install {name}" in kind.format_help()


def test_the_entry_runs_a_command_that_is_there(stub: StubCluster) -> None:
    version = subprocess.run(
        [client_entry(stub.settings()).command, "--version"], capture_output=True, check=True
    )
    assert version.stdout.startswith(b"podpipe ")
