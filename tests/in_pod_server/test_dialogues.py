"""Commands that are talked to: open input, terminals, and waiting for what they say."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from typing import Any

import anyio
import pytest

from in_pod_server import dialogue_tools
from tests.in_pod_server.support import PATIENCE, Daemon, Sandbox, Wire, data_of, marked, text_of

WAIT = {"wait_seconds": PATIENCE}


async def start(sandbox: Sandbox, command: str, **arguments: Any) -> str:
    return str((await sandbox.call("start_background", command=command, **arguments))["process_id"])


async def read(sandbox: Sandbox, process_id: str, **arguments: Any) -> dict[str, Any]:
    return await sandbox.call("read_output", process_id=process_id, **WAIT | arguments)


async def end_of(sandbox: Sandbox, process_id: str) -> dict[str, Any]:
    return await read(sandbox, process_id, until_end=True)


# --- open input -------------------------------------------------------------------------------------------


async def test_a_command_is_talked_to_line_by_line(sandbox: Sandbox) -> None:
    reader = "while read -r x; do echo got $x; done; echo end; exit 3"
    process_id = await start(sandbox, reader, stdin="open")
    sent = await sandbox.client.call_tool(
        "send_input", {"process_id": process_id, "content": "a\né\n"}
    )
    assert text_of(sent) == "sent 5 bytes"
    assert data_of(sent) == {
        "process_id": process_id,
        "bytes_sent": 5,
        "complete": True,
        "closed": False,
    }
    answer = await read(sandbox, process_id, pattern="got é")
    assert (answer["matched"], answer["match_end"]) == (True, 12)
    closed = await sandbox.client.call_tool(
        "send_input", {"process_id": process_id, "content": "b\n", "close": True}
    )
    assert text_of(closed) == "sent 2 bytes, then the end of input"
    end = await end_of(sandbox, process_id)
    assert (end["data"], end["exit_code"]) == ("got a\ngot é\ngot b\nend\n", 3)
    said = await sandbox.refused("send_input", process_id=process_id, content="x")
    assert "has ended (exit code 3): read_output shows what it wrote" in said


async def test_binary_output_is_given_as_it_is_if_asked(sandbox: Sandbox) -> None:
    data = os.urandom(3000)
    script = f"printf %s {base64.b64encode(data).decode()} | base64 -d; kill -TERM $$"
    process_id = await start(sandbox, script)
    await end_of(sandbox, process_id)
    parts, cursor, eof = [], 0, False
    while not eof:
        piece = await read(sandbox, process_id, cursor=cursor, max_bytes=1000, encoding="base64")
        parts.append(base64.b64decode(piece["data"]))
        cursor, eof = piece["cursor"], piece["eof"]
    assert b"".join(parts) == data
    assert (piece["encoding"], piece["signal"]) == ("base64", "SIGTERM")


async def test_input_is_bytes_if_asked(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "xxd -p || od -An -tx1", stdin="open")
    data = base64.b64encode(b"\x00\xff\n").decode()
    await sandbox.call(
        "send_input", process_id=process_id, content=data, encoding="base64", close=True
    )
    assert (await end_of(sandbox, process_id))["data"].split() in (["00ff0a"], ["00", "ff", "0a"])
    other = await start(sandbox, "cat", stdin="open")
    assert "not base64" in await sandbox.refused(
        "send_input", process_id=other, content="é", encoding="base64"
    )


async def test_input_that_nobody_wants_is_refused_with_what_to_do(sandbox: Sandbox) -> None:
    closed = await start(sandbox, "sleep 301")
    said = await sandbox.refused("send_input", process_id=closed, content="x")
    assert "start_background with stdin=open or terminal=true" in said
    deaf = await start(sandbox, "exec <&-; echo up; sleep 301", stdin="open")
    await read(sandbox, deaf)
    said = await sandbox.refused("send_input", process_id=deaf, content="x")
    assert "it reads no more input" in said
    ended = await start(sandbox, "sleep 301", stdin="open")
    await sandbox.call("send_input", process_id=ended, close=True)
    said = await sandbox.refused("send_input", process_id=ended, content="x")
    assert "its input was closed" in said
    said = await sandbox.refused("send_input", process_id=ended, columns=100)
    assert "it has no terminal" in said
    ran = await sandbox.call("run_command", command="true")
    said = await sandbox.refused("send_input", process_id=ran["process_id"], content="x")
    assert "without open input" in said


async def test_a_command_that_does_not_read_is_told_of_and_blocks_nobody(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue_tools, "SEND_SECONDS", 0.3)
    process_id = await start(sandbox, "sleep 301", stdin="open")
    big = "x" * 300_000
    sent = await sandbox.client.call_tool(
        "send_input", {"process_id": process_id, "content": big, "close": True}
    )
    data = data_of(sent)
    assert (data["complete"], data["closed"]) == (False, False)
    assert 0 < data["bytes_sent"] < len(big)
    assert "of 300000: it does not read; send the rest later" in text_of(sent)
    assert (await sandbox.call("run_command", command="echo ok"))["stdout"] == "ok\n"
    await sandbox.call("stop_process", process_id=process_id)


async def test_two_who_send_at_once_do_not_mix_their_bytes(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "sleep 0.3; cat", stdin="open")
    async with anyio.create_task_group() as tasks:
        for letter in "abcdef":
            call = {"process_id": process_id, "content": letter * 50_000 + "\n"}
            tasks.start_soon(sandbox.client.call_tool, "send_input", call)
    await sandbox.call("send_input", process_id=process_id, close=True)
    with anyio.fail_after(PATIENCE):
        await sandbox.processes.get(process_id).done.wait()
    lines = sandbox.processes.get(process_id).stdout.read(0, 1_000_000).data.split()
    assert sorted(lines) == [letter.encode() * 50_000 for letter in "abcdef"]


def test_ten_mebibytes_of_input_arrive_in_one_call(wire: Wire) -> None:
    """L21"""
    ran = wire.call(1, "run_command", command="wc -c", stdin="x" * 10_485_760)
    assert ran["structuredContent"]["stdout"] == "10485760\n"


def test_thirty_mebibytes_of_input_arrive_in_parts(daemon: Daemon, wire: Wire) -> None:
    """L21: a request is bounded, so more comes in parts, as the host would send them."""
    process_id = wire.call(1, "start_background", command="sha256sum; exit 7", stdin="open")[
        "structuredContent"
    ]["process_id"]
    part = os.urandom(360_000)
    digest = hashlib.sha256()
    encoded = base64.b64encode(part).decode()
    left = 31_457_280
    while left:
        data = part[:left]
        content = encoded if len(data) == len(part) else base64.b64encode(data).decode()
        sent = wire.call(
            2, "send_input", process_id=process_id, content=content, encoding="base64"
        )["structuredContent"]
        assert sent["complete"]
        digest.update(data)
        left -= len(data)
    wire.call(3, "send_input", process_id=process_id, close=True)
    end = wire.call(4, "read_output", process_id=process_id, until_end=True, wait_seconds=20)
    assert end["structuredContent"]["data"].startswith(digest.hexdigest())
    assert end["structuredContent"]["exit_code"] == 7


async def test_a_start_that_fails_leaves_no_descriptor(sandbox: Sandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    for arguments in ({"stdin": "open"}, {"terminal": True}):
        said = await sandbox.refused(
            "start_background", command="true", env={"A": "x" * 200_000}, **arguments
        )
        assert "too large" in said
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# --- terminals --------------------------------------------------------------------------------------------


async def test_a_program_on_a_terminal_has_one_of_that_size(sandbox: Sandbox) -> None:
    process_id = await start(
        sandbox, "tty; stty size; echo $TERM; test -t 0 -a -t 1 -a -t 2 && echo all", terminal=True
    )
    end = await end_of(sandbox, process_id)
    tty, size, term, all_three = end["data"].split("\r\n")[:4]
    assert tty.startswith("/dev/pts/")
    assert (size, term, all_three) == ("40 120", "dumb", "all")
    assert end["eof"] is True


async def test_a_repl_is_used_interrupted_resized_and_left(sandbox: Sandbox) -> None:
    process_id = await start(
        sandbox, "python3 -q", terminal=True, columns=100, env={"PYTHON_BASIC_REPL": "1"}
    )
    prompt = await read(sandbox, process_id, pattern=">>> $")
    assert prompt["matched"] is True

    async def answer(content: str, pattern: str, **arguments: Any) -> str:
        before = sandbox.processes.get(process_id).stdout.total
        await sandbox.call("send_input", process_id=process_id, content=content, **arguments)
        got = await read(sandbox, process_id, cursor=before, pattern=pattern)
        assert got["matched"], got["data"]
        return str(got["data"])

    await answer("import os, time\n", ">>> $")
    assert "columns=100" in await answer("os.get_terminal_size()\n", r"columns=\d+.*(\s+>>>)+ $")
    assert "columns=50" in await answer(
        "os.get_terminal_size()\n", r"columns=\d+.*(\s+>>>)+ $", columns=50
    )
    await answer("print('nap'); time.sleep(300)\n", r"^nap")
    await answer("\x03", r"KeyboardInterrupt\s+>>> $")
    await answer("print('awake')\n", r"^awake\s+>>> $")
    await sandbox.call("send_input", process_id=process_id, close=True)
    end = await end_of(sandbox, process_id)
    # Python that was interrupted once ends as if by that signal.
    assert (end["eof"], end["state"] in ("exited", "killed")) == (True, True)


async def test_a_terminal_job_is_stopped_with_all_that_it_started(sandbox: Sandbox) -> None:
    process_id = await start(
        sandbox, "trap '' HUP; sleep 301 & setsid sleep 301 & echo up; wait", terminal=True
    )
    await read(sandbox, process_id, pattern="up")
    stopped = await sandbox.call("stop_process", process_id=process_id)
    assert stopped["state"] == "killed"
    assert marked(process_id) == []


async def test_a_terminal_keeps_no_log_file(sandbox: Sandbox) -> None:
    said = await sandbox.refused("start_background", command="x", terminal=True, log_file="f")
    assert "leave log_file empty" in said
    assert list(sandbox.processes) == []


async def test_a_flood_on_a_terminal_is_kept_in_bounds(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "seq 1 400000", terminal=True)
    end = await end_of(sandbox, process_id)
    process = sandbox.processes.get(process_id)
    assert process.stdout.total == sum(len(f"{n}\r\n") for n in range(1, 400_001))
    assert end["data"].startswith("1\r\n2\r\n")
    tail = process.stdout.read(process.stdout.total - 8, 8).data
    assert tail == b"400000\r\n"


async def test_output_is_read_after_how_the_command_stands(sandbox: Sandbox) -> None:
    """Whoever reads only the text, or only its first line, knows whether to go on."""
    process_id = await start(sandbox, "printf 'one\\n\\377'; read x; exit 3", stdin="open")
    call = {"process_id": process_id, "pattern": "one", **WAIT}
    going = await sandbox.client.call_tool("read_output", call)
    assert text_of(going) == (
        f"still running: process_id {process_id}\n"
        "[stdout bytes 0 to 5; bytes that are not UTF-8 are shown as \\xNN: encoding=base64 is "
        "exact; the pattern is there, up to byte 3; go on with cursor=5]\n"
        "one\n\\xff"
    )
    await sandbox.call("send_input", process_id=process_id, content="\n")
    call = {"process_id": process_id, "cursor": 5, "until_end": True, **WAIT}
    ended = await sandbox.client.call_tool("read_output", call)
    assert text_of(ended) == "exit code 3\n[stdout bytes 5 to 5; end of output]"
    facts = data_of(ended)
    assert (facts["start"], facts["cursor"], facts["state"]) == (5, 5, "exited")


# --- waiting ----------------------------------------------------------------------------------------------


async def test_a_pattern_is_waited_for_in_what_comes(sandbox: Sandbox) -> None:
    process_id = await start(
        sandbox, "echo one; read x; echo listening on 80; sleep 301", stdin="open"
    )
    first = await read(sandbox, process_id, pattern=r"listening on \d+", wait_seconds=0.3)
    assert (first["matched"], first["match_end"], first["eof"]) == (False, None, False)
    async with anyio.create_task_group() as tasks:
        call = {"process_id": process_id, "content": "\n"}
        tasks.start_soon(sandbox.client.call_tool, "send_input", call)
        result = await sandbox.client.call_tool(
            "read_output", {"process_id": process_id, "pattern": r"listening on \d+", **WAIT}
        )
    assert data_of(result)["match_end"] == len("one\nlistening on 80")
    assert "the pattern is there, up to byte 19" in text_of(result)
    after = await read(sandbox, process_id, cursor=19, pattern="listening", wait_seconds=0)
    assert after["matched"] is False, "what lies before the cursor does not count"


async def test_waiting_ends_with_the_command(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "printf 'no newline: x'; exit 4")
    begun = time.monotonic()
    missed = await read(sandbox, process_id, pattern="absent")
    assert (missed["matched"], missed["exit_code"]) == (False, 4)
    assert (await read(sandbox, process_id, pattern="x$"))["matched"] is True
    assert time.monotonic() - begun < PATIENCE / 2


async def test_the_end_is_waited_for_through_all_output(sandbox: Sandbox) -> None:
    ran = await sandbox.call(
        "run_command", command="for i in 1 2 3; do echo $i; sleep 0.1; done; exit 5", wait_seconds=0
    )
    end = await end_of(sandbox, ran["process_id"])
    assert (end["data"], end["exit_code"], end["eof"]) == ("1\n2\n3\n", 5, True)
    forever = await start(sandbox, "while echo x; do sleep 0.05; done")
    still = await read(sandbox, forever, until_end=True, wait_seconds=0.3)
    assert still["state"] == "running"


@pytest.mark.parametrize("written", [r"\000\377x needle", r"\377\376needle", r"a\r\nneedle\r\n"])
async def test_any_bytes_are_looked_through(sandbox: Sandbox, written: str) -> None:
    process_id = await start(sandbox, f"printf '{written}'")
    found = await read(sandbox, process_id, pattern="needle$")
    whole = sandbox.processes.get(process_id).stdout.read(0, 100).data
    assert found["match_end"] == whole.index(b"needle") + 6


@pytest.mark.parametrize(
    ("written", "pattern"),
    [
        (b"DONE\xff\xfe ready", "DONE.*ready"),
        ("\u20ac".encode() + b"\xe2\x82 x\xff needle\xe2\x82", "^.{6} needle"),
        ("\ud7ff\U0001f600\xe9".encode() + b"\xed\xa0\x80 needle", "needle"),
        (b"\x82\xac needle \xc3", "needle"),
        (b"\xff\xff", "\\A..\\z"),
    ],
)
async def test_a_byte_that_is_no_text_is_a_character_to_a_pattern(
    sandbox: Sandbox, written: bytes, pattern: str
) -> None:
    """It is shown in the middle of the line, and a pattern for that line was waited for in vain."""
    process_id = await start(sandbox, "cat", stdin="open")
    sent = {"content": base64.b64encode(written).decode(), "encoding": "base64", "close": True}
    await sandbox.call("send_input", process_id=process_id, **sent)
    found = await read(sandbox, process_id, pattern=pattern)
    last = b"needle" if b"needle" in written else written[-1:]
    assert found["match_end"] == written.rindex(last) + len(last)


async def test_a_pattern_that_is_none_or_evil_harms_nobody(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "head -c 100000 /dev/zero | tr '\\0' a; echo '!'")
    await end_of(sandbox, process_id)
    assert "unclosed group" in await sandbox.refused(
        "read_output", process_id=process_id, pattern="("
    )
    begun = time.monotonic()
    assert (await read(sandbox, process_id, pattern="^(a+)+$"))["matched"] is False
    assert time.monotonic() - begun < 5


async def test_the_newest_mebibyte_of_a_flood_is_looked_through(sandbox: Sandbox) -> None:
    process_id = await start(sandbox, "seq 1 1000000; echo needle")
    found = await read(sandbox, process_id, pattern="^needle")
    assert found["match_end"] == sandbox.processes.get(process_id).stdout.total - 1
