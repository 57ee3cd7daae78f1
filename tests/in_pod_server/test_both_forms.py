"""Some clients show a model only the text of a result, others only its data: neither lacks anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tests.in_pod_server.support import Sandbox, data_of, text_of

SCRIPT: Final = "cat <<< out; echo err >&2; sleep 1000 > /dev/null 2>&1 & exit 3"
CALLS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("run_command", {"command": SCRIPT}),
    ("run_command", {"command": "sleep 1000", "timeout_seconds": 0.1}),
    ("run_command", {"command": "kill -9 $$"}),
    ("start_background", {"command": "echo bg; sleep 1000", "log_file": "bg.log"}),
    ("list_processes", {}),
    ("read_output", {"process_id": "p1", "wait_seconds": 0}),
    ("read_output", {"process_id": "p1", "pattern": "nope", "wait_seconds": 0}),
    ("start_background", {"command": "cat", "stdin": "open"}),
    ("send_input", {"process_id": "p5", "content": "typed\n"}),
    ("stop_process", {"process_id": "p4"}),
    ("write_file", {"path": "d/f", "content": "one\ntwo\none\n"}),
    ("read_file", {"path": "d/f"}),
    ("read_file", {"path": "d/f", "offset": 4, "max_bytes": 16}),
    ("read_file", {"path": "d/f", "tail_lines": 1}),
    ("edit_file", {"path": "d/f", "old_text": "two", "new_text": "2"}),
    ("list_files", {"path": "d"}),
    ("search_files", {"pattern": "one"}),
    ("file_info", {"path": "d/f", "sha256": True}),
    ("move_file", {"path": "d/f", "new_path": "d/g"}),
    ("delete_file", {"path": "d/g"}),
]
ONLY_DATA: Final = {
    "state",  # the text says "exit code" or "killed by" instead
    "duration_seconds",  # how long it took is for programs
    "started_at",
    "pid",  # the process_id is what tools take
    "stdout_bytes",  # the text says so where something was cut
    "stderr_bytes",
    "mtime",
    "kind",
    "type",
    "encoding",  # text unless it was asked for otherwise
}
"""What a reader needs no word for."""
ASKED: Final = {
    "run_command": {"process_id", "signal"},  # of what has ended, and why is told
    "list_processes": {"signal"},
    "send_input": {"process_id"},
    "stop_process": {"process_id"},
    "read_file": {
        "path",
        "size",
        "offset",
        "bytes_read",
        "next_offset",
    },  # of what was read to its end
    "search_files": {"total"},  # of what is shown whole
}
"""What the reader has said, or sees."""


def facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every name and word or number in the data of a result."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from facts(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from facts(below, name)
    elif value and not isinstance(value, bool):
        yield name, str(value)


async def test_every_fact_of_the_data_is_in_the_text_and_every_text_in_the_data(
    sandbox: Sandbox,
) -> None:
    ids: list[str] = []
    missing: list[tuple[str, str, str]] = []
    for tool, arguments in CALLS:
        if named := arguments.get("process_id"):
            (named,) = [each for each in ids if each.startswith(f"{named}-")]
            arguments = {**arguments, "process_id": named}
        result = await sandbox.client.call_tool(tool, arguments)
        text, data = text_of(result), data_of(result)
        ids.append(data.get("process_id", ""))
        missing += [
            (tool, name, value)
            for name, value in facts(data)
            if name not in ONLY_DATA | ASKED.get(tool, set()) and value.strip() not in text
        ]
    assert missing == []


async def test_what_is_left_out_is_told_in_both_forms(sandbox: Sandbox) -> None:
    (sandbox.home / "f").write_text("line\n" * 100)
    for tool, arguments, names in (
        ("read_file", {"path": "f", "max_bytes": 16}, ("next_offset", "size")),
        ("search_files", {"pattern": "line", "max_results": 3}, ("total",)),
        ("run_command", {"command": "seq 500000"}, ("process_id",)),
    ):
        result = await sandbox.client.call_tool(tool, arguments)
        for name in names:
            assert str(data_of(result)[name]) in text_of(result), (tool, name)
