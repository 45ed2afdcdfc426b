"""The replicas of a pool as they are themselves, once a second: asked on their control ports by a thread of the
test."""

from __future__ import annotations

import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from headway_core.contract.documents import load_runtime_report
from headway_core.contract.reports import ReplicaState, RuntimeReport
from kubernetes import client, config


@dataclass(frozen=True, slots=True)
class Look:
    """One look: `at` of the wall clock; the reports of all pods that answered, by name."""

    at: float
    pods: tuple[str, ...]
    """All there are, those on their way out included."""
    reports: dict[str, RuntimeReport]

    @property
    def ready(self) -> list[str]:
        """Those that say they serve."""
        return sorted(name for name, report in self.reports.items() if report.state is ReplicaState.READY)


class FleetWatch:
    """Looks from entering the `with` block to leaving it."""

    def __init__(self, kubeconfig: Path, namespace: str, selector: str, every: float = 1.0) -> None:
        self.looks: list[Look] = []
        self._core = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
        self._namespace, self._selector, self._every = namespace, selector, every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FleetWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._core.api_client.close()

    @property
    def last(self) -> Look:
        """The latest look; empty before the first."""
        return self.looks[-1] if self.looks else Look(0.0, (), {})

    def at(self, moment: float) -> Look:
        """The last look before `moment`. Raises LookupError when there is none."""
        for look in reversed(self.looks):
            if look.at < moment:
                return look
        raise LookupError(f"nobody looked before {moment}")

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                listed = self._core.list_namespaced_pod(self._namespace, label_selector=self._selector).items
            except (client.ApiException, OSError):
                continue
            reports = {pod.metadata.name: _report(pod.status.pod_ip) for pod in listed if pod.status.pod_ip}
            answered = {name: report for name, report in reports.items() if report is not None}
            self.looks.append(Look(time.time(), tuple(pod.metadata.name for pod in listed), answered))


def _report(address: str) -> RuntimeReport | None:
    try:
        with urllib.request.urlopen(f"http://{address}:8001/load", timeout=1) as answer:
            return load_runtime_report(answer.read())
    except (OSError, ValueError):
        return None
