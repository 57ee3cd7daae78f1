"""`podpipe reap` on a real API server, from this machine and as the CronJob of the administrator."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from host_client.admin import REAPER
from host_client.target import Target
from tests.cluster.conftest import Cluster
from tests.cluster.relay import relay

REAPER_IMAGE = os.environ.get("REAPER_IMAGE", "podpipe-reaper:latest")

PAST = "2020-01-01T00:00:00Z"


def test_what_expired_goes_and_what_lives_and_every_home_stays(cluster: Cluster, user: str) -> None:
    """L50: homes are kept, by rule."""
    ids = {}
    for name in ("old", "new"):
        made = cluster.podpipe("create", "--name", name, "--json")
        assert made.returncode == 0, made.stderr
        ids[name] = json.loads(made.stdout)["sandbox_id"]
    record = f"configmap/sandbox-{ids['old']}"
    cluster.kubectl("annotate", "--overwrite", record, f"podpipe/expires-at={PAST}")
    homes = cluster.get("persistentvolumeclaims")["items"]

    tried = cluster.podpipe("reap", "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert ids["old"] in tried.stdout
    assert f"ConfigMap/sandbox-{ids['old']}" in cluster.left()

    reaped = cluster.podpipe("reap")
    assert reaped.returncode == 0, reaped.stderr
    assert ids["old"] in reaped.stdout
    assert ids["new"] not in reaped.stdout
    left = cluster.left()
    assert f"ConfigMap/sandbox-{ids['old']}" not in left
    assert f"ConfigMap/sandbox-{ids['new']}" in left
    assert len(cluster.get("persistentvolumeclaims")["items"]) == len(homes) > 0


@contextmanager
def service_reachable(cluster: Cluster) -> Iterator[None]:
    """Let pods reach the API server by its Service, as they do on every cluster but our one node."""
    if cluster.environment["PODPIPE_CONTEXT"] != "podpipe-node":
        yield
        return
    routes = subprocess.run(["ip", "-j", "-4", "addr", "show", "podpipe0"], capture_output=True,
                            text=True, check=True)  # fmt: skip
    (link,) = json.loads(routes.stdout)
    api = urlsplit(Target.resolve(cluster.settings()).server)
    assert api.hostname
    assert api.port
    service = cluster.get("service", "kubernetes", "-n", "default")["spec"]["clusterIP"]
    with relay(link["addr_info"][0]["local"], (api.hostname, api.port)) as port:
        rule = ["PREROUTING", "-i", "podpipe0", "-d", service, "-p", "tcp", "--dport", "443",
                "-j", "REDIRECT", "--to-ports", str(port)]  # fmt: skip
        subprocess.run(["iptables", "-w", "-t", "nat", "-A", *rule], check=True)
        try:
            yield
        finally:
            subprocess.run(["iptables", "-w", "-t", "nat", "-D", *rule], check=True)


def test_the_administrator_s_cron_job_reaps_what_expired(cluster: Cluster, user: str) -> None:
    made = json.loads(cluster.podpipe("create", "--name", "old", "--json").stdout)
    record = f"configmap/sandbox-{made['sandbox_id']}"
    cluster.kubectl("annotate", "--overwrite", record, f"podpipe/expires-at={PAST}")
    beside = ("-n", f"{cluster.namespace}-admin")
    cluster.administer("--reaper-image", REAPER_IMAGE)
    try:
        suspended = json.dumps({"spec": {"suspend": True}})
        cluster.kubectl("patch", "cronjob", REAPER, "-p", suspended, *beside, everywhere=True)
        with service_reachable(cluster):
            cluster.kubectl("create", "job", "now", f"--from=cronjob/{REAPER}", *beside,
                            everywhere=True)  # fmt: skip
            ended = cluster.attempt("wait", "--for=condition=complete", "job/now",
                                    "--timeout=60s", *beside, everywhere=True)  # fmt: skip
            said = cluster.attempt("logs", "job/now", *beside, everywhere=True)
    finally:
        cluster.kubectl("delete", "cronjob", REAPER, *beside, everywhere=True)
        cluster.kubectl("delete", "job", "--all", *beside, everywhere=True)
    if ended.returncode and "waiting to start" in said.stderr:
        pytest.fail(
            f"{REAPER_IMAGE} does not start; `IMAGE={REAPER_IMAGE} scripts/image build --target "
            f"reaper`, then `scripts/image load`: {said.stderr}"
        )
    assert ended.returncode == 0, said.stdout + said.stderr
    assert f"configmaps/sandbox-{made['sandbox_id']} deleted: expired" in said.stdout
    assert f"ConfigMap/sandbox-{made['sandbox_id']}" not in cluster.left()
