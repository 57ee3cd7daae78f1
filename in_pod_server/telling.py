"""How a command stands, in words for a reader and in data for a program."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from mcp.types import CallToolResult

from in_pod_server import contract
from in_pod_server.excerpts import excerpts
from in_pod_server.process import Process
from in_pod_server.results import result

COMMAND_SHOWN: Final = 200


def command_result(process: Process) -> CallToolResult:
    """Return all that is known of a command that was run."""
    stdout, stderr = excerpts(process)
    lines = [standing(process)]
    if process.state == "running":
        lines.append(
            f"[it goes on: read_output(process_id={process.id!r}) follows it, stop_process ends it]"
        )
    lines += [stdout.text] if stdout.text else []
    lines += ["[stderr]", stderr.text] if stderr.text else []
    return result(
        "\n".join(lines),
        process_id=process.id,
        state=process.state,
        exit_code=process.exit_code,
        signal=process.signal,
        stdout=stdout.text,
        stderr=stderr.text,
        stdout_bytes=process.stdout.total,
        stderr_bytes=process.stderr.total,
        stdout_truncated=stdout.cut,
        stderr_truncated=stderr.cut,
        duration_seconds=round(process.seconds, 3),
        left_running=process.left_running,
        out_of_memory=_out_of_memory(process),
        sandbox_ended=process.sandbox_ended,
        note=note(process),
    )


def standing(process: Process) -> str:
    """Return how a command stands: the exit code first, then what else is to be known."""
    return "\n".join(filter(None, (state_line(process), note(process))))


def note(process: Process) -> str:
    """Return what else is to be known of how a command stands, and what to do about it, if anything."""
    lines = (_memory_line, _astray_line, _many_line, _left_line, _end_line)
    return "".join(each(process) for each in lines).lstrip("\n")


def _end_line(process: Process) -> str:
    if not process.sandbox_ended:
        return ""
    return (
        "\n[the sandbox itself was ended meanwhile: suspended or destroyed, its time was over, or it "
        f"used more disk than it may ({contract.TMP_LIMIT} in /tmp); the home is kept, /tmp and processes are not]"
    )


def state_line(process: Process) -> str:
    """Return the line that says how a command stands: the first one a reader sees."""
    match process.state:
        case "exited":
            return f"exit code {process.exit_code}"
        case "killed":
            return f"killed by {process.signal}"
        case "timed_out":
            return f"timed out after {process.timeout:g} s"
        case "running":
            return f"still running: process_id {process.id}"


def _out_of_memory(process: Process) -> bool:
    return bool(process.oom_kills) or process.ended_for_memory


def _memory_line(process: Process) -> str:
    if process.ended_for_memory:
        return (
            "\n[the sandbox ran out of memory, and this command was ended, since it used most: use less "
            "at a time, or a sandbox with a larger memory_limit]"
        )
    if process.oom_kills:
        count = "a process" if process.oom_kills == 1 else f"{process.oom_kills} processes"
        return (
            f"\n[the sandbox ran out of memory meanwhile, and {count} of it had to be killed: use less "
            "at a time, or a sandbox with a larger memory_limit]"
        )
    if process.oom_kills is None and process.killed_by_others:
        return "\n[nobody asked for that: most often the sandbox has run out of memory]"
    return ""


def _astray_line(process: Process) -> str:
    if not process.memory_astray:
        return ""
    return (
        "\n[most of the sandbox's memory is held by what outlives commands: files in /dev/shm or "
        f"{contract.RUN_DIR}, or SysV shared memory (ipcs -m); until it is freed, commands that use more than a "
        "little are ended: rm the files, ipcrm -a, or suspend and resume the sandbox, which frees all of it]"
    )


def _many_line(process: Process) -> str:
    if not process.ended_many:
        return ""
    return (
        f"\n[it had {process.ended_many} processes at once, more than the {contract.COMMAND_PROCESSES} that a "
        "command may have, and was ended: run fewer at a time]"
    )


def _left_line(process: Process) -> str:
    if process.ended_left:
        return f"\n[it left {process.ended_left} processes running, ever more: they were ended]"
    if not process.left_running:
        return ""
    count = "1 process" if process.left_running == 1 else f"{process.left_running} processes"
    return (
        f"\n[{count} that it started still run; stop_process(process_id={process.id!r}) ends them]"
    )


def line(process: Process) -> str:
    """Return a command as a line of a list."""
    command = process.command[:COMMAND_SHOWN].replace("\n", "\\n")
    left = f", {process.left_running} left running" if process.left_running else ""
    log = f"  (log: {process.log_file})" if process.log_file else ""
    return f"{process.id}  {state_line(process)}{left}  {process.seconds:.1f} s  {command}{log}"


def row(process: Process) -> dict[str, Any]:
    """Return a command as an entry of a list."""
    return {
        "process_id": process.id,
        "pid": process.leader.pid,
        "command": process.command[:COMMAND_SHOWN],
        "state": process.state,
        "exit_code": process.exit_code,
        "signal": process.signal,
        "started_at": datetime.fromtimestamp(process.started_at, UTC).isoformat(timespec="seconds"),
        "duration_seconds": round(process.seconds, 3),
        "left_running": process.left_running,
        "out_of_memory": _out_of_memory(process),
        "stdout_bytes": process.stdout.total,
        "stderr_bytes": process.stderr.total,
        "log_file": process.log_file,
    }
