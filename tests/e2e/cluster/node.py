"""One node: namespaces of its own, containerd, kubelet and kube-proxy. Needs root.

The node has a process namespace, so whatever ends its first process ends everything in it: no container outlives its
node.
"""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from cluster import addresses, binaries, cgroups
from cluster.addresses import Addresses
from cluster.certificates import Authority
from cluster.daemons import Daemon
from cluster.errors import CommandFailed

PAUSE_IMAGE = "headway.test/pause:1"
CNI_PROGRAMS = "/usr/lib/cni"

# The node sees a /run and a /var/lib of its own, and its logs under /var/log; the rest is this machine's, so that a
# hostPath finds it. Images are unpacked in memory (half a gigabyte for the product's): ten times as fast as most disks,
# and gone with the node. As first process it also reaps what nobody waits for.
_FIRST_PROCESS = """
set -e
mount -t tmpfs -o size=6g none "$1/containerd"
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mkdir -p /run/netns /run/containerd /var/lib/kubelet /var/lib/cni
mount --make-rshared /run
mount --bind "$1/kubelet" /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind "$1/logs" /var/log
hostname "$2"
ip link set lo up
touch "$1/up"
while :; do sleep 86400 & wait $!; done
"""


class Node:
    """`number` 1 or 2. Everything it has lies in a folder of the cluster's."""

    def __init__(self, cluster: Path, number: int, *, bound: bool) -> None:
        self.name = f"node{number}"
        self.number = number
        self.folder = cluster / self.name
        # Two clusters may share a machine: the group's name comes from where the cluster lives.
        self._cgroup = f"headway-{zlib.crc32(str(cluster).encode()):08x}-{self.name}"
        self._holder = Daemon(self.folder, "node", bound=bound)
        self.containerd = Daemon(self.folder, "containerd", bound=bound)
        self.kubelet = Daemon(self.folder, "kubelet", bound=bound)
        self.proxy = Daemon(self.folder, "kube-proxy", bound=bound)
        self._kubelet_command: list[str] = []

    def daemons(self) -> list[Daemon]:
        """What runs in it, the first process last."""
        return [self.kubelet, self.proxy, self.containerd, self._holder]

    def inside(self) -> list[str]:
        """The command prefix that runs something inside."""
        return ["nsenter", "--target", str(self._first_process()), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """Runs a command inside and gives its standard output. Raises CommandFailed."""
        done = subprocess.run([*self.inside(), *command], capture_output=True, text=True, check=False, timeout=timeout)
        if done.returncode:
            raise CommandFailed(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def create(self, plan: Addresses, first: Node | None = None) -> None:
        """Namespaces and network. `first`: the other node, to which this one is connected."""
        for part in ("kubelet", "logs", "cni", "containerd"):
            (self.folder / part).mkdir(parents=True)
        namespaces = (
            "--mount",
            "--propagation=private",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        )
        self._holder.start(["unshare", *namespaces, "sh", "-c", _FIRST_PROCESS, "node", str(self.folder), self.name])
        self._holder.wait_until((self.folder / "up").exists, f"{self.name} has its namespaces", patience=20)
        if first is None:
            addresses.connect_first(plan, self._first_process())
        else:
            addresses.connect_second(plan, first._first_process(), self._first_process())

    def start_containerd(self, plan: Addresses) -> None:
        """containerd, with no images yet."""
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_network(plan.pods(self.number))))
        config = self.folder / "containerd.toml"
        config.write_text(_CONTAINERD.format(folder=self.folder, pause=PAUSE_IMAGE, programs=CNI_PROGRAMS))
        self.containerd.start([*self.inside(), "containerd", "--config", str(config)])
        self.containerd.wait_until(self._containerd_answers, "containerd answers", patience=30)

    def import_images(self, archives: Sequence[Path]) -> None:
        """Image archives, for pods with imagePullPolicy Never or IfNotPresent."""
        for archive in archives:
            self.run("ctr", "--namespace", "k8s.io", "images", "import", str(archive), timeout=300)

    def start_kubelet(self, plan: Addresses, authority: Authority, server: str) -> None:
        """kubelet and kube-proxy. The node is Ready some seconds later."""
        address = plan.node(self.number)
        authority.issue(
            self.name,
            user=f"system:node:{self.name}",
            group="system:nodes",
            hosts=(f"DNS:{self.name}", f"IP:{address}"),
        )
        authority.issue(f"{self.name}-proxy", user="system:kube-proxy")
        kubeconfig = authority.kubeconfig(self.folder / "kubelet.kubeconfig", server, cert=self.name)
        proxy_kubeconfig = authority.kubeconfig(self.folder / "proxy.kubeconfig", server, cert=f"{self.name}-proxy")
        resolver = self.folder / "resolv.conf"
        resolver.write_text(f"nameserver {plan.node(1)}\n")
        cgroups.create(self._cgroup)
        config = self.folder / "kubelet-config.json"
        config.write_text(json.dumps(self._kubelet_config(plan, authority, resolver)))
        self._kubelet_command = [
            *(*self.inside(), binaries.path("kubelet"), f"--config={config}", f"--kubeconfig={kubeconfig}"),
            *(f"--hostname-override={self.name}", f"--node-ip={address}"),
        ]
        self.kubelet.start(self._kubelet_command)
        proxy_config = self.folder / "proxy-config.json"
        proxy_config.write_text(json.dumps(self._proxy_config(plan, proxy_kubeconfig)))
        self.proxy.start([*self.inside(), binaries.path("kube-proxy"), f"--config={proxy_config}"])

    def kill_kubelet(self) -> None:
        """As a crash does: what runs on the node runs on, and nobody looks after it."""
        self.kubelet.stop(kill=True)

    def revive_kubelet(self) -> None:
        """Starts it as it was started before, by this same object."""
        self.kubelet.start(self._kubelet_command)

    def destroy(self) -> None:
        """Ends everything in it at once, as if the machine had lost power, and removes its control groups."""
        for daemon in reversed(self.daemons()):
            daemon.stop(kill=True)
        cgroups.remove(self._cgroup)

    def _first_process(self) -> int:
        holder = self._holder.process()
        children = holder.children() if holder else []
        if not children:
            raise CommandFailed(f"{self.name} is not running")
        return int(children[0].pid)

    def _containerd_answers(self) -> bool:
        try:
            self.run("ctr", "version")
        except CommandFailed:
            return False
        return True

    def _kubelet_config(self, plan: Addresses, authority: Authority, resolver: Path) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": plan.node(self.number),
            "readOnlyPort": 0,
            "healthzBindAddress": "127.0.0.1",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "failSwapOn": False,
            "clusterDNS": [plan.node(1)],
            "clusterDomain": "cluster.local",
            "resolvConf": str(resolver),
            "volumePluginDir": str(self.folder / "plugins"),
            "nodeStatusUpdateFrequency": "2s",
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(authority.certificate)}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": authority.cert(self.name),
            "tlsPrivateKeyFile": authority.key(self.name),
            # This machine's disk may be fuller than a node's should be; that is not what is tested.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }

    def _proxy_config(self, plan: Addresses, kubeconfig: Path) -> dict[str, object]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "bindAddress": plan.node(self.number),
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "clusterCIDR": plan.all_pods,
            "hostnameOverride": self.name,
            "mode": "iptables",
            # These are settings of the whole machine, not of a namespace: left alone.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }


def _network(pods: str) -> dict[str, object]:
    ranges = {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": ranges}
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


# restrict_oom_score_adj: in many containers root may not lower a score, and without this no pod would start there.
_CONTAINERD = """\
version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs}"
    conf_dir = "{folder}/cni"
"""
