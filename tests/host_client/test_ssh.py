"""ssh into a sandbox as a process over the stub kubectl, whose pods have this machine's sshd."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from host_client import ssh
from host_client.errors import PrerequisiteError
from host_client.interrupts import EXIT_INTERRUPTED
from tests.host_client.conftest import Podpipe, StubCluster
from tests.in_pod_server.support import eventually

PATIENCE = 20.0
ALIAS = "podpipe-work"


@pytest.fixture(autouse=True, scope="module")
def separation() -> None:
    """An sshd that root starts wants its folder, which a boot makes, or a package's service."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@pytest.fixture
def runtime(stub: StubCluster, podpipe: Podpipe) -> Iterator[Path]:
    """Where keys lie while they are used; a process's own are gone when a test is over."""
    # Short, as a unix socket's path has to be.
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        podpipe.environment["XDG_RUNTIME_DIR"] = folder
        yield Path(folder) / "podpipe"
        assert [*Path(folder).glob("podpipe/ssh-*")] == []


def keys(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.fixture
def work(podpipe: Podpipe, runtime: Path) -> str:
    """A sandbox."""
    assert podpipe("create", "--name", "work").returncode == 0
    return "work"


@pytest.fixture
def client(podpipe: Podpipe, work: str, tmp_path: Path) -> list[str]:
    """The options of plain ssh that have it use the entry of ssh-config."""
    said = podpipe("ssh-config", work)
    assert said.returncode == 0, said.stderr
    path = tmp_path / "ssh_config"
    path.write_text(said.stdout, encoding="utf-8")
    # In a pod that is `sandbox`; here the daemon runs as whoever tests.
    return ["-F", str(path), "-o", f"User={getpass.getuser()}"]


def plainly(podpipe: Podpipe, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv, env=podpipe.environment, input=stdin, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("script", "code"), [("true", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_shell_ends_as_its_command_does(
    podpipe: Podpipe, work: str, script: str, code: int
) -> None:
    assert podpipe("shell", work, "--", script).returncode == code


def test_shell_takes_words_or_a_script_as_run_does(podpipe: Podpipe, work: str) -> None:
    words = podpipe("shell", work, "--", "printf", "%s|", "a b", "$HOME", "'")
    assert words.stdout == "a b|$HOME|'|"
    assert (
        podpipe("shell", work, "--", "echo out; echo apart >&2; cd / && pwd").stdout == "out\n/\n"
    )


def test_shell_changes_no_byte_of_what_is_piped_through_it(podpipe: Podpipe, work: str) -> None:
    data = os.urandom(3_000_000)
    process = podpipe.start("shell", work, "--", "cat")
    out, err = process.communicate(data, timeout=60)
    assert process.returncode == 0, err.decode()
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()


def test_shell_without_a_command_or_a_terminal_reads_a_script(podpipe: Podpipe, work: str) -> None:
    process = podpipe.start("shell", work)
    out, _ = process.communicate(b"echo one\nexit 9\n", timeout=60)
    assert (process.returncode, out) == (9, b"one\n")


def test_a_session_has_a_commands_path_and_home_and_nothing_of_this_machine(
    podpipe: Podpipe, work: str, stub: StubCluster
) -> None:
    (home,) = stub.folder.glob("homes/*")
    there = podpipe("run", work, "--", "echo $PATH $HOME $LC_ALL").stdout
    seen = podpipe(
        "shell", work, "--", "echo $PATH $HOME $LC_ALL; env",
        LC_ALL="de_DE.UTF-8", LANG="de_DE.UTF-8", SSH_AUTH_SOCK="/nonesuch", DISPLAY=":0",
    ).stdout  # fmt: skip
    assert seen.startswith(there)
    assert str(home) in there
    named = {line.partition("=")[0] for line in seen.splitlines()}
    assert not {"SSH_AUTH_SOCK", "DISPLAY", "LOGIN_PASSPHRASE", "KUBECONFIG"} & named
    assert "de_DE" not in seen


@pytest.mark.parametrize("options", [("-A",), ("-X",), ("-R", "0:127.0.0.1:9")], ids=str)
def test_the_sandbox_refuses_what_would_reach_back(
    podpipe: Podpipe, work: str, client: list[str], options: tuple[str, ...]
) -> None:
    """Even where a person asks for it: an agent, a display, a port of theirs."""
    asked = [*options, "-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO"]
    ended = plainly(
        podpipe, "ssh", *asked, *client, ALIAS, "echo ${SSH_AUTH_SOCK-none} ${DISPLAY-none}"
    )
    assert ended.returncode == ssh.LOST if "-R" in options else ended.stdout == b"none none\n"


def test_no_file_of_the_home_changes_how_a_session_starts(
    podpipe: Podpipe, work: str, stub: StubCluster, client: list[str]
) -> None:
    (home,) = stub.folder.glob("homes/*")
    (home / ".ssh").mkdir()
    (home / ".ssh/rc").write_text("echo rc >&2\n", encoding="utf-8")
    (home / ".ssh/environment").write_text("LEAK=yes\n", encoding="utf-8")
    ended = plainly(podpipe, "ssh", *client, ALIAS, "echo ${LEAK-none}")
    # How sshd ended may be the last thing that kubectl says.
    said = re.sub(rb"command terminated with exit code \d+\n", b"", ended.stderr)
    assert (ended.stdout, said) == (b"none\n", b"")


def terminal(
    podpipe: Podpipe, *argv: str, size: tuple[int, int]
) -> tuple[int, subprocess.Popen[bytes]]:
    """Start podpipe on a terminal of its own; our end of that."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = subprocess.Popen(
        ["setsid", "-c", sys.executable, "-m", "host_client", *argv],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=podpipe.environment | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    return ours, process


def read_until(fd: int, pattern: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + PATIENCE
    while not re.search(pattern, seen):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen
        try:
            seen += os.read(fd, 65536)
        except OSError:  # the other side is closed
            break
    assert re.search(pattern, seen), seen
    return seen


def test_shell_on_a_terminal_has_its_size_follows_it_and_passes_ctrl_c(
    podpipe: Podpipe, work: str
) -> None:
    script = "trap 'stty size' WINCH; trap 'echo got it; exit 5' INT; stty size; while :; do sleep 0.1; done"
    ours, process = terminal(podpipe, "shell", work, "--", script, size=(33, 101))
    read_until(ours, rb"33 101\r\n")
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 77, 0, 0))
    read_until(ours, rb"20 77\r\n")
    os.write(ours, b"\x03")
    read_until(ours, rb"got it\r\n")
    assert process.wait(PATIENCE) == 5
    os.close(ours)


def test_shell_alone_on_a_terminal_is_interactive(podpipe: Podpipe, work: str) -> None:
    ours, process = terminal(podpipe, "shell", work, size=(24, 80))
    os.write(ours, b"case $- in *i*) echo inter''active; esac; exit 3\n")
    read_until(ours, rb"interactive\r\n")
    assert process.wait(PATIENCE) == 3
    os.close(ours)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_shell_leaves_nothing_of_its_command(
    podpipe: Podpipe, work: str, tmp_path: Path, number: signal.Signals
) -> None:
    script = "trap '' TERM HUP INT; echo $$; exec sleep 600"
    process = podpipe.start("shell", work, "--", script)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_INTERRUPTED
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_shell_resumes_a_suspended_sandbox_unless_that_is_by_request_only(
    podpipe: Podpipe, work: str
) -> None:
    podpipe("suspend", work)
    refused = podpipe("shell", work, "--", "true", PODPIPE_RESUME="manual")
    assert refused.returncode == 1
    assert "suspended" in refused.stderr
    assert podpipe("shell", work, "--", "echo back").stdout == "back\n"


@pytest.mark.parametrize("command", ["shell", "ssh-config"])
def test_without_ssh_here_one_line_says_what_to_install(
    podpipe: Podpipe, work: str, tmp_path: Path, command: str
) -> None:
    ended = podpipe(command, work, PATH=str(tmp_path))
    assert ended.returncode == PrerequisiteError.exit_code
    assert ended.stderr.count("\n") == 1
    assert "no ssh on PATH: install OpenSSH's client" in ended.stderr


@pytest.mark.parametrize("command", ["shell", "ssh-config"])
def test_a_sandbox_that_is_not_there_is_told_as_everywhere(
    podpipe: Podpipe, runtime: Path, command: str
) -> None:
    ended = podpipe(command, "nonesuch")
    assert ended.returncode == 3
    assert "nonesuch" in ended.stderr


def test_another_host_key_than_the_daemons_is_refused(
    podpipe: Podpipe, work: str, stub: StubCluster, client: list[str]
) -> None:
    """Whatever answers in the pod: it does not get the session unless it is the one introduced."""
    (folder,) = stub.folder.glob("pods/*/run")
    assert plainly(podpipe, "ssh", *client, ALIAS, "true").returncode == 0
    other = stub.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    (folder / "ssh/host_key").write_bytes(other.read_bytes())
    ended = plainly(podpipe, "ssh", *client, ALIAS, "true")
    assert ended.returncode == ssh.LOST
    assert b"REMOTE HOST IDENTIFICATION HAS CHANGED" in ended.stderr
    # Likewise in the program's own connections.
    assert podpipe("shell", work, "--", "true").returncode == ssh.LOST


def test_scp_and_rsync_move_a_tree_through_the_entry_both_ways(
    podpipe: Podpipe, stub: StubCluster, client: list[str], tmp_path: Path
) -> None:
    (home,) = stub.folder.glob("homes/*")
    source = tmp_path / "tree"
    (source / "deep").mkdir(parents=True)
    for name in ("a b", "deep/ü", "deep/empty"):
        (source / name).write_bytes(b"" if name.endswith("empty") else os.urandom(100_000))
    scp = ["scp", "-q", "-r", *client]
    rsync = ["rsync", "-a", "-e", "ssh " + " ".join(client)]
    for number, tool in enumerate((scp, rsync)):
        there = f"{ALIAS}:{home}/copy{number}"
        up = plainly(podpipe, *tool, str(source), there)
        down = plainly(podpipe, *tool, there, str(tmp_path / f"back{number}"))
        assert (up.returncode, down.returncode) == (0, 0), (up.stderr, down.stderr)
        # scp makes the copy itself, rsync puts the folder into it.
        back = tmp_path / f"back{number}"
        assert tree(back if number == 0 else back / f"copy{number}" / "tree") == tree(source)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_connections_at_once_share_the_key(
    podpipe: Podpipe, client: list[str], runtime: Path
) -> None:
    argv = ["ssh", *client, ALIAS, "echo up; read -r line; echo $line"]
    several = [
        subprocess.Popen(
            argv, env=podpipe.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    for process in several:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
    (folder,) = runtime.glob("config-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys(folder)} == {0o600}
    assert len(keys(folder)) == 3
    for number, process in enumerate(several):
        out, _ = process.communicate(b"%d\n" % number, timeout=PATIENCE)
        assert out == b"%d\n" % number


def test_the_key_of_plain_ssh_is_the_same_until_it_has_not_been_used_for_an_hour(
    tmp_path: Path,
) -> None:
    """ssh reads it before it starts what would make it."""
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = ssh.shared_folder(environment, "work-12345678")
    made = []
    for unused in (0.0, ssh.KEPT_SECONDS - 60, ssh.KEPT_SECONDS + 60):
        with ssh.shared_keys(folder) as keys:
            made.append(keys.private.read_bytes())
        then = time.time() - unused
        os.utime(folder / "used.lock", (then, then))
        with ssh.own_keys(environment):
            assert keys.private.exists() is (unused < ssh.KEPT_SECONDS)
    with ssh.shared_keys(folder) as keys:
        made.append(keys.private.read_bytes())
    assert made[0] == made[1] == made[2] != made[3]


def test_a_key_that_is_used_stays_however_long(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = ssh.shared_folder(environment, "work-12345678")
    with ssh.shared_keys(folder) as keys:
        os.utime(folder / "used.lock", (0, 0))
        with ssh.own_keys(environment):
            assert keys.private.exists()


@pytest.mark.parametrize("left", ["ssh-killed", "config-killed"])
def test_what_was_left_goes_with_the_next(
    podpipe: Podpipe, work: str, runtime: Path, left: str
) -> None:
    runtime.mkdir(mode=0o700)
    folder = runtime / left
    folder.mkdir()
    for name in ("used.lock", "key", "key.pub", "known_hosts"):
        (folder / name).touch()
    os.utime(folder / "used.lock", (0, 0))
    assert podpipe("shell", work, "--", "true").returncode == 0
    assert [path.name for path in runtime.iterdir()] == ["change.lock"]


def test_no_key_is_in_an_argv_or_in_what_is_printed(
    podpipe: Podpipe, work: str, stub: StubCluster
) -> None:
    said = podpipe("ssh-config", work, "--json")
    facts = json.loads(said.stdout)
    assert facts["host"] == ALIAS
    podpipe("shell", work, "--", "true")
    (folder,) = stub.folder.glob("pods/*/run/ssh")
    (line,) = (folder / "authorized_keys").read_text("ascii").splitlines()
    public = line.split()[-1]
    assert public not in facts["config"]
    assert public not in (stub.folder / "calls.jsonl").read_text("utf-8")


def test_a_runtime_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = ssh.runtime_folder(environment)
    folder.chmod(0o755)
    with pytest.raises(PrerequisiteError, match="is not yours alone"):
        ssh.runtime_folder(environment)
    folder.rmdir()
    folder.symlink_to("/tmp")
    with pytest.raises(PrerequisiteError, match="is not yours alone"):
        ssh.runtime_folder(environment)
