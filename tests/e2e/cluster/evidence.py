"""What a namespace looked like when a test failed: gathered in one folder, for whoever reads the failure."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from cluster.client import Client
from cluster.errors import ClusterError

_TABLES = {
    "pods.txt": ("get", "pods", "-o", "wide"),
    "events.txt": ("get", "events", "--sort-by", ".lastTimestamp"),
    "objects.yaml": ("get", "deployments,replicasets,pods,services,leases,horizontalpodautoscalers", "-o", "yaml"),
    "policies.yaml": ("get", "configmaps", "-o", "yaml"),
    "servingslos.yaml": ("get", "servingslos", "-o", "yaml"),
    "servingslos.txt": ("describe", "servingslos"),
}


def collect(cluster: Client, namespace: str, folder: Path) -> None:
    """Writes objects, events, logs, policies and load reports of `namespace` into `folder`. What cannot be had is left
    out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in _TABLES.items():
        with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
            (folder / name).write_text(cluster.kubectl(*command, "-n", namespace, timeout=20))
    with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
        for pod in cluster.get("pods", namespace=namespace)["items"]:
            _logs(cluster, namespace, pod["metadata"]["name"], folder)
            _report(pod, folder)


def _logs(cluster: Client, namespace: str, pod: str, folder: Path) -> None:
    for suffix, flags in (("", ()), ("-before", ("--previous",))):
        with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
            text = cluster.kubectl(
                "logs", pod, "-n", namespace, "--all-containers", "--tail", "2000", *flags, timeout=20
            )
            (folder / f"{pod}{suffix}.log").write_text(text)


def _report(pod: dict[str, Any], folder: Path) -> None:
    address = pod["status"].get("podIP")
    if not address:
        return
    with (
        contextlib.suppress(urllib.error.URLError, OSError),
        urllib.request.urlopen(f"http://{address}:8001/load", timeout=2) as answer,
    ):
        (folder / f"{pod['metadata']['name']}-load.json").write_bytes(answer.read())
