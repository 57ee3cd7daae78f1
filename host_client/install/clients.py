"""Where each MCP client keeps its servers, and how podpipe is put among them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomlkit

from host_client.config import Settings
from host_client.errors import PodpipeError
from host_client.install.entry import Entry, ours
from host_client.install.files import Change, Mutate, State, change_json, change_toml

Client = Literal["claude-desktop", "claude-code", "codex"]
Scope = Literal["user", "project"]

CLAUDE_SECONDS = 60.0

NEXT_STEPS: Mapping[Client, str] = {
    "claude-desktop": "quit Claude Desktop fully (not only its window) and start it again",
    "claude-code": "start claude again; `claude mcp list` shows whether it connects",
    "codex": "start codex again; `codex mcp list` shows it",
}


def config_file(client: Client, settings: Settings, scope: Scope = "user") -> Path:
    """Where the client reads its servers.

    Args:
        client: which.
        settings: their environment says where configurations are.
        scope: for Claude Code: every project of the user, or the one in this folder.
    """
    env = settings.environment
    home = Path(env.get("HOME") or Path.home())
    if client == "codex":
        return Path(env.get("CODEX_HOME") or home / ".codex") / "config.toml"
    if client == "claude-code":
        if scope == "project":
            return Path.cwd() / ".mcp.json"
        return Path(env.get("CLAUDE_CONFIG_DIR") or home) / ".claude.json"
    if sys.platform == "darwin":
        folder = home / "Library" / "Application Support"
    else:
        folder = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    return folder / "Claude" / "claude_desktop_config.json"


def snippet(client: Client, name: str, entry: Entry) -> str:
    """The entry as a person would paste it into the client's file."""
    if client == "codex":
        return tomlkit.dumps({"mcp_servers": {name: entry.to_json()}}).rstrip("\n")
    return json.dumps({"mcpServers": {name: entry.to_json()}}, indent=2)


def put_in(
    client: Client,
    name: str,
    entry: Entry | None,
    path: Path,
    *,
    write: bool = True,
    claude: str = "",
) -> Change:
    """Put an entry into a client's configuration, or take it out.

    Args:
        client: whose configuration it is.
        name: of the server in it.
        entry: how it is started; None to take it out.
        path: the file.
        write: False to only say what would be done.
        claude: path of Claude Code's own command, which then does the writing.

    Raises:
        PodpipeError: the file cannot be changed without harm; it was left as it was.
    """
    if client == "codex":
        return change_toml(path, _mutation("mcp_servers", name, entry, {}), write=write)
    kind = {"type": "stdio"} if client == "claude-code" else {}
    mutate = _mutation("mcpServers", name, entry, kind)
    if not claude:
        return change_json(path, mutate, write=write)
    planned = change_json(path, mutate, write=False)
    if write and planned.state != "unchanged":
        _by_claude(claude, name, mutate, planned.state, path)
    return planned


def find_claude(settings: Settings) -> str:
    """Claude Code's own command; empty where it is not on PATH."""
    return shutil.which("claude", path=settings.environment.get("PATH")) or ""


def _mutation(servers_key: str, name: str, entry: Entry | None, extra: Mapping[str, Any]) -> Mutate:
    def mutate(document: dict[str, Any]) -> State:
        servers = document.setdefault(servers_key, {}) if entry else document.get(servers_key, {})
        if not isinstance(servers, dict) or not isinstance(servers.get(name, {}), dict):
            raise PodpipeError(
                f"the configuration's {servers_key} is no table of servers; it was left as it is"
            )
        old = servers.get(name)
        if entry is None:
            if old is None:
                return "unchanged"
            del servers[name]
            return "removed"
        if old is None:
            servers[name] = {**extra, **entry.to_json()}
            return "added"
        new = _merged(old, entry, extra)
        if new == old:
            return "unchanged"
        for key, value in new.items():
            if old.get(key) != value:
                old[key] = value
        return "updated"

    return mutate


def _merged(old: Mapping[str, Any], entry: Entry, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The old entry with ours in it: what a person added to it stays."""
    env = old.get("env", {})
    foreign = {k: v for k, v in env.items() if k not in ours(env)} if isinstance(env, dict) else {}
    return {**old, **extra, **entry.to_json(), "env": {**foreign, **entry.env}}


def _by_claude(claude: str, name: str, mutate: Mutate, state: State, path: Path) -> None:
    """Have Claude Code change its user configuration, which a running one writes at any time.

    It has no way to replace an entry, so an old one is taken out first, and put back where the new
    one is refused.
    """
    document = json.loads(path.read_text("utf-8-sig") or "{}") if path.is_file() else {}
    old = json.dumps(document.get("mcpServers", {}).get(name))
    mutate(document)
    new = json.dumps(document.get("mcpServers", {}).get(name))
    if state in ("updated", "removed"):
        _claude(claude, "remove", name, "--scope", "user")
    if state in ("added", "updated"):
        try:
            _claude(claude, "add-json", name, new, "--scope", "user")
        except PodpipeError:
            if state == "updated":
                _claude(claude, "add-json", name, old, "--scope", "user")
            raise


def _claude(claude: str, *argv: str) -> None:
    shown = f"`claude mcp {argv[0]} {argv[1]}`"
    try:
        done = subprocess.run(
            [claude, "mcp", *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLAUDE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PodpipeError(f"{shown} failed: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise PodpipeError(f"{shown} failed with exit code {done.returncode}: {said}")
