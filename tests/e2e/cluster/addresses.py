"""The address plan of one full cluster, and the network devices that carry it.

Nodes live in network namespaces of their own. One virtual cable leads from this machine into the first node, so that
tests here reach the nodes, the pods and the Services directly; it goes with the namespace. Nothing else of this
machine's network is touched.
"""

from __future__ import annotations

import json
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CannotRun


@dataclass(frozen=True, slots=True)
class Addresses:
    """10.`index`.0.0/16, cut up: .0 for the nodes, .1 and .2 for their pods, .128 and above for Services."""

    index: int

    @classmethod
    def choose(cls, folder: Path) -> Addresses:
        """One that this machine does not route yet, and remembered in `folder`. Raises CannotRun when all are taken."""
        start = zlib.crc32(str(folder).encode())
        for step in range(100):
            plan = cls(100 + (start + step) % 100)
            if not _output("ip", "route", "show", "root", f"10.{plan.index}.0.0/16"):
                (folder / "addresses.json").write_text(json.dumps(plan.index))
                return plan
        raise CannotRun(
            "10.100.0.0/16 to 10.199.0.0/16 are all routed on this machine: no network is left for a cluster"
        )

    @property
    def host(self) -> str:
        """This machine, as the nodes see it: the API server listens there."""
        return f"10.{self.index}.0.254"

    def node(self, number: int) -> str:
        """Node 1 or 2."""
        return f"10.{self.index}.0.{number}"

    def pods(self, number: int) -> str:
        """The pods of node 1 or 2."""
        return f"10.{self.index}.{number}.0/24"

    @property
    def all_pods(self) -> str:
        """The pods of all nodes."""
        return f"10.{self.index}.0.0/22"

    @property
    def services(self) -> str:
        """ClusterIPs."""
        return f"10.{self.index}.128.0/17"

    @property
    def kubernetes_service(self) -> str:
        """The ClusterIP of the API server: always the first."""
        return f"10.{self.index}.128.1"

    @property
    def cable(self) -> str:
        """The device on this machine."""
        return f"headway{self.index}"


def connect_first(plan: Addresses, pid: int) -> None:
    """Makes the bridge inside the first node, and the cable from this machine into it. `pid`: a process inside."""
    node = _inside(pid)
    _run(*node, "ip", "link", "add", "nodes", "type", "bridge")
    _run(*node, "ip", "address", "add", f"{plan.node(1)}/24", "dev", "nodes")
    _run(*node, "ip", "link", "set", "nodes", "up")
    _run("ip", "link", "add", plan.cable, "type", "veth", "peer", "name", "host", "netns", str(pid))
    _run(*node, "ip", "link", "set", "host", "master", "nodes", "up")
    _run(*node, "ip", "route", "add", "default", "via", plan.host)
    _run("ip", "address", "add", f"{plan.host}/24", "dev", plan.cable)
    _run("ip", "link", "set", plan.cable, "up")
    _run("ip", "route", "add", plan.pods(1), "via", plan.node(1))
    _run("ip", "route", "add", plan.services, "via", plan.node(1))
    _forward(node)


def connect_second(plan: Addresses, first_pid: int, pid: int) -> None:
    """The cable from the second node to the bridge inside the first, and who is reached through whom."""
    first, node = _inside(first_pid), _inside(pid)
    _run(*first, "ip", "link", "add", "node2", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _run(*first, "ip", "link", "set", "node2", "master", "nodes", "up")
    _run(*node, "ip", "address", "add", f"{plan.node(2)}/24", "dev", "eth0")
    _run(*node, "ip", "link", "set", "eth0", "up")
    _run(*node, "ip", "route", "add", "default", "via", plan.host)
    _run(*node, "ip", "route", "add", plan.pods(1), "via", plan.node(1))
    _run(*first, "ip", "route", "add", plan.pods(2), "via", plan.node(2))
    _run("ip", "route", "add", plan.pods(2), "via", plan.node(2))
    _forward(node)


def disconnect(plan: Addresses) -> None:
    """Removes the cable and with it the routes. Gone already: nothing done."""
    subprocess.run(["ip", "link", "delete", plan.cable], capture_output=True, check=False)


def remembered(folder: Path) -> Addresses | None:
    """The plan that a cluster in `folder` was started with."""
    try:
        return Addresses(json.loads((folder / "addresses.json").read_text()))
    except (OSError, ValueError):
        return None


def _inside(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--"]


def _forward(node: list[str]) -> None:
    # Without the second, a pod that reaches a neighbour on its own node through a Service gets answers from an address
    # it never asked.
    _run(*node, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
