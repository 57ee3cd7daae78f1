"""What commands and files meet in a real pod: its kernel, its image, its volumes."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path

import anyio
import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.pods import run, sandbox, tool
from tests.turns import SOON_SECONDS

# --- what the image and the kernel make of commands ----------------------------------------------


async def test_nothing_of_the_image_pages_prompts_or_waits(cluster: Cluster, user: str) -> None:
    """L37"""
    script = """
        git init -q r && cd r && git config user.email a@b && git config user.name n
        for i in $(seq 200); do git commit -q --allow-empty -m "$i"; done; git log | tail -1
        git commit --allow-empty; echo "commit $?"
        git clone -q http://127.0.0.1:9/private.git; echo "clone $?"
        man ls; sudo -S true; python3; sh; cat; read x; echo "read $?"
        ssh -o ConnectTimeout=2 127.0.0.1 true; echo end
    """
    async with sandbox(cluster) as host:
        with anyio.fail_after(30):
            facts = await run(host, script)
    lines = facts["stdout"].splitlines()
    assert (facts["state"], lines[-2:]) == ("exited", ["read 1", "end"])
    assert "clone 128" in lines
    assert "commit 1" in lines


async def test_what_a_home_may_hold_breaks_no_call(cluster: Cluster, user: str) -> None:
    """L56, L57"""
    async with sandbox(cluster) as host:
        for poison in ("read x", "exit 3", "exec cat", "while :; do :; done"):
            for name in (".bashrc", ".profile", ".bash_profile", ".inputrc"):
                await tool(host, "write_file", path=name, content=f"{poison}\n")
            assert (await run(host, "echo fine", env={"BASH_ENV": ""}))["stdout"] == "fine\n"
        await run(host, "rm -rf /tmp/* /tmp/.[!.]*; rmdir /tmp")
        facts = await run(host, "f=$(mktemp) && cat <<E >$f && cat $f\nhere\nE")
        assert facts["stdout"] == "here\n"
        bad = await run(host, "mktemp; echo $?", env={"TMPDIR": "/nope"})
        assert bad["stdout"] == "1\n"


async def test_two_hundred_commands_give_each_its_output_and_code(
    cluster: Cluster, user: str
) -> None:
    """L08"""
    found: list[tuple[str, int]] = []
    async with sandbox(cluster) as host:

        async def worker() -> None:
            for _ in range(25):
                facts = await run(host, "printf x; exit 7")
                found.append((facts["stdout"], facts["exit_code"]))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(worker)
    assert found == [("x", 7)] * 200


async def test_what_is_printed_about_us_is_only_output(cluster: Cluster, user: str) -> None:
    """L59, L17, L14: with the real kubectl and the real runtime between."""
    said = (
        "container not found\ncommand terminated with exit code 137\nerror: unable to upgrade\n\n\n"
        '{"jsonrpc":"2.0","id":"call-1","result":{}}\n' + "x" * 60_000
    )
    async with sandbox(cluster) as host:
        facts = await run(host, "tee /dev/stderr", stdin=said)
        assert (facts["stdout"], facts["stderr"], facts["exit_code"]) == (said, said, 0)


@pytest.mark.parametrize(
    "tree",
    [
        "sleep 300 | sleep 300",
        "setsid sleep 300 & setsid -f sh -c 'sleep 300; true'; sleep 300",
        "(trap '' TERM HUP INT; while :; do sleep 1; done) & trap '' TERM; wait; sleep 300",
        "python3 -c 'import os, time; [os.fork() for _ in range(4)]; os.setsid; time.sleep(300)'",
        "env -i setsid sh -c 'sleep 300 & sleep 300 & wait' & sleep 300",
    ],
)
async def test_a_timeout_ends_the_whole_tree_and_nothing_else(
    cluster: Cluster, user: str, tree: str
) -> None:
    """L03, L05, L06"""
    async with sandbox(cluster) as host:
        other = await tool(host, "start_background", command="exec sleep 1000")
        facts = await run(host, f"echo before; {tree}; touch late", timeout_seconds=1)
        assert (facts["state"], facts["exit_code"]) == ("timed_out", None)
        assert (facts["stdout"], facts["left_running"]) == ("before\n", 0)
        assert facts["duration_seconds"] < 10
        seen = await run(
            host, "ps -eo pid,stat,args | grep -c '[s]leep 300\\|[Z]+\\? *\\['; ls late"
        )
        assert (seen["stdout"], seen["exit_code"]) == ("0\n", 2)
        (row,) = (await tool(host, "list_processes", running_only=True))["processes"]
        assert row["process_id"] == other["process_id"]


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("nosuchcmd", 127, "nosuchcmd: command not found"),
        ("/etc/passwd", 126, "Permission denied"),
        ("/nope/prog", 127, "No such file or directory"),
        ("echo 'open", 2, "unexpected EOF"),
        ("if true; then", 2, "syntax error"),
        ("cat <<'EOF' > f\n$x `y`\nEOF\ncat f >&2; exit 9", 9, "$x `y`"),
    ],
)
async def test_what_cannot_be_run_is_told_by_its_code_and_words(
    cluster: Cluster, user: str, command: str, code: int, said: str
) -> None:
    """L07, L36: by the shell of the image."""
    async with sandbox(cluster) as host:
        facts = await run(host, command)
        assert (facts["exit_code"], said in facts["stderr"]) == (code, True), facts
        asked = {"command": "true", "workdir": "/nope"}
        refused = await host.sessions.call("work", "run_command", asked)
        assert refused["isError"]
        assert "'/nope' cannot be used" in refused["content"][0]["text"]
        assert (await run(host, "echo ok"))["stdout"] == "ok\n"


async def test_one_long_command_blocks_nobody(cluster: Cluster, user: str) -> None:
    """L58"""
    async with sandbox(cluster) as host, anyio.create_task_group() as tasks:
        await run(host, "true")
        tasks.start_soon(run, host, "sleep 30")
        for name, arguments in (
            ("list_files", {}),
            ("run_command", {"command": "echo"}),
            ("list_processes", {"running_only": True}),
        ):
            with anyio.fail_after(SOON_SECONDS):
                facts = await tool(host, name, **arguments)
        assert [row["command"] for row in facts["processes"]] == ["sleep 30"]
        tasks.cancel_scope.cancel()


# --- files ---------------------------------------------------------------------------------------


NAMES = [
    b"with space", b"co:lon", b"quo'te\"", b"new\nline", b"-rf", "é".encode(), b"x" * 255,
    b"\xff\xfe", b"back\\slash", b"\\x5c", b"$(touch pwned)", b"a'; touch pwned; '", b"*", b"~",
    b"tab\t", b"\x01",
]  # fmt: skip


def make_odd(folder: Path) -> None:
    folder.mkdir()
    for name in NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)


async def test_hostile_names_come_back_as_they_were(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """L24, L35: made here, listed and read by the tools there, copied back."""
    source = tmp_path / "odd"
    make_odd(source)
    async with sandbox(cluster) as host:
        await host.transfers.put("work", [str(source)])
        listed = (await tool(host, "list_files", path="odd"))["entries"]
        assert len(listed) == len(NAMES)
        for entry in listed:
            read = await tool(host, "read_file", path=entry["path"], encoding="base64")
            assert base64.b64decode(read["content"]) in NAMES
            await tool(host, "move_file", path=entry["path"], new_path="moved")
            await tool(host, "move_file", path="moved", new_path=entry["path"])
        await host.transfers.get("work", "odd", f"{tmp_path}/back")
        assert (await run(host, "ls pwned; ls ~/pwned"))["exit_code"] == 2
    back = {os.fsencode(p.name): p.read_bytes() for p in (tmp_path / "back").iterdir()}
    assert back == {name: name for name in NAMES}


async def test_parallel_writes_into_one_new_folder_are_all_seen(
    cluster: Cluster, user: str
) -> None:
    """L22"""
    async with sandbox(cluster) as host:

        async def one(number: int) -> None:
            path = f"a/b/c/{number}"
            await tool(host, "write_file", path=path, content=str(number))
            assert (await run(host, f"cat {path}"))["stdout"] == str(number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, number)


async def test_binary_and_large_files_are_equal_on_both_sides(
    cluster: Cluster, user: str, tmp_path: Path
) -> None:
    """L25, L11"""
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("x", os.urandom(100_000))
    (tmp_path / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(50_000))
    async with sandbox(cluster) as host:
        await run(host, "seq 1 2000000 > large")
        await host.transfers.put("work", [str(tmp_path / "z.zip"), str(tmp_path / "p.png")], "in/")
        sums = (await run(host, "cd in && sha256sum z.zip p.png && sha256sum ../large"))["stdout"]
        await host.transfers.get("work", "in", f"{tmp_path}/back")
        await host.transfers.get("work", "large", f"{tmp_path}/large")
        flood = await run(host, "cat large")
    wanted = [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("back/z.zip", "back/p.png", "large")
    ]
    assert [line.split()[0] for line in sums.splitlines()] == wanted
    assert (flood["stdout_truncated"], flood["stdout"].endswith("2000000\n")) == (True, True)
    assert flood["stdout_bytes"] == (tmp_path / "large").stat().st_size


async def test_a_large_stdin_and_a_large_file_pass_in_one_call(cluster: Cluster, user: str) -> None:
    """L21"""
    text = "line é\n" * 4_000_000
    async with sandbox(cluster) as host:
        facts = await run(host, "sha256sum", stdin=text)
        assert facts["stdout"].split()[0] == hashlib.sha256(text.encode()).hexdigest()
        content = text[: 5 * 1024 * 1024 // 8]
        await tool(host, "write_file", path="five", content=content)
        read = await run(host, "sha256sum < five")
        assert read["stdout"].split()[0] == hashlib.sha256(content.encode()).hexdigest()


def test_the_command_line_gives_large_binary_input(cluster: Cluster, user: str) -> None:
    assert cluster.podpipe("create", "--name", "work").returncode == 0
    ran = cluster.podpipe_fed(bytes(31_457_280), "run", "-i", "work", "--", "wc -c")
    assert (ran.stdout, ran.returncode) == ("31457280\n", 0), ran.stderr


async def test_an_append_to_what_may_not_be_written_changes_nothing(
    cluster: Cluster, user: str
) -> None:
    """L26: as the pod's user, whom the kernel does refuse."""
    async with sandbox(cluster) as host:
        await run(host, "echo old > f; chmod 0 f; mkdir d; echo old > d/f; chmod 0 d")
        for path in ("f", "d/f"):
            asked = {"path": path, "content": "new\n", "append": True}
            refused = await host.sessions.call("work", "write_file", asked)
            assert refused["isError"]
            assert "Permission denied" in refused["content"][0]["text"]
        assert (await run(host, "chmod 700 d f; cat f d/f"))["stdout"] == "old\nold\n"
