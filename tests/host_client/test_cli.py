"""The command line, as processes over the stub kubectl."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
import yaml

from host_client.cli import _parsed, _parser, main
from host_client.commands import files, look, pipes, run
from host_client.config import SETTINGS_HELP
from host_client.errors import EXIT_FAILED, UsageError
from host_client.host import Host
from tests.host_client.conftest import Podpipe, StubCluster

ROOT = Path(__file__).resolve().parents[2]


def test_a_whole_life_on_the_command_line(podpipe: Podpipe, stub: StubCluster) -> None:
    made = podpipe("create", "--name", "work", "--ttl", "30", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["phase"] == "running"
    assert "connecting" in made.stderr
    ran = podpipe("run", "work", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.returncode, ran.stdout) == (7, "out\n")
    assert ran.stderr.endswith("err\n")
    assert "work" in podpipe("list").stdout
    assert json.loads(podpipe("status", "work", "--json").stdout)["cpu_limit"] == "2"
    assert podpipe("suspend", "work").returncode == 0
    assert json.loads(podpipe("list", "--json").stdout)[0]["phase"] == "suspended"
    assert podpipe("resume", "work").returncode == 0
    assert "expires" in podpipe("extend", "work", "90").stdout
    gone = podpipe("destroy", "work", "--purge-home", "--yes", "--json")
    assert json.loads(gone.stdout)["home"] == "purged"
    assert set(stub.objects) == {"Namespace/sandbox-system"}


def test_run_keeps_argv_apart_and_takes_one_word_as_a_script(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    exact = podpipe("run", "work", "--", "printf", "%s|", "a b", "$HOME", "'", "*")
    assert exact.stdout == "a b|$HOME|'|*|"
    assert podpipe("run", "work", "--", "echo $((6*7))").stdout == "42\n"


def test_run_tells_an_end_by_signal_and_by_timeout(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    killed = podpipe("run", "work", "--", "kill -9 $$")
    assert killed.returncode == 128 + 9
    late = podpipe("run", "--timeout", "1", "work", "--", "echo before; sleep 30")
    assert (late.returncode, late.stdout) == (124, "before\n")
    assert "timed out" in late.stderr


async def test_run_tells_why_a_command_was_ended(capsys: pytest.CaptureFixture[str]) -> None:
    class Sessions:
        async def call(self, *_: Any, **__: Any) -> dict[str, Any]:
            facts = {"data": "", "cursor": 0, "dropped_bytes": 0, "eof": True, "state": "killed"}
            why = {
                "exit_code": None,
                "signal": "SIGKILL",
                "note": "[the sandbox ran out of memory]",
            }
            return {"structuredContent": facts | why}

    class Reached:
        sessions = Sessions()

    arguments = argparse.Namespace(sandbox="work", json=False, timeout=1)
    code = await run._follow(cast(Host, Reached()), arguments, "p1")
    assert code == 128 + 9
    said = "podpipe: ended by SIGKILL\npodpipe: [the sandbox ran out of memory]\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", ["run", "connect", "shell"])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--", "-x"], ["-x"]),
        (["--", "-x", "--", "y"], ["-x", "--", "y"]),
        (["--", "--json"], ["--json"]),
        (["--", "--", "y"], ["--", "y"]),
        (["--"], []),
        (["ls", "-x", "--", "y"], ["ls", "-x", "--", "y"]),
        ([], []),
    ],
)
def test_what_stands_behind_two_dashes_is_the_commands_whatever_it_is(
    name: str, typed: list[str], meant: list[str]
) -> None:
    assert pipes.command_of(_parsed([name, "work", *typed]).argv, "") == meant


def test_a_file_that_looks_like_an_option_stands_behind_two_dashes() -> None:
    assert _parsed(["put", "work", "--", "-x", "to/"]).paths == ["-x", "to/"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_defect_of_our_own_is_an_error_with_what_a_report_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    async def defective(*_: object) -> int:
        raise TypeError("no such luck")

    monkeypatch.setattr(look, "list_settings", defective)
    assert main(["settings", *(["--json"] if as_json else [])]) == EXIT_FAILED
    said = capsys.readouterr()
    assert "in defective" in said.err
    if as_json:
        error = json.loads(said.out)["error"]
        assert error["code"] == "internal_error"
        told = error["message"]
    else:
        assert said.out == ""
        told = said.err
    assert "internal error (TypeError: no such luck)" in told
    assert "report it" in told


def test_no_command_but_resume_resumes_where_the_setting_says_so(
    podpipe: Podpipe, stub: StubCluster, tmp_path: Path
) -> None:
    podpipe("create", "--name", "work")
    podpipe("suspend", "work")
    here = str(tmp_path / "here")
    for argv in (
        ["run", "work", "--", "true"],
        ["put", "work", str(stub.kubeconfig)],
        ["get", "work", "f", here],
        ["sync", "work", here, "src", "--from-sandbox"],
        ["connect", "work"],
        ["connect", "work", "--", "true"],
    ):
        refused = podpipe(*argv, PODPIPE_RESUME="manual")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "Resume it first" in refused.stderr
        assert stub.names("Pod") == []
    assert podpipe("resume", "work", PODPIPE_RESUME="manual").returncode == 0
    assert podpipe("run", "work", "--", "true", PODPIPE_RESUME="manual").returncode == 0


def test_run_gives_stdin_if_asked(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    process = podpipe.start("run", "-i", "work", "--", "cat")
    assert process.communicate("é\nb".encode(), timeout=60)[0] == "é\nb".encode()
    process = podpipe.start("run", "-i", "work", "--", "cat")
    assert process.communicate(b"\xff", timeout=60)[0] == b"\xff"


def test_run_takes_no_option_for_a_command(podpipe: Podpipe) -> None:
    ended = podpipe("run", "work", "--json", "--", "true")
    assert ended.returncode == 2
    assert "go before it" in ended.stderr
    assert "for example: podpipe run --json work -- true\n" in ended.stderr


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("work --timeout 2 -- sleep 30", "--timeout 2 work -- sleep 30"),
        ("-i work --timeout=2 sleep 30", "-i --timeout=2 work -- sleep 30"),
        ("--timeout 5 work --workdir 'a b' -- ls", "--timeout 5 --workdir 'a b' work -- ls"),
        ("work -la", "work -- -la"),
        ("work --stdin", "--stdin work -- ls"),
    ],
)
def test_run_shows_what_was_typed_in_its_right_order(
    podpipe: Podpipe, typed: str, shown: str
) -> None:
    ended = podpipe("run", *shlex.split(typed))
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"for example: podpipe run {shown}\n")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["create", "--nmae", "work"], "create"),
        (["get", "work", "a", "b", "c"], "get"),
        (["install", "codex", "--nonesuch"], "install codex"),
        (["render", "admin", "--nonesuch"], "render admin"),
    ],
)
def test_what_a_command_does_not_know_is_told_with_its_own_usage(
    podpipe: Podpipe, argv: list[str], command: str
) -> None:
    ended = podpipe(*argv)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"usage: podpipe {command} ")
    assert "unrecognized arguments: " in ended.stderr
    assert ended.stderr.endswith(f"; see `podpipe {command} --help`\n")
    error = json.loads(podpipe(argv[0], "--json", *argv[1:]).stdout)["error"]
    assert error["code"] == "usage_error"
    assert f"see `podpipe {command} --help`" in error["message"]


def test_put_says_that_the_last_argument_is_the_target(podpipe: Podpipe, tmp_path: Path) -> None:
    assert "LOCAL [LOCAL ...] [REMOTE]" in podpipe("put", "--help").stdout
    files = [str(tmp_path / name) for name in ("a", "b", "c")]
    for file in files:
        Path(file).touch()
    for paths in (files, files[:2], [files[0], str(tmp_path)]):
        ended = podpipe("put", "work", *paths)
        assert ended.returncode == 2
        assert "the last argument is the target in the sandbox" in ended.stderr
        assert f"podpipe put work {' '.join(paths)} in/" in ended.stderr


def test_put_of_several_refuses_a_file_of_this_folder_as_their_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.md").touch()
    with pytest.raises(UsageError, match=r"last argument is the target.*; notes\.md/ is a folder"):
        files._refuse_local_target("work", ["a", "b"], "notes.md")
    files._refuse_local_target("work", ["a", "b"], "notes.md/")
    files._refuse_local_target("work", ["notes.md"], "notes.md")


def test_a_home_that_another_sandbox_uses_is_not_purged_and_nothing_destroyed(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    podpipe("create", "--name", "one")
    podpipe("create", "--name", "two")
    before = set(stub.objects)
    ended = podpipe("destroy", "one", "--purge-home", "--yes")
    assert ended.returncode == 1
    assert "also used by two" in ended.stderr
    assert set(stub.objects) == before


def test_run_gives_binary_output_as_it_is(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    script = "head -c 300000 /dev/urandom > b; sha256sum < b >&2; cat b"
    process = podpipe.start("run", "work", "--", script)
    out, err = process.communicate(timeout=60)
    assert hashlib.sha256(out).hexdigest() in err.decode()


def test_run_says_and_fails_where_output_was_too_much_to_keep(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    flood = podpipe("run", "work", "--", "seq 1 3000000; sleep 3")
    if len(flood.stdout) < 22_000_000:
        assert "are missing" in flood.stderr
        assert flood.returncode == 1


def test_run_ends_with_its_command_though_a_child_holds_its_output(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    start = time.monotonic()
    ran = podpipe("run", "work", "--", "sleep 60 & echo bg")
    assert (ran.returncode, ran.stdout) == (0, "bg\n")
    assert time.monotonic() - start < 30


def test_run_stops_its_command_when_nobody_reads_its_output(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    podpipe("create", "--name", "work")
    with podpipe.start("run", "work", "--", "echo $$ > pid; exec yes") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1
    home = next((stub.folder / "homes").iterdir())
    assert not _is(int((home / "pid").read_text(encoding="utf-8")), "yes")


def _is(pid: int, name: str) -> bool:
    comm = Path(f"/proc/{pid}/comm")
    return comm.exists() and comm.read_text(encoding="utf-8").strip() == name


def test_run_refuses_what_is_no_text_before_anything_runs(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    ended = podpipe("run", "work", "--", os.fsdecode(b"touch f\xff"))
    assert ended.returncode == 2
    assert "not valid Unicode" in ended.stderr


def test_run_as_json_is_one_document(podpipe: Podpipe) -> None:
    podpipe("create", "--name", "work")
    facts = json.loads(podpipe("run", "--json", "work", "--", "echo x; exit 3").stdout)
    assert (facts["exit_code"], facts["stdout"], facts["stderr"]) == (3, "x\n", "")


def test_an_interrupted_run_stops_its_command(podpipe: Podpipe, stub: StubCluster) -> None:
    podpipe("create", "--name", "work")
    home = next((stub.folder / "homes").iterdir(), None) or stub.folder / "homes/user-alice-pvc"
    process = podpipe.start("run", "work", "--", "echo $$ > pid; exec sleep 300")
    deadline = time.monotonic() + 30
    while not (home / "pid").exists() or not (home / "pid").read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls for a file that another process writes
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    pid = int((home / "pid").read_text(encoding="utf-8"))
    assert not _is(pid, "sleep")


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["status", "nonesuch"], 3, "no sandbox 'nonesuch'"),
        (["create", "--name", "Bad"], 2, "build-1"),
        (["create", "--cpu", "lots"], 2, "cpu_limit"),
        (["create", "--ttl", "x"], 2, "invalid int"),
        (["create", "--ttl", "0"], 2, "ttl_minutes=0 has to be from 1 to 1440"),
        (["run", "work"], 2, "run needs a command"),
        (["destroy", "x", "--purge-home"], 2, "nothing was deleted; say --yes"),
        ([], 2, "COMMAND"),
        (["nonesuch"], 2, "nonesuch"),
    ],
)
def test_exit_codes_tell_usage_from_not_found(
    podpipe: Podpipe, argv: list[str], code: int, text: str
) -> None:
    ended = podpipe(*argv)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"PODPIPE_KUBECTL": "/nonexistent/kubectl"}, "PODPIPE_KUBECTL"),
        ({"KUBECONFIG": "/nonexistent/config"}, "no kubeconfig"),
        ({"PODPIPE_CONTEXT": "nonesuch"}, "context 'nonesuch' does not exist"),
    ],
)
def test_a_missing_prerequisite_has_a_code_of_its_own(
    podpipe: Podpipe, environment: dict[str, str], text: str
) -> None:
    ended = podpipe("create", **environment)
    assert ended.returncode == 4
    assert text in ended.stderr


def test_render_prints_what_create_would_make(podpipe: Podpipe, stub: StubCluster) -> None:
    documents = list(yaml.safe_load_all(podpipe("render", "--name", "work").stdout))
    assert [d["kind"] for d in documents] == [
        "Namespace",
        "PersistentVolumeClaim",
        "ConfigMap",
        "Pod",
    ]
    assert not (stub.folder / "calls.jsonl").exists()


def test_doctor_is_content_with_a_good_cluster_and_names_the_first_fault(
    podpipe: Podpipe, stub: StubCluster
) -> None:
    fine = podpipe("doctor")
    assert fine.returncode == 0, fine.stdout
    assert "ok       permissions: all" in fine.stdout
    stub.faults(version={"stderr": "Unable to connect to the server: no such host"})
    broken = podpipe("doctor", "--json")
    assert broken.returncode == 1
    last = json.loads(broken.stdout)[-1]
    assert (last["check"], last["result"]) == ("API server", "failure")
    assert last["fix"]


@pytest.mark.parametrize(
    ("environment", "check", "fix"),
    [
        ({"PODPIPE_KUBECTL": "/nonexistent/kubectl"}, "kubectl", "install kubectl"),
        ({"KUBECONFIG": "/nonexistent/config"}, "kubeconfig", "set KUBECONFIG"),
        ({"DEFAULT_STORAGE_CLASS": "nonesuch"}, "storageclass", "get storageclass` lists"),
    ],
)
def test_a_fault_that_doctor_finds_has_a_fix_to_follow(
    podpipe: Podpipe, environment: dict[str, str], check: str, fix: str
) -> None:
    report = podpipe("doctor", "--json", **environment)
    assert report.returncode == 1
    (fault,) = [row for row in json.loads(report.stdout) if row["result"] == "failure"]
    assert fault["check"] == check
    assert fix in fault["fix"]
    assert "set KUBECONFIG" not in fault["detail"]
    assert "give the absolute path" not in fault["detail"]


def test_settings_are_all_listed_with_their_values_and_where_those_come_from(
    podpipe: Podpipe, tmp_path: Path
) -> None:
    env_file = tmp_path / "settings.env"
    env_file.write_text("DEFAULT_TTL_MINUTES=90\n", encoding="utf-8")
    listed = json.loads(
        podpipe("settings", "--json", PODPIPE_ENV_FILE=str(env_file), NAMESPACE="team").stdout
    )
    assert [row["name"] for row in listed] == list(SETTINGS_HELP)
    rows = {row["name"]: (row["value"], row["source"], row["default"]) for row in listed}
    assert rows["NAMESPACE"] == ("team", "environment", "sandbox-system")
    assert rows["DEFAULT_TTL_MINUTES"] == ("90", str(env_file), "60")
    assert rows["MAX_TTL_MINUTES"] == ("1440", "default", "1440")
    assert rows["PODPIPE_LOG_FILE"][0] == str(tmp_path / ".local/state/podpipe/serve.log")


@pytest.mark.parametrize(
    ("argv", "exit_code", "code"),
    [
        (["status", "nonesuch", "--json"], 3, "sandbox_not_found"),
        (["create", "--json", "--name", "Bad"], 2, "usage_error"),
        (["create", "--json", "--ttl", "x"], 2, "usage_error"),
        (["run", "--json", "nonesuch", "--", "true"], 3, "sandbox_not_found"),
    ],
)
def test_under_json_an_error_is_the_document(
    podpipe: Podpipe, argv: list[str], exit_code: int, code: str
) -> None:
    ended = podpipe(*argv)
    assert ended.returncode == exit_code
    (error,) = json.loads(ended.stdout).values()
    assert error["code"] == code
    assert error["message"]


def test_a_json_flag_of_the_command_that_is_run_is_not_ours(podpipe: Podpipe) -> None:
    ended = podpipe("run", "--nonesuch", "work", "--", "jq", "--json")
    assert (ended.returncode, ended.stdout) == (2, "")


PIPES = ("serve", "connect", "shell", "ssh-proxy")
"""What they carry on stdin and stdout is somebody else's."""


@pytest.mark.parametrize("command", PIPES)
def test_a_pipe_offers_no_json(podpipe: Podpipe, command: str) -> None:
    assert "--json" not in podpipe(command, "--help").stdout


def test_help_shows_the_defaults_of_a_new_sandbox(podpipe: Podpipe) -> None:
    text = " ".join(podpipe("create", "--help").stdout.split())
    for default in (
        "DEFAULT_TTL_MINUTES, which is 60",
        "DEFAULT_CPU_LIMIT, which is 2",
        "DEFAULT_MEMORY_LIMIT, which is 4Gi",
    ):
        assert default in text


def test_every_command_has_help_with_an_example() -> None:
    (commands,) = [a for a in _parser()._actions if a.dest == "name"]
    assert commands.choices
    for name, sub in dict(commands.choices).items():
        assert f"example:\n  podpipe {name}" in sub.format_help()


def test_every_command_that_is_no_pipe_takes_json() -> None:
    (commands,) = [a for a in _parser()._actions if a.dest == "name"]
    assert commands.choices
    for name, sub in dict(commands.choices).items():
        assert ("--json" in sub.format_help()) == (name not in PIPES), name


@pytest.mark.parametrize(
    "argv", [["install", "--json", "codex"], ["install", "codex", "--json"]], ids=str
)
def test_install_takes_json_at_either_place(podpipe: Podpipe, argv: list[str]) -> None:
    assert json.loads(podpipe(*argv, "--dry-run").stdout)["client"] == "codex"


def test_a_reader_that_goes_away_is_no_traceback(podpipe: Podpipe) -> None:
    with podpipe.start("settings") as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_client_proves_the_main_job_and_leaves_nothing(
    podpipe: Podpipe, stub: StubCluster, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    ran = subprocess.run(
        [sys.executable, str(ROOT / "host_client/client.py"), "--json", "--junit", str(report)],
        capture_output=True,
        text=True,
        timeout=120,
        env=stub.environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["ok"]
    assert len(facts["blocks"]) == 4
    sums = {facts["blocks"][0]["facts"]["wrote"]["sha256"], facts["blocks"][3]["facts"]["sha256"]}
    assert len(sums) == 1
    assert ElementTree.parse(report).getroot().attrib["failures"] == "0"
    assert set(stub.objects) == {"Namespace/sandbox-system"}


def test_client_that_is_cancelled_cleans_up(stub: StubCluster) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "host_client.client"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=stub.environment | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    for line in process.stdout:
        if b"write_random_blob(" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert set(stub.objects) == {"Namespace/sandbox-system"}


def test_client_that_is_cancelled_while_it_cleans_up_still_leaves_nothing(
    stub: StubCluster,
) -> None:
    """The signal broke through the shield, and the throw-away home stayed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "host_client.client"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=stub.environment | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    for line in process.stdout:
        if b"round-trip back to the host" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert set(stub.objects) == {"Namespace/sandbox-system"}


def test_client_fails_loudly_when_the_home_is_lost(stub: StubCluster) -> None:
    """The stub loses the home with the pod, as an emptyDir would."""
    stub.faults(lose_home={"lose": True})
    ran = subprocess.run(
        [sys.executable, "-m", "host_client.client"],
        capture_output=True,
        text=True,
        timeout=120,
        env=stub.environment | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ran.returncode == 1
    assert "list_blobs after the restart: got [], expected ['random.bin']" in ran.stderr
    assert set(stub.objects) == {"Namespace/sandbox-system"}
