"""Commands: exact results, whole trees ended, output kept, and nothing of the home that poisons."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - the tests look at what other processes do
from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from in_pod_server import output, processes, tree
from in_pod_server.errors import ArgumentError, StartFailedError
from in_pod_server.launch import Launcher
from tests.in_pod_server.support import PATIENCE, Sandbox, data_of, marked, text_of
from tests.turns import SOON_SECONDS

SLEEPERS = "sleep 301"


async def run(sandbox: Sandbox, command: str, **arguments: Any) -> dict[str, Any]:
    with anyio.fail_after(PATIENCE):
        return await sandbox.call("run_command", command=command, **arguments)


async def test_a_command_that_begins_with_a_dash_is_no_option_of_the_shell(
    sandbox: Sandbox,
) -> None:
    data = await run(sandbox, "--version")
    assert data["exit_code"] == 127
    assert "--version: command not found" in data["stderr"]


# --- results ---------------------------------------------------------------------------------------


async def test_a_result_is_whole_in_the_text_and_in_the_data(sandbox: Sandbox) -> None:
    result = await sandbox.client.call_tool(
        "run_command", {"command": "echo out; echo err >&2; exit 3"}
    )
    data = data_of(result)
    assert text_of(result) == "exit code 3\nout\n\n[stderr]\nerr\n"
    assert data.pop("duration_seconds") > 0
    assert data.pop("process_id").startswith("p1-")
    assert data == {
        "state": "exited",
        "exit_code": 3,
        "signal": None,
        "stdout": "out\n",
        "stderr": "err\n",
        "stdout_bytes": 4,
        "stderr_bytes": 4,
        "stdout_truncated": False,
        "stderr_truncated": False,
        "left_running": 0,
        "out_of_memory": False,
        "sandbox_ended": False,
        "note": "",
    }


async def test_a_command_killed_by_a_signal_says_which(sandbox: Sandbox) -> None:
    result = await sandbox.client.call_tool("run_command", {"command": "kill -KILL $$"})
    data = data_of(result)
    assert (data["state"], data["exit_code"], data["signal"]) == ("killed", None, "SIGKILL")
    assert text_of(result) == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("nosuchcmd", 127, "nosuchcmd: command not found"),
        ("/etc/passwd", 126, "Permission denied"),
        ("'a b' x", 127, "a b: command not found"),
        ("echo 'unbalanced", 2, "unexpected EOF"),
        ("echo $((", 2, ""),
        ("if true; then", 2, "syntax error"),
    ],
)
async def test_what_bash_cannot_run_keeps_its_code_and_text(
    sandbox: Sandbox, command: str, code: int, said: str
) -> None:
    """L07, L36: never -1, never silence; the next call works."""
    ran = await run(sandbox, command)
    assert ran["exit_code"] == code or (command.startswith("echo $((") and ran["exit_code"] == 1)
    assert said in ran["stderr"]
    assert (await run(sandbox, "echo ok"))["stdout"] == "ok\n"


async def test_a_bad_folder_is_a_clear_error(sandbox: Sandbox) -> None:
    (sandbox.home / "file").touch()
    for workdir, reason in (("/nope", "no such folder"), ("file", "not a folder"), ("a\0b", "NUL")):
        said = await sandbox.refused("run_command", command="true", workdir=workdir)
        assert reason in said
        assert said.startswith("workdir")


async def test_a_folder_is_absolute_or_relative_to_the_home(sandbox: Sandbox) -> None:
    (sandbox.home / "a b").mkdir()
    for workdir, expected in (
        ("", sandbox.home),
        ("~", sandbox.home),
        ("~/a b", sandbox.home / "a b"),
        ("a b", sandbox.home / "a b"),
        ("/usr", Path("/usr")),
    ):
        assert (await run(sandbox, "pwd", workdir=workdir))["stdout"] == f"{expected}\n"


async def test_heredocs_and_odd_syntax_work(sandbox: Sandbox) -> None:
    """L36"""
    ran = await run(sandbox, "cat <<'EOF' > f\n$x `y` \"'\nEOF\ncat f; cat <<< here")
    assert ran["stdout"] == "$x `y` \"'\nhere\n"


async def test_every_exit_code_comes_with_its_output(sandbox: Sandbox) -> None:
    """L08: 200 commands, 8 at a time."""
    limiter = anyio.CapacityLimiter(8)
    results: list[tuple[str, int]] = []

    async def one() -> None:
        async with limiter:
            ran = await run(sandbox, "printf x; exit 7")
            results.append((ran["stdout"], ran["exit_code"]))

    async with anyio.create_task_group() as tasks:
        for _ in range(200):
            tasks.start_soon(one)
    assert results == [("x", 7)] * 200


async def test_bytes_come_back_as_they_were(sandbox: Sandbox) -> None:
    """L17: blank lines and a last line without newline are kept."""
    assert (await run(sandbox, "printf 'a\\n\\nb\\n\\n\\nc'"))["stdout"] == "a\n\nb\n\n\nc"
    assert (await run(sandbox, "printf '\\r\\0\\033[1m\\342\\200\\250'"))[
        "stdout"
    ] == "\r\0\x1b[1m\u2028"


async def test_a_long_line_kills_no_reader(sandbox: Sandbox) -> None:
    """L14"""
    assert (await run(sandbox, "head -c 200000 /dev/zero | tr '\\0' x"))["stdout"] == "x" * 200_000
    assert (await run(sandbox, "echo ok"))["stdout"] == "ok\n"


@pytest.mark.parametrize("step", [1, 3, 5, 4096])
async def test_characters_are_whole_however_they_are_written(sandbox: Sandbox, step: int) -> None:
    """L16's neighbour: UTF-8 split anywhere between writes."""
    sent = "aé€𝄞" * 30
    code = f"import os; b='{sent}'.encode(); [os.write(1, b[i:i+{step}]) for i in range(0,len(b),{step})]"
    assert (await run(sandbox, f'python3 -c "{code}"'))["stdout"] == sent


async def test_what_a_command_prints_about_us_is_only_its_output(sandbox: Sandbox) -> None:
    """L59"""
    lines = (
        'container not found\\ncommand terminated with exit code 137\\n{"jsonrpc":"2.0","id":1}\\n'
    )
    ran = await run(sandbox, f"printf '{lines}'; printf '{lines}' >&2; exit 0")
    assert ran["exit_code"] == 0
    assert ran["stdout"] == ran["stderr"] == lines.replace("\\n", "\n")


# --- much output -----------------------------------------------------------------------------------


async def test_a_flood_is_counted_cut_and_readable(sandbox: Sandbox) -> None:
    result = await sandbox.client.call_tool(
        "run_command", {"command": "seq 1 1000000; seq 1 300000 >&2"}
    )
    ran = data_of(result)
    whole = "".join(f"{n}\n" for n in range(1, 1_000_001))
    assert ran["stdout_bytes"] == len(whole)
    assert (ran["stdout_truncated"], ran["stderr_truncated"]) == (True, True)
    assert ran["stdout"].startswith("1\n2\n3\n")
    assert ran["stdout"].endswith("999999\n1000000\n")
    assert "bytes left out here; read_output(" in ran["stdout"]
    assert ran["stderr"].endswith("300000\n")
    assert ran["stdout"] in text_of(result)
    head = await sandbox.call("read_output", process_id=ran["process_id"], max_bytes=1000)
    assert head["data"] == whole[:1000]
    middle = await sandbox.call("read_output", process_id=ran["process_id"], cursor=1_000_000)
    assert middle["dropped_bytes"] > 0
    after = 1_000_000 + middle["dropped_bytes"]
    assert whole[after : middle["cursor"]] == middle["data"]


async def test_one_hundred_megabytes_take_linear_time_and_little_memory(sandbox: Sandbox) -> None:
    """L16"""
    line = "x" * 999

    async def seconds(lines: int) -> float:
        begun = time.perf_counter()
        ran = await run(sandbox, f"yes {line} | head -n {lines}")
        assert ran["stdout_bytes"] == lines * 1000
        return time.perf_counter() - begun

    small = max(await seconds(10_000), 0.05)
    large = await seconds(100_000)
    assert large < small * 10 * 4, "quadratic would be 100 times"
    for process in sandbox.processes:
        assert process.stdout.total - process.stdout.dropped < 2 * 1024 * 1024


async def test_a_reply_fits_a_message_whatever_the_bytes(sandbox: Sandbox) -> None:
    for made in ("/dev/zero", "/dev/urandom"):
        ran = await run(sandbox, f"head -c 3000000 {made} | tee /dev/stderr")
        assert ran["stdout_truncated"]
        assert ran["stderr_truncated"]


async def test_finished_commands_give_their_memory_back(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KEPT_FINISHED", 3)
    monkeypatch.setattr(processes, "KEPT_OUTPUT_BYTES", 2500)
    ids = [(await run(sandbox, "head -c 1000 /dev/zero"))["process_id"] for _ in range(5)]
    for forgotten in ids[:2]:
        assert "no process" in await sandbox.refused("read_output", process_id=forgotten)
    released = await sandbox.call("read_output", process_id=ids[2])
    assert (released["data"], released["dropped_bytes"], released["eof"]) == ("", 1000, True)
    assert len((await sandbox.call("read_output", process_id=ids[4]))["data"]) == 1000


# --- scripts, stdin, environment -------------------------------------------------------------------


async def test_a_script_longer_than_an_argument_works(sandbox: Sandbox) -> None:
    filler = "\n".join(f": {'x' * 90} # {n}" for n in range(1500))
    assert len(filler) > 140_000
    ran = await run(sandbox, f"{filler}\nprintf '%s' \"é$0\"; exit 5")
    assert ran["exit_code"] == 5
    assert ran["stdout"].startswith("é")
    assert list(sandbox.run_dir.iterdir()) == [], "nothing is left behind"


async def test_a_large_heredoc_and_a_large_stdin_work(sandbox: Sandbox) -> None:
    big = "y" * 700_000
    assert (await run(sandbox, f"wc -c <<'EOF'\n{big}\nEOF"))["stdout"] == "700001\n"
    assert (await run(sandbox, "wc -c", stdin=big))["stdout"] == "700000\n"
    assert (await run(sandbox, "exit 0", stdin=big))["exit_code"] == 0, (
        "nobody reads it: no SIGPIPE"
    )
    assert (await run(sandbox, "cat; cat", stdin="é\n"))["stdout"] == "é\n"


async def test_stdin_is_at_its_end_unless_given(sandbox: Sandbox) -> None:
    ran = await run(sandbox, "cat; read x; echo $?; readlink /proc/self/fd/0")
    assert ran["stdout"] == "1\n/dev/null\n"


async def test_the_environment_is_the_short_list_and_the_caller_s(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "x")
    ran = await run(sandbox, "env -0", env={"A": "b c", "LANG": "de"})
    got = dict(entry.split("=", 1) for entry in ran["stdout"].split("\0")[:-1])
    home = str(sandbox.home)
    assert got.pop("PODPIPE_PROCESS_ID") == ran["process_id"]
    for own in ("PWD", "SHLVL", "_"):
        got.pop(own)
    assert got == {
        "PATH": f"{home}/.local/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "SHELL": "/bin/bash",
        "XDG_CACHE_HOME": f"{home}/.cache",
        "LANG": "de",
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "EDITOR": "true",
        "GIT_EDITOR": "true",
        "GIT_TERMINAL_PROMPT": "0",
        "DEBIAN_FRONTEND": "noninteractive",
        "A": "b c",
    }


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A B", "PODPIPE_PROCESS_ID", "é", "A\n"])
async def test_a_name_that_is_no_variable_is_refused(sandbox: Sandbox, name: str) -> None:
    assert (await sandbox.refused("run_command", command="true", env={name: "x"})).startswith(
        "env: "
    )


async def test_values_and_commands_with_nul_are_refused(sandbox: Sandbox) -> None:
    assert "NUL" in await sandbox.refused("run_command", command="true", env={"A": "a\0b"})
    assert "NUL" in await sandbox.refused("run_command", command="echo a\0b")
    assert "too large" in await sandbox.refused(
        "run_command", command="true", env={"A": "x" * 200_000}
    )
    assert "too large" in await sandbox.refused(
        "start_background", command="true", env={"A": "x" * 200_000}
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50))
@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
def test_any_value_reaches_the_command_as_it_is(tmp_path: Path, value: str) -> None:
    """L35: no argument is split, joined or run."""
    launcher = Launcher(home=tmp_path, run_dir=tmp_path, user="u", tmp_dir=tmp_path)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        child = launcher.start(
            "p",
            'printf %s "$V"; cat',
            workdir="",
            env={"V": value},
            stdin=value.encode(),
            stdout=write,
            stderr=subprocess.DEVNULL,
        )
        os.close(write)
        assert reader.read() == (value + value).encode()
    assert child.wait(PATIENCE) == 0


async def test_arguments_keep_their_boundaries(sandbox: Sandbox) -> None:
    """L35"""
    ran = await run(
        sandbox, """python3 -c 'print("hi there")'; f="a'; touch pwn; '"; echo "$f" > "$f"; ls"""
    )
    assert ran["stdout"] == "hi there\na'; touch pwn; '\n"


@pytest.mark.parametrize(
    "poison", ["read x", "exit 3", "exec sleep 300", "while :; do :; done", "set -e; false"]
)
async def test_the_home_s_shell_files_cannot_break_a_call(sandbox: Sandbox, poison: str) -> None:
    """L56"""
    for name in (".bashrc", ".bash_profile", ".profile", ".bash_login", ".bash_env"):
        (sandbox.home / name).write_text(poison)
    assert (await run(sandbox, "echo ok; bash -c 'echo inner'"))["stdout"] == "ok\ninner\n"


async def test_nothing_pages_prompts_or_opens_an_editor(sandbox: Sandbox) -> None:
    """L37"""
    made = (
        "git init -q . && git config user.name n && git config user.email e@example && "
        "for i in $(seq 30); do git commit -q --allow-empty -m c$i; done && "
        "git log && git commit -q --allow-empty; python3; sudo -S true; read answer; "
        "git clone -q http://127.0.0.1:9/x; ssh -o BatchMode=no nobody@127.0.0.1 true; echo done"
    )
    begun = time.monotonic()
    ran = await run(sandbox, made)
    assert ran["stdout"].endswith("done\n")
    assert ran["stdout"].count("commit ") == 30
    assert time.monotonic() - begun < 10


async def test_a_missing_tmp_folder_does_not_stop_commands(tmp_path: Path) -> None:
    """L57"""
    home = tmp_path / "home"
    home.mkdir()
    gone = Launcher(home=home, run_dir=tmp_path, user="u", tmp_dir=tmp_path / "gone")
    fallback = gone.environment("p", {})["TMPDIR"]
    assert Path(fallback).is_dir()
    assert fallback == f"{home}/.cache/tmp"
    assert gone.environment("p", {"TMPDIR": "/nope"})["TMPDIR"] == "/nope"
    there = Launcher(home=home, run_dir=tmp_path, user="u", tmp_dir=tmp_path)
    assert "TMPDIR" not in there.environment("p", {})


async def test_a_tmpdir_that_is_not_there_breaks_only_what_needs_it(sandbox: Sandbox) -> None:
    """L57"""
    ran = await run(sandbox, "cat <<< hi; echo $TMPDIR", env={"TMPDIR": "/nope"})
    assert ran["stdout"] == "hi\n/nope\n"


def test_a_start_that_the_system_refuses_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(home=tmp_path, run_dir=tmp_path, user="u", tmp_dir=tmp_path)

    def no_more(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_more)
    with pytest.raises(StartFailedError, match="stop some first"):
        launcher.start(
            "p", "x" * 200_000, workdir="", env={}, stdin=b"", stdout=1, stderr=subprocess.DEVNULL
        )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="NUL"):
        launcher.start("p", "\0", workdir="", env={}, stdin=b"", stdout=1, stderr=1)


async def test_commands_are_offered_to_the_oom_killer_before_the_daemon(sandbox: Sandbox) -> None:
    """In a pod the daemon has 990 and more, by Kubernetes' reckoning."""
    until = "until [ $(cat /proc/self/oom_score_adj) = 1000 ]; do :; done; echo ok"
    assert (await run(sandbox, until))["stdout"] == "ok\n"
    assert Path("/proc/self/oom_score_adj").read_text() != "1000\n"


# --- ending --------------------------------------------------------------------------------------------


async def test_output_before_a_timeout_is_kept(sandbox: Sandbox) -> None:
    """L05"""
    ran = await run(sandbox, "echo a; sleep 30", timeout_seconds=0.3)
    assert (ran["stdout"], ran["state"], ran["exit_code"]) == ("a\n", "timed_out", None)
    assert ran["signal"] == "SIGTERM"


async def test_what_a_timed_out_command_would_have_done_later_does_not_happen(
    sandbox: Sandbox,
) -> None:
    """L06"""
    ran = await run(sandbox, "(sleep 5; touch late) & sleep 5; touch late", timeout_seconds=0.2)
    assert ran["state"] == "timed_out"
    assert marked(ran["process_id"]) == [], "nobody is left who could"
    assert not (sandbox.home / "late").exists()


@pytest.mark.parametrize(
    "command",
    [
        f"sh -c '{SLEEPERS} | {SLEEPERS}'",
        f"setsid {SLEEPERS} & setsid setsid {SLEEPERS} & wait",
        f"trap '' TERM INT HUP; {SLEEPERS} & {SLEEPERS}; {SLEEPERS}",
        f"(setsid nohup sh -c \"trap '' TERM; {SLEEPERS}; {SLEEPERS}\" > /dev/null 2>&1 &) ; {SLEEPERS}",
        f"env -i {SLEEPERS} & env -i setsid {SLEEPERS} & wait",
        f"{SLEEPERS} & kill -STOP $!; kill -STOP $$",
        f"for i in $(seq 50); do {SLEEPERS} & done; wait",
    ],
)
async def test_a_timeout_ends_the_whole_tree_and_nothing_else(
    sandbox: Sandbox, command: str
) -> None:
    """L03"""
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    neighbour = await sandbox.call("start_background", command=SLEEPERS)
    begun = time.monotonic()
    ran = await run(sandbox, command, timeout_seconds=0.5)
    assert time.monotonic() - begun < 5
    assert (ran["state"], ran["exit_code"], ran["left_running"]) == ("timed_out", None, 0)
    assert marked(ran["process_id"]) == []
    assert sleepers_in(sandbox.processes.get(ran["process_id"]).leader.pid) == []
    assert stranger.poll() is None
    assert len(marked(neighbour["process_id"])) >= 1
    stranger.kill()
    stranger.wait()


def sleepers_in(session: int) -> list[int]:
    stats = [tree.read_stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdecimal()]
    return [stat.pid for stat in stats if stat and stat.alive and stat.session == session]


async def test_a_call_returns_when_the_command_ends_whoever_holds_its_pipes(
    sandbox: Sandbox,
) -> None:
    begun = time.monotonic()
    result = await sandbox.client.call_tool(
        "run_command",
        {"command": f"mkfifo fifo; (read x < fifo; echo later) & {SLEEPERS} & echo now"},
    )
    ran = data_of(result)
    assert time.monotonic() - begun < SOON_SECONDS
    assert (ran["stdout"], ran["exit_code"]) == ("now\n", 0)
    assert ran["left_running"] == 2
    assert "2 processes that it started still run" in text_of(result)
    assert ran["note"] in text_of(result), "data alone tells what to do, too"
    assert ran["note"].endswith(f"stop_process(process_id={ran['process_id']!r}) ends them]")
    listed = await sandbox.client.call_tool("list_processes", {})
    assert ", 2 left running  " in text_of(listed).split("\n")[0]
    await run(sandbox, "echo x > fifo")
    more = await sandbox.call(
        "read_output", process_id=ran["process_id"], cursor=4, wait_seconds=10
    )
    assert (more["data"], more["eof"]) == ("later\n", False), "what was left running is read on"
    stopped = await sandbox.call("stop_process", process_id=ran["process_id"])
    assert (stopped["left_running"], stopped["state"]) == (0, "exited")
    assert marked(ran["process_id"]) == []
    end = await sandbox.call(
        "read_output", process_id=ran["process_id"], cursor=10, wait_seconds=10
    )
    assert end["eof"] is True


async def test_a_long_command_answers_still_running_and_goes_on(sandbox: Sandbox) -> None:
    result = await sandbox.client.call_tool(
        "run_command",
        {"command": "mkfifo f; echo one; read x < f; echo two; exit 4", "wait_seconds": 0.3},
    )
    ran = data_of(result)
    assert (ran["state"], ran["exit_code"], ran["stdout"]) == ("running", None, "one\n")
    assert text_of(result).startswith(f"still running: process_id {ran['process_id']}\n")
    await run(sandbox, "echo go > f")
    read = await sandbox.call(
        "read_output", process_id=ran["process_id"], cursor=4, wait_seconds=10
    )
    assert read["data"] == "two\n"
    end = await sandbox.call(
        "read_output", process_id=ran["process_id"], cursor=read["cursor"], wait_seconds=10
    )
    assert (end["eof"], end["state"], end["exit_code"]) == (True, "exited", 4)


async def test_a_timeout_counts_also_after_the_call_has_answered(sandbox: Sandbox) -> None:
    ran = await run(sandbox, "echo a; sleep 30", timeout_seconds=0.4, wait_seconds=0)
    assert ran["state"] == "running"
    with anyio.fail_after(PATIENCE):
        await sandbox.processes.get(ran["process_id"]).done.wait()
    listed = (await sandbox.call("list_processes"))["processes"]
    assert [row["state"] for row in listed] == ["timed_out"]


@pytest.mark.parametrize(
    ("command", "arguments", "state", "code", "number"),
    [
        (SLEEPERS, {}, "killed", None, "SIGTERM"),
        (SLEEPERS, {"signal": "INT"}, "killed", None, "SIGINT"),
        ("trap 'exit 9' TERM; while :; do sleep 0.05; done", {}, "exited", 9, None),
        (
            "trap '' TERM; while :; do sleep 0.05; done",
            {"grace_seconds": 0.2},
            "killed",
            None,
            "SIGKILL",
        ),
        (SLEEPERS, {"grace_seconds": 0}, "killed", None, "SIGKILL"),
    ],
)
async def test_stop_process_says_how_it_ended(
    sandbox: Sandbox,
    command: str,
    arguments: dict[str, Any],
    state: str,
    code: int | None,
    number: str | None,
) -> None:
    started = await sandbox.call("start_background", command=f"echo up; {command}")
    await sandbox.call("read_output", process_id=started["process_id"], wait_seconds=10)
    stopped = await sandbox.call("stop_process", process_id=started["process_id"], **arguments)
    assert (stopped["state"], stopped["exit_code"], stopped["signal"]) == (state, code, number)
    assert marked(started["process_id"]) == []
    again = await sandbox.call("stop_process", process_id=started["process_id"])
    assert again == stopped, "stopping twice changes nothing"


async def test_a_second_stop_may_be_harsher(sandbox: Sandbox) -> None:
    stubborn = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    started = await sandbox.call("start_background", command=stubborn)
    await sandbox.call("read_output", process_id=started["process_id"], wait_seconds=10)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            process = sandbox.processes.get(started["process_id"])
            tasks.start_soon(sandbox.processes.stop, process, signal.SIGTERM, 600.0)
            await anyio.lowlevel.checkpoint()
            await sandbox.call(
                "stop_process", process_id=process.id, signal="KILL", grace_seconds=0
            )
    assert process.signal == "SIGKILL"


async def test_no_zombies_are_left(sandbox: Sandbox) -> None:
    def zombies() -> set[int]:
        own = [tree.read_stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdecimal()]
        return {s.pid for s in own if s and s.parent == os.getpid() and s.state == "Z"}

    before = zombies()  # of other tests, which ran in this process
    for _ in range(5):
        await run(sandbox, "(sleep 0.01 &); true")
    assert zombies() <= before


async def test_leaving_the_table_ends_everything(tmp_path: Path) -> None:
    from tests.in_pod_server.support import open_sandbox

    async with open_sandbox(tmp_path) as sandbox:
        started = await sandbox.call("start_background", command=f"setsid {SLEEPERS} & wait")
        left = await run(sandbox, f"{SLEEPERS} > /dev/null 2>&1 &")
        assert left["left_running"] == 1
    assert marked(started["process_id"]) == marked(left["process_id"]) == []


async def test_a_cancelled_call_stops_its_command(sandbox: Sandbox) -> None:
    with anyio.move_on_after(PATIENCE) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox, f"echo up > up; {SLEEPERS}")
            while not (sandbox.home / "up").exists():
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    (process,) = sandbox.processes
    with anyio.fail_after(PATIENCE):
        await process.done.wait()
    assert marked(process.id) == []


def test_a_reused_pid_is_never_signalled() -> None:
    child = subprocess.Popen(["sleep", "300"])
    stat = tree.read_stat(child.pid)
    assert stat is not None
    older = tree.Stat(stat.pid, stat.state, stat.parent, stat.session, stat.started - 1)
    tree.send_signal(older, signal.SIGKILL)
    assert child.poll() is None
    tree.send_signal(stat, signal.SIGKILL)
    assert child.wait(PATIENCE) == -signal.SIGKILL
    tree.send_signal(stat, signal.SIGKILL)


async def test_without_pidfds_commands_run_and_end_as_well(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    assert (await run(sandbox, "echo a; exit 3"))["exit_code"] == 3
    assert (await run(sandbox, f"setsid {SLEEPERS} & wait", timeout_seconds=0.2))[
        "state"
    ] == "timed_out"


# --- background ----------------------------------------------------------------------------------------


async def test_a_background_command_logs_outside_the_home(sandbox: Sandbox) -> None:
    started = await sandbox.call("start_background", command="echo out; echo err >&2; exit 6")
    assert started["pid"] > 0
    log = Path(started["log_file"])
    assert log.parent == sandbox.log_dir
    process = sandbox.processes.get(started["process_id"])
    with anyio.fail_after(PATIENCE):
        await process.done.wait()
    read = await sandbox.call("read_output", process_id=process.id)
    assert (read["data"], read["eof"], read["exit_code"]) == ("out\nerr\n", True, 6)
    assert log.read_text() == "out\nerr\n"
    other = await sandbox.call("read_output", process_id=process.id, stream="stderr")
    assert (other["data"], other["eof"]) == ("", True)
    assert list(sandbox.home.iterdir()) == []


async def test_a_log_file_in_the_home_is_appended_to_and_kept(sandbox: Sandbox) -> None:
    (sandbox.home / "logs").mkdir()
    (sandbox.home / "logs" / "a.log").write_text("before\n")
    started = await sandbox.call("start_background", command="echo after", log_file="logs/a.log")
    process = sandbox.processes.get(started["process_id"])
    with anyio.fail_after(PATIENCE):
        await process.done.wait()
    assert started["log_file"] == str(sandbox.home / "logs" / "a.log")
    assert (sandbox.home / "logs" / "a.log").read_text() == "before\nafter\n"
    assert (await sandbox.call("read_output", process_id=process.id))["data"] == "after\n"
    for outside in ("/etc/x.log", "../x.log"):
        said = await sandbox.refused("start_background", command="true", log_file=outside)
        assert "outside the home" in said


async def test_a_background_log_is_followed_while_it_grows(sandbox: Sandbox) -> None:
    started = await sandbox.call("start_background", command="mkfifo f; read x < f; echo $x")
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox, "until [ -p f ]; do :; done; echo hello > f")
            read = await sandbox.call(
                "read_output", process_id=started["process_id"], wait_seconds=20
            )
    assert read["data"] == "hello\n"


async def test_a_background_log_that_floods_is_cut_in_the_middle(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOG_BYTES", "LOG_HEAD_BYTES", "LOG_TAIL_BYTES"):
        monkeypatch.setattr(output, name, 64 * 1024)
    monkeypatch.setattr(processes, "LOG_CHECK_SECONDS", 0.01)
    started = await sandbox.call("start_background", command="seq 1 100000; sleep 300")
    process = sandbox.processes.get(started["process_id"])
    with anyio.fail_after(PATIENCE):
        while not process.stdout.dropped or process.stdout.total < 588_895:
            await anyio.sleep(0.01)
    read = await sandbox.call("read_output", process_id=process.id, cursor=100_000)
    assert read["dropped_bytes"] > 0
    assert "0\0" not in read["data"]
    assert Path(started["log_file"]).stat().st_size == process.stdout.total


async def test_processes_are_listed_with_what_became_of_them(sandbox: Sandbox) -> None:
    await run(sandbox, "echo 'a\nb'; exit 2")
    await sandbox.call("start_background", command=SLEEPERS)
    result = await sandbox.client.call_tool("list_processes", {})
    rows = data_of(result)["processes"]
    assert [(row["state"], row["exit_code"]) for row in rows] == [("exited", 2), ("running", None)]
    lines = text_of(result).split("\n")
    assert len(lines) == 2
    assert "exit code 2" in lines[0]
    assert "still running" in lines[1]


async def test_an_empty_table_is_said_and_not_empty_data(sandbox: Sandbox) -> None:
    result = await sandbox.client.call_tool("list_processes", {})
    assert data_of(result) == {"processes": [], "total": 0, "truncated": False}
    assert text_of(result) == "no commands were started yet"
    for tool in ("read_output", "stop_process"):
        assert "list_processes shows" in await sandbox.refused(tool, process_id="p9-x")


async def test_a_thousand_processes_do_not_make_a_reply_too_long(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(sandbox, "true # " + "\x1b" * 900)
    (one,) = sandbox.processes
    monkeypatch.setattr(sandbox.processes, "_processes", {f"p{n}": one for n in range(3000)})
    result = await sandbox.client.call_tool("list_processes", {"max_entries": 1000})
    assert len(result.model_dump_json()) < 1 << 20
    assert 100 < len(data_of(result)["processes"]) < 1000
    assert (data_of(result)["total"], data_of(result)["truncated"]) == (3000, True)
    begun = time.perf_counter()
    short = await sandbox.client.call_tool("list_processes", {})
    assert time.perf_counter() - begun < 0.1
    assert len(data_of(short)["processes"]) == 50
    assert "[the newest 50 of 3000; " in text_of(short)


async def test_those_that_run_are_listed_alone_if_asked(sandbox: Sandbox) -> None:
    ids = [(await run(sandbox, command))["process_id"] for command in ("true", f"{SLEEPERS} &")]
    ids.append((await sandbox.call("start_background", command=SLEEPERS))["process_id"])
    await run(sandbox, "true")
    listed = await sandbox.call("list_processes", running_only=True)
    assert [row["process_id"] for row in listed["processes"]] == ids[1:]
    few = await sandbox.call("list_processes", max_entries=2)
    assert [row["process_id"] for row in few["processes"]] == ids[1:], "what runs comes first"
    assert (few["total"], few["truncated"]) == (4, True)


async def test_what_left_something_running_is_not_forgotten(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KEPT_FINISHED", 1)
    left = await run(sandbox, f"{SLEEPERS} > /dev/null 2>&1 &")
    for _ in range(3):
        await run(sandbox, "true")
    assert len(list(sandbox.processes)) == 2
    stopped = await sandbox.call("stop_process", process_id=left["process_id"])
    assert (stopped["left_running"], marked(left["process_id"])) == (0, [])


async def test_what_is_left_can_be_stopped_long_after_a_first_stop(sandbox: Sandbox) -> None:
    ran = await run(sandbox, f"{SLEEPERS} &")
    process = sandbox.processes.get(ran["process_id"])
    process.kill_at = 0
    stopped = await sandbox.call("stop_process", process_id=process.id)
    assert stopped["left_running"] == 0
    assert marked(process.id) == []


async def test_what_was_left_running_is_counted_on(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = await run(sandbox, "mkfifo f; read x < f & true")
    assert ran["left_running"] == 1
    await run(sandbox, "echo > f")
    process = sandbox.processes.get(ran["process_id"])
    with anyio.fail_after(PATIENCE):
        while process.left_running:
            await anyio.sleep(0.02)


async def test_a_crash_leaves_no_core_file(sandbox: Sandbox) -> None:
    ran = await run(sandbox, "until [ $(ulimit -S -c) = 0 ]; do :; done; echo ok")
    assert ran["stdout"] == "ok\n"
