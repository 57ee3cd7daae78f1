"""What the single node's parts are told: folders, ports, configuration files, command lines.

Pure: nothing here touches the machine. Measured and tried on Debian 12 with cgroup v1, without
CAP_SYS_RESOURCE; the odd settings say what breaks without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from host_client.local.pki import Identity

KUBERNETES_VERSION: Final = "v1.34.4"
BINARIES: Final = (
    "kubectl",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
)
COMPONENTS: Final = (
    "containerd",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
)
"""In the order in which they start; they stop in the reverse order."""

CONTEXT: Final = "podpipe-node"
NODE: Final = "localhost"
"""The kubelet refuses a loopback node IP; by this name the API server reaches it on loopback."""
LOOPBACK: Final = "127.0.0.1"
NETWORK: Final = "podpipe"
"""The CNI network's name: iptables comments and result files carry it, so cleaning finds ours."""
BRIDGE: Final = "podpipe0"
POD_SUBNET: Final = "10.244.0.0/24"
SERVICE_SUBNET: Final = "10.96.0.0/16"
FIRST_SERVICE_IP: Final = "10.96.0.1"
PAUSE_IMAGE: Final = "localhost/podpipe/pause:1"
STORAGE_CLASS: Final = "standard"
SANDBOX_UID: Final = 1000
PODS_PIDS_LIMIT: Final = 4096
"""A fork bomb in one sandbox ends there; a parallel build needs some hundreds."""
MAX_PODS: Final = 250
"""What the pod subnet has addresses for."""
PROVISIONER_FOLDER: Final = Path("/tmp/hostpath_pv")  # noqa: S108 - fixed in the provisioner
"""Where Kubernetes' built-in host-path provisioner makes volumes; the node's homes are mounted there."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The loopback ports, chosen at a cold start and recorded."""

    apiserver: int = 6443
    etcd: int = 2379
    etcd_peer: int = 2380
    kubelet: int = 10250


PORTS_OF: Final[Mapping[str, Sequence[str]]] = {
    "etcd": ("etcd", "etcd_peer"),
    "kube-apiserver": ("apiserver",),
    "kubelet": ("kubelet",),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the node keeps what: everything below one folder, binaries aside."""

    state: Path
    bin: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for people and tools."""
        return self.state / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.state / "pki"

    @property
    def etc(self) -> Path:
        """Rendered configuration, made anew at every start."""
        return self.state / "etc"

    @property
    def run(self) -> Path:
        """What means nothing after a reboot: containerd's state, sockets, process records."""
        return self.state / "run"

    @property
    def socket(self) -> Path:
        """containerd's socket."""
        return self.run / "containerd.sock"

    @property
    def logs(self) -> Path:
        """The components' logs."""
        return self.state / "log"

    @property
    def homes(self) -> Path:
        """The volumes: mounted at PROVISIONER_FOLDER, kept here, since /tmp may not survive."""
        return self.state / "homes"

    def log_of(self, component: str) -> Path:
        """One component's log."""
        return self.logs / f"{component}.log"


IDENTITIES: Final = (
    Identity(
        "apiserver",
        "kube-apiserver",
        serves=(LOOPBACK, FIRST_SERVICE_IP, NODE, "kubernetes.default.svc"),
    ),
    Identity("kubelet-server", NODE, serves=(LOOPBACK, NODE)),
    Identity("etcd", "etcd", serves=(LOOPBACK,)),
    Identity("admin", "podpipe-admin", group="system:masters"),
    Identity("kubelet", f"system:node:{NODE}", group="system:nodes"),
    Identity("kube-controller-manager", "system:kube-controller-manager"),
    Identity("kube-scheduler", "system:kube-scheduler"),
    Identity("apiserver-kubelet", "apiserver-kubelet", group="system:masters"),
)


def kubeconfig(layout: Layout, ports: Ports, identity: str) -> str:
    """A kubeconfig; JSON, which every reader of YAML takes."""
    name = CONTEXT
    user = {
        "client-certificate": str(layout.pki / f"{identity}.crt"),
        "client-key": str(layout.pki / f"{identity}.key"),
    }
    server = {
        "server": f"https://{LOOPBACK}:{ports.apiserver}",
        "certificate-authority": str(layout.pki / "ca.crt"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": server}],
        "users": [{"name": identity, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": identity}}],
        "current-context": name,
    }
    return json.dumps(config, indent=2) + "\n"


def containerd_config(layout: Layout, snapshotter: str) -> str:
    """containerd's TOML; a JSON string is a TOML string."""
    quote = json.dumps
    return f"""\
version = 2
root = {quote(str(layout.state / "containerd"))}
state = {quote(str(layout.run / "containerd"))}

[grpc]
  address = {quote(str(layout.socket))}

# Otherwise /opt/containerd is made.
[plugins."io.containerd.internal.v1.opt"]
  path = {quote(str(layout.state / "opt"))}

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = {quote(PAUSE_IMAGE)}
  # Without CAP_SYS_RESOURCE runc cannot lower a score: "can't get final child's PID from pipe: EOF".
  restrict_oom_score_adj = true
  # Otherwise /var/run/netns fills up.
  netns_mounts_under_state_dir = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = {quote(str(layout.etc / "cni"))}

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = {quote(snapshotter)}
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = {quote(str(layout.run / "runc"))}
"""


def cni_config(layout: Layout) -> str:
    """One bridge with masquerading; the addresses handed out are kept below the state folder."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(layout.state / "addresses"),
            "ranges": [[{"subnet": POD_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": NETWORK, "plugins": [bridge]}, indent=2)


def kubelet_config(layout: Layout, ports: Ports, resolv_conf: Path) -> str:
    """The KubeletConfiguration."""
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": LOOPBACK,
        "port": ports.kubelet,
        "healthzPort": 0,
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{layout.socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet-server.key"),
        "resolvConf": str(resolv_conf),
        "maxPods": MAX_PODS,
        "podPidsLimit": PODS_PIDS_LIMIT,
        "podLogsDir": str(layout.state / "pods"),
        "volumePluginDir": str(layout.state / "volume-plugins"),
        # Nothing here needs its chains: there is no kube-proxy that relies on them.
        "makeIPTablesUtilChains": False,
        # The sandbox image cannot be pulled again: it must not be collected.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
    }
    return json.dumps(config, indent=2)


def storage_class() -> str:
    """The default StorageClass, served by the controller manager's built-in provisioner."""
    return json.dumps(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": STORAGE_CLASS,
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/host-path",
            "reclaimPolicy": "Delete",
        }
    )


def argv(layout: Layout, ports: Ports, component: str) -> list[str]:
    """The command line of one component."""
    pki, bin_ = layout.pki, layout.bin
    if component == "containerd":
        return ["containerd", "--config", str(layout.etc / "containerd.toml")]
    if component == "etcd":
        client = f"https://{LOOPBACK}:{ports.etcd}"
        peer = f"https://{LOOPBACK}:{ports.etcd_peer}"
        tls = {"cert-file": "etcd.crt", "key-file": "etcd.key", "trusted-ca-file": "ca.crt"}
        return [
            "etcd",
            f"--name={NODE}",
            f"--data-dir={layout.state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={NODE}={peer}",
            *(f"--{flag}={pki / file}" for flag, file in tls.items()),
            *(f"--peer-{flag}={pki / file}" for flag, file in tls.items()),
            "--client-cert-auth=true",
            "--peer-client-cert-auth=true",
        ]
    if component == "kube-apiserver":
        return [
            str(bin_ / component),
            f"--etcd-servers=https://{LOOPBACK}:{ports.etcd}",
            f"--etcd-cafile={pki / 'ca.crt'}",
            f"--etcd-certfile={pki / 'etcd.crt'}",
            f"--etcd-keyfile={pki / 'etcd.key'}",
            f"--secure-port={ports.apiserver}",
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={LOOPBACK}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
            f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            "--kubelet-preferred-address-types=Hostname",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # Pod Security decides that per namespace, as on any other cluster.
            "--allow-privileged=true",
            # A loopback address cannot be an endpoint.
            "--endpoint-reconciler-type=none",
        ]
    config = layout.etc / f"{component}.kubeconfig"
    if component == "kube-controller-manager":
        # Its host-path provisioner makes folders 0750 of its own uid: with the sandbox user's a
        # non-root pod can write its home. One capability lets it read what lies below /root.
        return [
            "setpriv",
            f"--reuid={SANDBOX_UID}",
            f"--regid={SANDBOX_UID}",
            "--clear-groups",
            "--inh-caps=-all,+dac_read_search",
            "--ambient-caps=-all,+dac_read_search",
            "--bounding-set=-all,+dac_read_search",
            str(bin_ / component),
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={pki / 'sa.key'}",
            f"--root-ca-file={pki / 'ca.crt'}",
            "--enable-hostpath-provisioner",
        ]
    if component == "kube-scheduler":
        return [
            str(bin_ / component),
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
    assert component == "kubelet"
    return [
        str(bin_ / component),
        f"--config={layout.etc / 'kubelet.json'}",
        f"--kubeconfig={config}",
        f"--hostname-override={NODE}",
        f"--root-dir={layout.state / 'kubelet'}",
        f"--cert-dir={layout.state / 'kubelet-certificates'}",
    ]


def files(layout: Layout, ports: Ports, snapshotter: str, resolv_conf: Path) -> dict[Path, str]:
    """Every configuration file and its content."""
    rendered = {
        layout.kubeconfig: kubeconfig(layout, ports, "admin"),
        layout.etc / "containerd.toml": containerd_config(layout, snapshotter),
        layout.etc / "cni" / "10-podpipe.conflist": cni_config(layout),
        layout.etc / "kubelet.json": kubelet_config(layout, ports, resolv_conf),
        layout.state / "ports.json": json.dumps(asdict(ports)) + "\n",
    }
    for component in ("kubelet", "kube-controller-manager", "kube-scheduler"):
        rendered[layout.etc / f"{component}.kubeconfig"] = kubeconfig(layout, ports, component)
    return rendered
