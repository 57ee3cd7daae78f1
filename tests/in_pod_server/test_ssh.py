"""Whom ssh lets in: the keys, and what the pod's end of a connection is started with."""

from __future__ import annotations

import base64
import stat
import threading
from pathlib import Path

import pytest

from in_pod_server import contract, ssh
from in_pod_server.errors import ArgumentError, FileFailedError, StartFailedError
from in_pod_server.launch import Launcher


def key(number: int) -> str:
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + number.to_bytes(32, "big")
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


@pytest.fixture
def door(tmp_path: Path) -> ssh.Ssh:
    launcher = Launcher(home=tmp_path, run_dir=tmp_path, user="u", tmp_dir=Path("/tmp"))
    return ssh.Ssh(launcher, tmp_path / "ssh")


def test_a_key_is_admitted_once_and_the_host_key_stays_the_same(
    door: ssh.Ssh, tmp_path: Path
) -> None:
    facts = [door.admit(key(number)) for number in (1, 2, 1)]
    assert len({str(each[contract.SSH_HOST_KEY]) for each in facts}) == 1
    lines = (tmp_path / "ssh/authorized_keys").read_text().splitlines()
    assert [line.rpartition("ssh-ed25519")[2].strip() for line in lines] == [
        key(number).split()[1] for number in (2, 1)
    ]
    assert all(line.startswith("restrict,pty,port-forwarding ") for line in lines)


def test_only_the_last_keys_are_kept(door: ssh.Ssh, tmp_path: Path) -> None:
    for number in range(ssh.KEPT_KEYS + 3):
        door.admit(key(number))
    text = (tmp_path / "ssh/authorized_keys").read_text()
    assert len(text.splitlines()) == ssh.KEPT_KEYS
    assert key(2) not in text
    assert key(3) in text


def test_keys_that_come_at_once_are_all_admitted(door: ssh.Ssh, tmp_path: Path) -> None:
    threads = [threading.Thread(target=door.admit, args=(key(number),)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = (tmp_path / "ssh/authorized_keys").read_text()
    assert all(key(number) in text for number in range(20))


def test_nobody_else_may_read_what_lies_there(door: ssh.Ssh, tmp_path: Path) -> None:
    door.admit(key(1))
    folder = tmp_path / "ssh"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes.pop("ssh") == 0o700
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    "given",
    ["", "ssh-rsa AAAA", f"{key(1)} comment", f'command="id" {key(1)}', f"{key(1)}\n{key(2)}"],
)
def test_what_is_no_such_key_is_refused(door: ssh.Ssh, tmp_path: Path, given: str) -> None:
    with pytest.raises(ArgumentError, match="not an Ed25519 public key"):
        door.admit(given)
    assert not (tmp_path / "ssh").exists()


def test_an_image_without_sshd_is_told(door: ssh.Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "SSHD", "/nonesuch")
    with pytest.raises(StartFailedError, match="image has no /nonesuch: add openssh-server"):
        door.admit(key(1))


def test_a_folder_that_cannot_be_written_is_told(door: ssh.Ssh, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("in the way")
    with pytest.raises(FileFailedError, match="ssh cannot be prepared in"):
        door.admit(key(1))
