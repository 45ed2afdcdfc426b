"""A control plane with one or two nodes: real pods, Services and DNS on this machine. Needs root on Linux."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import addresses, binaries, images
from cluster.addresses import Addresses
from cluster.control_plane import ControlPlane
from cluster.daemons import Daemon
from cluster.errors import CannotRun
from cluster.node import CNI_PROGRAMS, Node

# Program → the Debian package that has it.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "sysctl": "procps",
    "openssl": "openssl",
    "nsenter": "util-linux",
    f"{CNI_PROGRAMS}/bridge": "containernetworking-plugins",
}

# As kubeadm writes it: users have both the TTL and the cache, and a test that passes only without them proves nothing.
_COREFILE = """\
.:53 {{
    bind {address}
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }}
    cache 30
    loadbalance
}}
"""


class FullCluster(ControlPlane):
    """The administrator's kubeconfig works from this machine, and so do pod addresses and ClusterIPs."""

    def __init__(self, folder: Path, *, nodes: int = 1, bound: bool = False) -> None:
        super().__init__(folder, bound=bound)
        self._both = [Node(folder, number, bound=bound) for number in (1, 2)]
        self.nodes = self._both[:nodes]
        self._scheduler = Daemon(folder, "kube-scheduler", bound=bound)
        self._dns = Daemon(folder, "coredns", bound=bound)

    @staticmethod
    def lacking() -> list[str]:
        """What keeps this machine from running nodes, each with its remedy."""
        if sys.platform != "linux":
            return [f"nodes need Linux, this is {sys.platform}"]
        lack = [] if os.geteuid() == 0 else ["nodes need root: run as root"]
        absent = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
        if absent:
            lack.append(f"programs are missing: apt-get install --no-install-recommends {' '.join(absent)}")
        if not Path("/proc/sys/net/bridge").exists():
            lack.append("the kernel module br_netfilter is not loaded: modprobe br_netfilter")
        if Path("/var/lib") in binaries.CACHE.parents:
            lack.append(
                f"the cache {binaries.CACHE} lies below /var/lib, which nodes hide: set HEADWAY_CLUSTER_CACHE "
                "to another place"
            )
        return lack

    def up(self, say: Callable[[str], None]) -> None:
        """As for the control plane; and every node is Ready. Raises CannotRun or NotReady."""
        if lack := self.lacking():
            raise CannotRun("; ".join(lack))
        binaries.require(binaries.FULL)
        super().up(say)

    def load_images(self, archives: Sequence[Path]) -> None:
        """Imports image archives into every node."""
        for node in self.nodes:
            node.import_images(archives)

    def _prepare(self, say: Callable[[str], None]) -> None:
        plan = Addresses.choose(self.folder)
        self.address, self.services, self.kubernetes_service = plan.host, plan.services, plan.kubernetes_service
        say(f"namespaces and network 10.{plan.index}.0.0/16")
        archives = [images.pause()]
        for node in self.nodes:
            node.create(plan, first=None if node.number == 1 else self.nodes[0])
            node.start_containerd(plan)
            node.import_images(archives)
        self._plan = plan

    def _finish(self, say: Callable[[str], None]) -> None:
        say("scheduler, DNS and kubelets")
        self.authority.issue("scheduler", user="system:kube-scheduler")
        scheduler = self.authority.kubeconfig(self.folder / "scheduler.kubeconfig", self.server, cert="scheduler")
        self._scheduler.start(
            [
                binaries.path("kube-scheduler"),
                f"--kubeconfig={scheduler}",
                "--bind-address=127.0.0.1",
                "--secure-port=0",
                "--leader-elect=false",
            ]
        )
        corefile = self.folder / "Corefile"
        corefile.write_text(_COREFILE.format(address=self._plan.node(1), kubeconfig=self.kubeconfig))
        self._dns.start([*self.nodes[0].inside(), binaries.path("coredns"), "-conf", str(corefile)])
        for node in self.nodes:
            node.start_kubelet(self._plan, self.authority, self.server)
        for node in self.nodes:
            node.kubelet.wait_until(lambda name=node.name: self.node_ready(name), f"{node.name} is Ready")  # type: ignore[misc]

    def node_ready(self, name: str) -> bool:
        """Whether the API server has the node as Ready."""
        form = '{.items[?(@.metadata.name=="' + name + '")].status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "nodes", "-o", f"jsonpath={form}") == "True"

    def _daemons(self) -> list[Daemon]:
        inside = [daemon for node in self._both for daemon in node.daemons()]
        return [*inside, self._dns, self._scheduler, *super()._daemons()]

    def _stop_all(self) -> None:
        for node in self._both:  # whoever takes a cluster down need not know how many nodes it was started with
            node.destroy()
        if plan := addresses.remembered(self.folder):
            addresses.disconnect(plan)
        super()._stop_all()
