"""The operator's flags, checked before anything starts. No environment variables, besides those of Kubernetes."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from dataclasses import dataclass, field

from headway_core.arguments import dns_label, duration, port, whole_number
from headway_core.contract.http import CONTROL_PORT

from headway_operator.lease import DURATION

_HELP = """\
Keeps the promises of ServingSLO objects: observes gateways and runtimes, plans, and sets max_num_seqs, the prefill
token budget and replicas.

It needs the ServingSLO CRD (crds/servingslos.headway.dev.yaml), rights to what it watches and sets (the chart's roles
list them, and what is missing is named in a condition), and for each gateway an empty ConfigMap <gateway>-policy that
gateway and runtimes mount.

Any number of operators may run: one holds the lease and acts, the others stand by. An operator that is gone leaves
knobs and replicas where they are; so does a ServingSLO that is deleted.
"""
_EXAMPLES = """\
examples:
  headway-operator --namespace prod --lease-namespace prod         one namespace, with a bare Role
  headway-operator --lease-namespace headway-system                every namespace, with a ClusterRole
  KUBECONFIG=~/.kube/config headway-operator --namespace dev       from a terminal, with your own rights
"""
SHORTEST_LEASE = 3.0
"""Seconds; a shorter one would be lost by a busy API server."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a person may choose. Durations in seconds."""

    namespaces: tuple[str, ...] = ()
    """Empty: every namespace."""
    lease_namespace: str = "default"
    lease_name: str = "headway-operator"
    lease_duration: float = DURATION
    identity: str = field(
        default_factory=lambda: f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    )
    interval: float = 5.0
    report_timeout: float = 2.0
    drain_budget: float = 120.0
    host: str = "0.0.0.0"  # noqa: S104 -- probes and Prometheus come from other addresses
    port: int = CONTROL_PORT
    concurrency: int = 32
    log_level: str = "INFO"

    @property
    def operator(self) -> str:
        """What this operator is called in annotations: its lease, since the holder changes."""
        return f"{self.lease_namespace}/{self.lease_name}"

    @property
    def stale_after(self) -> float:
        """A report older than three intervals is stale."""
        return 3 * self.interval


def parse(arguments: list[str] | None = None) -> Settings:
    """The flags as settings. A bad one ends the process with status 2 and a message that names it."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="headway-operator",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag(
        "--namespace",
        action="append",
        type=dns_label,
        metavar="NAME",
        help="serve this namespace; repeatable (default: all)",
    )
    flag(
        "--lease-namespace",
        type=dns_label,
        metavar="NAME",
        help="where the lease lies (default: the first --namespace, else the pod's own)",
    )
    flag(
        "--lease-name",
        type=dns_label,
        default=defaults.lease_name,
        metavar="NAME",
        help="of the operators with the same lease, one acts at a time (%(default)s)",
    )
    flag(
        "--lease-duration",
        type=duration(SHORTEST_LEASE),
        metavar="15s",
        help="without a renewal for so long another operator takes over; at least 3s (default 15s)",
    )
    flag("--interval", type=duration(), metavar="5s", help="how often each object is reconciled (default 5s)")
    flag("--report-timeout", type=duration(), metavar="2s", help="how long a pod may take to report (default 2s)")
    flag(
        "--drain-budget",
        type=duration(),
        metavar="2m",
        help="how long a cordoned replica may take to become idle (default 2m)",
    )
    flag("--host", default=defaults.host, help="address of /metrics and /healthz (default %(default)s)")
    flag("--port", type=port, default=defaults.port, help="port of /metrics and /healthz, 0: any (default %(default)s)")
    flag(
        "--concurrency",
        type=whole_number(1),
        default=defaults.concurrency,
        help="objects reconciled at the same time (default %(default)s)",
    )
    flag("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"], default=defaults.log_level)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    namespaces = tuple(dict.fromkeys(given.pop("namespace", ())))
    given.setdefault("lease_namespace", namespaces[0] if namespaces else _own_namespace())
    return Settings(namespaces=namespaces, **given)  # each other flag has the name of its setting


def _own_namespace() -> str:
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace", encoding="utf-8") as file:
            return file.read().strip() or "default"
    except OSError:
        return "default"
