"""The cluster that is up and the image that is loaded: what the other cluster tests stand on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host_client.local import engines
from host_client.local.cluster import Choice
from host_client.local.console import Console
from host_client.local.image import apt_settings
from host_client.local.tools import cache_home, exclusive, image_name
from in_pod_server import contract
from tests.local.stubs import CHECKOUT

pytestmark = pytest.mark.cluster

READY_SECONDS = 60
POD = "podpipe-image-test"


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CHECKOUT / "scripts" / name, *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_status_says_up_with_the_image_loaded() -> None:
    status = script("cluster", "status", "--json")

    assert status.returncode == 0, status.stderr
    answer = json.loads(status.stdout)
    assert answer["up"]
    assert answer["image"] == {"name": image_name(), "loaded": True}


def test_up_of_a_cluster_that_is_up_takes_no_time_and_changes_nothing() -> None:
    assert script("cluster", "up").returncode == 0


@pytest.fixture(scope="module")
def kubectl() -> list[str]:
    provider = Choice(os.environ, Console()).current()
    assert provider is not None, "run `scripts/cluster up` first"
    return provider.access().argv("--namespace", "default")


@pytest.fixture(scope="module")
def pod(kubectl: list[str]) -> Iterator[list[str]]:
    """A pod of the image, as locked down as a sandbox; the argv of an exec into it."""
    spec: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": contract.CONTAINER,
                    "image": image_name(),
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["/usr/bin/tini", "--", "sleep", "infinity"],
                    "securityContext": {
                        "runAsNonRoot": True,
                        "readOnlyRootFilesystem": True,
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        },
    }
    delete = [*kubectl, "delete", "pod", POD, "--ignore-not-found", "--now"]
    subprocess.run(delete, capture_output=True, check=True)
    subprocess.run(
        [*kubectl, "apply", "-f", "-"], input=json.dumps(spec).encode(), check=True, stdout=-3
    )
    wait = [*kubectl, "wait", "--for=condition=Ready", f"pod/{POD}", f"--timeout={READY_SECONDS}s"]
    subprocess.run(wait, check=True, stdout=-3)
    yield [*kubectl, "exec", POD, "--"]
    subprocess.run([*delete, "--wait=false"], capture_output=True, check=True)


def says(pod: list[str], *command: str) -> str:
    done = subprocess.run(
        [*pod, *command], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_image_runs_as_the_user_of_the_contract(pod: list[str]) -> None:
    told = says(pod, "sh", "-c", "id -u; id -g; id -un; echo $HOME; pwd")

    assert told.split() == ["1000", "1000", contract.USER, contract.HOME, contract.HOME]


def test_the_image_has_every_program_that_a_sandbox_promises(pod: list[str]) -> None:
    programs = {"bash", "curl", "git", "gzip", "ps", "python3", "rg", "rsync", "ssh", "tar", "tini"}

    found = says(pod, "which", *programs, "/usr/sbin/sshd").split()

    assert {Path(path).name for path in found} == {*programs, "sshd"}


def test_no_program_of_the_image_can_raise_its_rights(pod: list[str]) -> None:
    assert says(pod, "sh", "-c", "find / -xdev -type f -perm /6000 2>/dev/null || true") == ""


def test_no_host_key_is_baked_in(pod: list[str]) -> None:
    assert says(pod, "sh", "-c", "ls /etc/ssh | grep ^ssh_host || true") == ""


def test_the_images_own_python_finds_our_code_alone(pod: list[str]) -> None:
    code = "import in_pod_server.contract as c, mcp; print(c.__file__)"

    found = says(pod, contract.PYTHON, "-I", "-c", code)

    assert found == f"{contract.APP_DIR}/in_pod_server/contract.py"


def test_an_import_neither_compiles_nor_writes(pod: list[str]) -> None:
    """`-v` says of each module whether its bytecode was used as it is."""
    code = "import in_pod_server.contract, mcp.server"
    done = subprocess.run(
        [*pod, contract.PYTHON, "-I", "-v", "-c", code],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert "in_pod_server/__pycache__/contract.cpython" in done.stderr
    assert "wrote '" not in done.stderr
    assert not re.search(r"code object from '/(?:app|opt)[^']*\.py'", done.stderr)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    """The image as its builder has it."""
    console = Console()
    engine = engines.choose(cache_home(), console)
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    with exclusive(cache_home() / "image.lock"):
        engine.save(image_name(), archive)
    with tarfile.open(archive) as opened:
        yield opened
    archive.unlink()


def test_nothing_of_the_build_machine_is_in_any_layer(layers: tarfile.TarFile) -> None:
    """Certificates of an intercepting proxy and apt's settings are build secrets."""
    bundle = os.environ.get("PODPIPE_CA_BUNDLE") or os.environ.get("PIP_CERT")
    bundle = bundle or os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt"
    theirs = certificates(Path(bundle).read_bytes())
    settings = apt_settings(has_bundle=True).encode()
    public: set[bytes] = set()
    found: set[bytes] = set()
    secrets: list[str] = []
    for layer in contents(layers):
        for member in layer:
            if not member.isfile():
                continue
            stream = layer.extractfile(member)
            assert stream is not None
            data = stream.read()
            if member.name.startswith("run/secrets/") and data:
                secrets.append(member.name)
            if member.name.startswith("usr/share/ca-certificates/"):
                public |= certificates(data)
            elif b"BEGIN CERTIFICATE" in data:
                found |= certificates(data)
            assert settings not in data, member.name
    assert secrets == []
    assert public
    assert (found & theirs) - public == set()


def certificates(data: bytes) -> set[bytes]:
    """The certificates in some text, without its white space."""
    found = re.findall(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", data, re.DOTALL)
    return {b"".join(body.split()) for body in found}


def contents(image: tarfile.TarFile) -> Iterator[tarfile.TarFile]:
    """The layers of an image archive."""
    manifest = image.extractfile("manifest.json")
    assert manifest is not None
    for name in json.load(manifest)[0]["Layers"]:
        stream = image.extractfile(name)
        assert stream is not None
        with tarfile.open(fileobj=stream) as layer:
            yield layer
