"""The Dockerfile keeps its word to the contract, and `scripts/image` finds its engine and its cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from host_client.local.image import apt_settings, build_secrets, of_context
from host_client.local.tools import Failure
from in_pod_server import contract
from tests.local.stubs import CHECKOUT, Machine

DOCKERFILE = (CHECKOUT / "Dockerfile").read_text("utf-8")

BUILDER = """case "$*" in
*inspect*absent*) echo 'Error: no such image' >&2; exit 1 ;;
*inspect*) echo sha256:feed ;;
esac"""


def instructions(stage: str) -> dict[str, list[str]]:
    """The instructions of a stage and of all that it is built on, by name."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    stages: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("FROM "):
            _, parent, _, name = line.split()
            lines = []
            stages[name] = (parent, lines)
        else:
            lines.append(line)
    found: dict[str, list[str]] = {}
    chain = [stage]
    while (parent := stages[chain[0]][0]) in stages:
        chain.insert(0, parent)
    for name in chain:
        for line in stages[name][1]:
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
    return found


@pytest.mark.parametrize("stage", ["slim", "full"])
class TestDockerfile:
    """Both targets that are sandboxes."""

    def test_starts_the_daemon_exactly_as_the_contract_says(self, stage: str) -> None:
        assert json.loads(instructions(stage)["ENTRYPOINT"][-1]) == list(contract.DAEMON_ARGV)

    def test_runs_as_the_sandbox_user_in_its_home(self, stage: str) -> None:
        found = instructions(stage)

        assert found["USER"][-1] == f"{contract.UID}:{contract.UID}"
        assert found["WORKDIR"][-1] == contract.HOME
        assert f"HOME={contract.HOME}" in " ".join(found["ENV"])

    def test_has_the_user_and_the_folders_of_the_contract(self, stage: str) -> None:
        made = " ".join(instructions(stage)["RUN"])

        assert re.search(rf"useradd --uid {contract.UID} .* {contract.USER};", made)
        assert f"--home-dir {contract.HOME} " in made
        assert f" {contract.WORKSPACE};" in made
        assert f" {contract.RUN_DIR};" in made
        assert "openssh-server" in made
        assert "rm -rf /etc/ssh/ssh_host_*" in made

    def test_puts_its_own_code_last_where_the_contract_says(self, stage: str) -> None:
        copied = instructions(stage)["COPY"]

        assert copied[-1] == f"--from=app {contract.APP_DIR} {contract.APP_DIR}"
        assert (
            f"in_pod_server/mcp_server.py {contract.APP_DIR}/mcp_server.py"
            in instructions("app")["COPY"]
        )

    def test_the_pinned_requirements_are_in_the_environment_of_the_contract(
        self, stage: str
    ) -> None:
        made = " ".join(instructions(stage)["RUN"])

        environment = str(Path(contract.PYTHON).parents[1])
        assert f"python3 -m venv {environment};" in made
        assert f"{contract.PYTHON} -m pip install" in made
        assert f"echo {contract.APP_DIR} >" in made

    def test_python_neither_buffers_nor_writes_bytecode(self, stage: str) -> None:
        env = " ".join(instructions(stage)["ENV"])

        assert "PYTHONUNBUFFERED=1" in env
        assert "PYTHONDONTWRITEBYTECODE=1" in env
        assert "LANG=C.UTF-8" in env
        assert f"PATH={Path(contract.PYTHON).parent}:" in env


def test_the_reaper_is_the_host_s_side_with_a_kubectl() -> None:
    found = instructions("reaper")

    start = [*contract.DAEMON_ARGV[:2], contract.PYTHON, "-I", "-m", "host_client", "reap"]
    assert json.loads(found["ENTRYPOINT"][-1]) == start
    assert found["USER"][-1] == f"{contract.UID}:{contract.UID}"
    assert [f"{name} {contract.APP_DIR}/{name}" for name in ("host_client", "manifests")] == (
        found["COPY"][-2:]
    )
    assert " kubectl;" in found["RUN"][-2]


def test_slim_is_what_a_build_without_a_target_makes() -> None:
    assert re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "slim"


def test_only_what_the_image_needs_is_sent_to_the_builder() -> None:
    """A checkout may hold a .env with credentials; it never reaches an engine."""
    lines = (CHECKOUT / ".dockerignore").read_text("utf-8").splitlines()

    assert lines[0] == "*"
    assert [line for line in lines if line.startswith("!")] == [
        "!requirements.txt",
        "!in_pod_server",
        "!host_client",
        "!manifests",
    ]


def test_docker_comes_first_and_builds_with_buildkit(machine: Machine) -> None:
    machine.has("docker", f'echo "buildkit=$DOCKER_BUILDKIT" >&2\n{BUILDER}')
    machine.has("podman", BUILDER)

    built = machine.run("image", "build", "--json")

    assert json.loads(built.stdout) == {
        "image": "sandbox-base:latest",
        "id": "sha256:feed",
        "target": "slim",
        "engine": "docker",
    }
    (build,) = [call for call in machine.calls if call.startswith("docker build")]
    assert "--tag docker.io/library/sandbox-base:latest --target slim" in build
    assert "--build-arg BASE_IMAGE=debian:trixie-slim" in build
    assert not any(call.startswith("podman build") for call in machine.calls)


def test_podman_builds_where_no_docker_engine_answers(machine: Machine) -> None:
    machine.has("docker", "exit 1")
    machine.has("podman", BUILDER)

    built = machine.run("image", "build", "--target", "full", "--json", IMAGE="team/sandbox:2")

    answer = json.loads(built.stdout)
    assert (answer["engine"], answer["image"]) == ("podman", "team/sandbox:2")
    assert any("--tag docker.io/team/sandbox:2 --target full" in call for call in machine.calls)


def test_buildah_builds_in_a_store_of_its_own(machine: Machine) -> None:
    for program in ("mount", "umount"):
        machine.has(program)
    machine.has("buildah", BUILDER)

    built = machine.run("image", "build", "--json")

    assert json.loads(built.stdout)["engine"] == "buildah"
    (build,) = [call for call in machine.calls if " bud " in call]
    assert "--isolation chroot --layers --force-rm" in build


def test_no_builder_at_all_is_a_missing_prerequisite(machine: Machine) -> None:
    done = machine.run("image", "build")

    assert done.returncode == 4
    assert "podman" in done.stderr


def test_a_docker_without_buildkit_is_told_what_to_install(machine: Machine) -> None:
    machine.has(
        "docker",
        f"""case "$1" in
build) echo 'ERROR: BuildKit is enabled but the buildx component is missing' >&2; exit 1 ;;
esac
{BUILDER}""",
    )

    done = machine.run("image", "build")

    assert done.returncode == 4
    assert "buildx plugin" in done.stderr


def test_a_base_image_that_is_asked_for_is_pulled_and_never_replaced(machine: Machine) -> None:
    machine.has(
        "docker", f"""case "$1" in pull) echo 'denied: no' >&2; exit 1 ;; esac\n{BUILDER}"""
    )

    done = machine.run("image", "build", "--base", "registry.example/absent:1")

    assert done.returncode == 1
    assert "denied: no" in done.stderr
    assert "docker pull registry.example/absent:1" in machine.calls


def test_loading_an_image_that_was_not_built_says_so(machine: Machine) -> None:
    machine.has("docker", BUILDER)

    done = machine.run("image", "load", IMAGE="absent:1")

    assert done.returncode == 3
    assert "scripts/image build" in done.stderr


@pytest.mark.parametrize(
    ("context", "command"),
    [
        ("kind-demo", "kind load image-archive "),
        ("minikube", "minikube --profile minikube image load "),
        ("k3d-demo", "k3d image import "),
    ],
)
def test_an_image_goes_into_the_local_cluster_of_the_current_context(
    machine: Machine, context: str, command: str
) -> None:
    machine.has("docker", BUILDER)
    machine.has_kubectl(context=context)
    for program in ("kind", "minikube", "k3d"):
        machine.has(program)

    loaded = machine.run("image", "load", "--json")

    assert loaded.returncode == 0, loaded.stderr
    (call,) = [call for call in machine.calls if call.startswith(command)]
    assert "image.tar" in call
    name = "--profile minikube" if context == "minikube" else "demo"
    assert name in call


def test_docker_desktop_needs_no_loading(machine: Machine) -> None:
    machine.has("docker", BUILDER)
    machine.has_kubectl(context="docker-desktop")

    assert machine.run("image", "load").returncode == 0
    assert not any(call.startswith("docker save") for call in machine.calls)


def test_a_remote_cluster_is_not_loaded_into(machine: Machine) -> None:
    machine.has("docker", BUILDER)
    machine.has_kubectl(context="production")

    done = machine.run("image", "load")

    assert done.returncode == 3
    assert "scripts/image push" in done.stderr


@pytest.mark.parametrize(
    ("context", "place"),
    [
        ("kind-podpipe", ("kind", "podpipe")),
        ("k3d-a-b", ("k3d", "a-b")),
        ("docker-desktop", ("docker-desktop", "docker-desktop")),
        ("kindly", (None, "kindly")),
        ("", (None, "")),
    ],
)
def test_a_context_names_its_local_cluster(context: str, place: tuple[str | None, str]) -> None:
    assert of_context(context) == place


def test_pushing_needs_a_name_with_a_registry(machine: Machine) -> None:
    machine.has("docker", BUILDER)

    done = machine.run("image", "push")

    assert done.returncode == 1
    assert "IMAGE=registry.example/team/sandbox-base:latest" in done.stderr


@pytest.mark.parametrize(("engine", "plain"), [("docker", ""), ("podman", "--tls-verify=false ")])
def test_a_registry_on_this_machine_needs_no_certificate(
    machine: Machine, engine: str, plain: str
) -> None:
    machine.has(engine, BUILDER)

    done = machine.run("image", "push", IMAGE="localhost:5000/sandbox:1")

    assert done.returncode == 0, done.stderr
    assert f"{engine} push {plain}localhost:5000/sandbox:1" in machine.calls


def test_the_ca_bundle_is_a_build_secret_and_no_argument(machine: Machine, tmp_path: Path) -> None:
    machine.has("docker", BUILDER)
    bundle = tmp_path / "company.pem"
    bundle.write_text("a certificate", "utf-8")

    machine.run("image", "build", PODPIPE_CA_BUNDLE=str(bundle))

    (build,) = [call for call in machine.calls if call.startswith("docker build")]
    assert f"--secret id=ca_bundle,src={bundle}" in build


@pytest.mark.parametrize("name", ["PODPIPE_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"])
def test_a_bundle_that_the_environment_names_is_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "podpipe").mkdir()
    bundle = tmp_path / "company.pem"
    bundle.touch()

    with build_secrets({name: str(bundle)}) as secrets:
        assert secrets["ca_bundle"] == bundle
        written = [path for key, path in secrets.items() if key != "ca_bundle"]
    assert not any(path.exists() for path in written)


def test_a_bundle_that_is_not_there_is_an_error() -> None:
    with (
        pytest.raises(Failure, match="correct PODPIPE_CA_BUNDLE"),
        build_secrets({"PODPIPE_CA_BUNDLE": "/nowhere/ca.pem"}),
    ):
        pass


def test_apt_is_told_only_what_a_build_behind_the_same_network_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt = tmp_path / "apt-config"
    apt.write_text(
        "#!/bin/sh\n"
        """echo 'Acquire::http::Proxy "http://proxy.example:3128";'\n"""
        """echo 'Acquire::Check-Valid-Until "false";'\n"""
        """echo 'Dir::Etc "etc/apt";'\n""",
        "utf-8",
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert apt_settings(has_bundle=True).splitlines() == [
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::Check-Valid-Until "false";',
        'Acquire::https::CaInfo "/run/secrets/ca_bundle";',
    ]
