"""ssh into a real pod: as uid 1000 without a capability, over `kubectl exec -i`, with OpenSSH's own tools."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from host_client.host import Host
from tests.cluster.conftest import ROOT, Cluster
from tests.cluster.test_lifetime import IDLE_SECONDS, phase
from tests.host_client.test_forward import free_port
from tests.host_client.test_ssh import PATIENCE, read_until, tree
from tests.idling import idle_after
from tests.in_pod_server.support import eventually

BOUND = 60
ALIAS = "podpipe-work"


@pytest.fixture(scope="module")
def client(cluster: Cluster, sandbox: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that have plain ssh read what ssh-config printed, and nothing of ours in its way."""
    said = cluster.podpipe("ssh-config", sandbox)
    assert said.returncode == 0, said.stderr
    path = tmp_path_factory.mktemp("ssh") / "config"
    path.write_text(said.stdout, encoding="utf-8")
    return ["-F", str(path)]


def plainly(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """A program that knows nothing of podpipe: the entry alone has to tell it all."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return subprocess.run(
        argv, env=environment, input=stdin, capture_output=True, timeout=BOUND, check=False, cwd="/"
    )


def shell(cluster: Cluster, *command: str, **streams: Any) -> subprocess.Popen[bytes]:
    words = ["--", *command] if command else []
    return subprocess.Popen(
        [sys.executable, "-m", "host_client", "shell", "work", *words],
        env=os.environ | cluster.environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        cwd="/",
        **streams,
    )


def test_plain_ssh_is_the_sandboxs_user_in_its_home_with_no_right_beyond(
    sandbox: str, client: list[str]
) -> None:
    script = "id -u; pwd; echo $PATH; grep CapEff /proc/self/status; cat /proc/self/oom_score_adj"
    ended = plainly("ssh", *client, ALIAS, script)
    assert ended.stdout.decode().splitlines() == [
        "1000",
        "/home/sandbox",
        "/home/sandbox/.local/bin:/usr/local/bin:/usr/bin:/bin",
        "CapEff:\t0000000000000000",
        "1000",
    ], ended.stderr
    assert ended.stderr == b""


def test_plain_ssh_is_let_in_right_after_another_that_has_just_ended(
    sandbox: str, client: list[str]
) -> None:
    """ssh reads the key before it starts what would make one: it must not be gone or another then."""
    argv = ["ssh", *client, ALIAS, "true"]
    # No pipes: they would be waited for until the one before has wholly ended.
    codes = [
        subprocess.call(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=BOUND)
        for _ in range(12)
    ]
    assert codes == [0] * 12


@pytest.mark.parametrize("script", ["exit 7", "exit 0", "exit 255"])
def test_plain_ssh_ends_with_the_commands_code(
    sandbox: str, client: list[str], script: str
) -> None:
    assert plainly("ssh", *client, ALIAS, script).returncode == int(script.split()[1])


def test_scp_sftp_and_rsync_move_a_tree_both_ways(
    sandbox: str, client: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "tree"
    (source / "deep/er").mkdir(parents=True)
    for number in range(200):
        (source / f"deep/er/{number}").write_bytes(os.urandom(number * 31))
    (source / "large ü").write_bytes(os.urandom(8_000_000))
    options = " ".join(client)
    for name, tool, end in (
        ("scp", ["scp", "-q", "-r", *client], ""),
        ("scp-of-old", ["scp", "-q", "-r", "-O", *client], ""),
        ("rsync", ["rsync", "-a", "-e", f"ssh {options}"], "/."),
    ):
        up = plainly(*tool, f"{source}{end}", f"{ALIAS}:{name}-tree")
        assert up.returncode == 0, up.stderr
        down = plainly(*tool, f"{ALIAS}:{name}-tree{end}", str(tmp_path / name))
        assert down.returncode == 0, down.stderr
        assert tree(tmp_path / name) == tree(source)
    script = (
        f"put -R {source} sftp-tree\nget -R sftp-tree {tmp_path}/sftp\nls sftp-tree/deep/er/199\n"
    )
    batch = plainly("sftp", "-q", "-b", "-", *client, ALIAS, stdin=script.encode())
    assert b"sftp-tree/deep/er/199" in batch.stdout, batch.stderr
    assert tree(tmp_path / "sftp") == tree(source)


def test_a_master_carries_many_commands_and_a_forward_as_an_editor_uses_them(
    sandbox: str, client: list[str], tmp_path: Path
) -> None:
    control = [*client, "-o", f"ControlPath={tmp_path}/m"]
    master = subprocess.Popen(
        ["ssh", "-M", "-N", *control, "-L", f"{tmp_path}/web:127.0.0.1:8099", ALIAS],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )
    try:
        eventually((tmp_path / "m").exists)
        serve = "cd /tmp && echo served > page && exec python3 -m http.server -b 127.0.0.1 8099"
        plainly("ssh", *control, ALIAS, f"setsid bash -c '{serve}' >/dev/null 2>&1 &")
        many = [
            subprocess.Popen(["ssh", *control, ALIAS, f"echo {n}"], stdout=subprocess.PIPE)
            for n in range(20)
        ]
        assert [each.communicate(timeout=BOUND)[0] for each in many] == [
            b"%d\n" % n for n in range(20)
        ]
        got = plainly(
            "curl", "-sS", "--retry", "20", "--retry-delay", "1", "--retry-all-errors",
            "--unix-socket", f"{tmp_path}/web", "http://x/page",
        )  # fmt: skip
        assert got.stdout == b"served\n", got.stderr
        plainly("ssh", *control, ALIAS, "pkill -f 'http.server -b 127.0.0.1 8099'")
    finally:
        master.terminate()
        master.wait(BOUND)


def test_a_script_on_stdin_starts_a_server_that_a_dynamic_forward_reaches(
    sandbox: str, client: list[str]
) -> None:
    """As VS Code's Remote-SSH connects: one ssh, `bash -s`, and SOCKS to whatever port that tells."""
    server = (
        "import http.server as h\n"
        "s = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)\n"
        "print(s.server_address[1], flush=True)\n"
        "s.serve_forever()\n"
    )
    script = f"cd /etc && exec python3 -c {shlex.quote(server)}\n"
    socks = free_port()
    process = subprocess.Popen(
        ["ssh", "-T", "-D", f"127.0.0.1:{socks}", *client, ALIAS, "bash", "-s"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(script.encode())
        process.stdin.flush()
        there = int(process.stdout.readline())
        proxy = ["curl", "-sS", "--socks5-hostname", f"127.0.0.1:{socks}"]
        many = [
            subprocess.Popen(
                [*proxy, f"http://localhost:{there}/os-release"], stdout=subprocess.PIPE
            )
            for _ in range(20)
        ]
        heard = {each.communicate(timeout=BOUND)[0] for each in many}
        assert len(heard) == 1
        assert b"NAME=" in heard.pop()
        nobody = plainly(*proxy, "http://127.0.0.1:9/")
        assert (nobody.returncode, nobody.stdout) == (97, b""), "SOCKS says that it was refused"
        assert plainly(*proxy, f"http://127.0.0.1:{there}/hostname").returncode == 0
    finally:
        process.terminate()
        process.communicate(timeout=BOUND)


def test_shell_on_a_terminal_follows_its_size_and_passes_signals_and_the_exit_code(
    cluster: Cluster, sandbox: str
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    process = shell(cluster, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, b"trap 'stty size' WINCH; stty size; pwd\n")
    read_until(ours, rb"33 101\r\n/home/sandbox\r\n")
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 77, 0, 0))
    # Not its controlling terminal here, so the kernel does not tell it.
    os.killpg(process.pid, signal.SIGWINCH)
    read_until(ours, rb"20 77\r\n")
    os.write(ours, b"sleep 600; echo interrupted $?\n")
    read_until(ours, rb"sleep 600")
    deadline = time.monotonic() + PATIENCE
    while b"sleep" not in cluster.podpipe("run", "work", "--", "ps -eo comm").stdout.encode():
        assert time.monotonic() < deadline
    os.write(ours, b"\x03")
    os.write(ours, b"echo after; exit 5\n")
    read_until(ours, rb"after\r\n")
    assert process.wait(PATIENCE) == 5
    os.close(ours)


def test_nothing_of_a_shell_or_its_sshd_is_left_when_it_is_killed(
    cluster: Cluster, sandbox: str
) -> None:
    process = shell(cluster, "echo up; read line", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == b"up\n"
    assert cluster.podpipe("run", "work", "--", "pgrep -x sshd-session").returncode == 0
    process.kill()
    process.communicate()
    script = "for i in $(seq 100); do pgrep -x sshd-session >/dev/null || exit 0; sleep 0.1; done; exit 1"
    left = cluster.podpipe("run", "work", "--", script)
    assert left.returncode == 0, cluster.podpipe("run", "work", "--", "ps axfww").stdout


async def test_a_shell_keeps_an_idle_sandbox_from_ending_itself(
    cluster: Cluster, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_after(IDLE_SECONDS, monkeypatch)
    with anyio.fail_after(170):
        async with Host(cluster.settings(IDLE_SUSPEND_MINUTES="1")) as host:
            await host.launcher.create(name="work")
            process = shell(
                cluster, f"sleep {4 * IDLE_SECONDS}; echo whole", stdout=subprocess.PIPE
            )
            out, _ = await anyio.to_thread.run_sync(process.communicate)
            assert (process.returncode, out) == (0, b"whole\n"), "it was cut off"
            await phase(host, "suspended")
