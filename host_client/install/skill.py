"""An agent skill for podpipe: SKILL.md and the mcp-config.json that it speaks of.

The format is that of agentskills.io: a folder of the skill's name, whose SKILL.md begins with a YAML
front matter of `name` and `description`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mcp.types import Tool

from host_client.errors import UsageError
from host_client.install.entry import Entry
from host_client.install.files import Change, write_text

TEXT = """\
---
name: {name}
description: Run code, shell commands and servers in an isolated Linux sandbox on Kubernetes, with a
  durable home for files. Use when a task needs to execute untrusted or generated code, install
  packages, build, test, or keep a process running without touching the user's machine.
compatibility: Needs the MCP server of mcp-config.json, kubectl, and a Kubernetes that it reaches.
---

# Sandboxes on Kubernetes

The tools below come from the MCP server `{name}`. If your client does not have them, add the entry of
`mcp-config.json` in this folder to its MCP servers.

{instructions}
## Workflow

1. {first}
2. `run_command` for what ends, `start_background` and `read_output` for servers and long jobs. A command
   that is still running after 45 seconds goes on under its `process_id`.
3. `write_file`, `edit_file`, `read_file`, `search_files` for files in the home; `upload_file` and
   `download_file` for whole folders of the user's machine, below the folders that the user allows.
4. `suspend_sandbox` where the work goes on later, `destroy_sandbox` where it is done. Files in the home
   outlive both; processes and everything outside the home do not.

## Tools

{tools}

## When something goes wrong

- Every refusal says what happened and the next step; do that rather than trying the same call again.
- "starting" is no failure: call again to go on waiting.
- "may have run" means that the answer was lost, not the work: look before you repeat it.
- A non-zero exit code is a result. Read stderr.
"""

UNBOUND = "`create_sandbox` once; keep its `sandbox_id`. With a `name` it is found again later."
BOUND = "Leave `sandbox_id` out: the sandbox is made when first used, and stays."


def write_skill(
    folder: Path,
    name: str,
    entry: Entry,
    instructions: str,
    tools: Sequence[Tool],
    *,
    write: bool = True,
) -> list[Change]:
    """Write the skill into `folder`/`name`.

    Args:
        folder: the skills folder of an agent, such as ~/.claude/skills.
        name: of skill and server.
        entry: how the server is started.
        instructions: what it tells every client.
        tools: what it offers.
        write: False to only say what would be done.

    Raises:
        UsageError: no skill can have that name.
        PodpipeError: a file cannot be written.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UsageError(
            f"--name {name!r} is no skill's name: lower-case letters, digits and single '-'"
        )
    rows = [f"- `{tool.name}`: {_first_sentence(tool.description or '')}" for tool in tools]
    first = BOUND if "--sandbox" in entry.args else UNBOUND
    text = TEXT.format(name=name, first=first, instructions=instructions, tools="\n".join(rows))
    config = json.dumps({"mcpServers": {name: entry.to_json()}}, indent=2) + "\n"
    target = folder / name
    return [
        write_text(target / "SKILL.md", text, write=write),
        write_text(target / "mcp-config.json", config, write=write),
    ]


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].split()).rstrip(";.")
