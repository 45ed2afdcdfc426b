"""The chart, installed: its pods, their load reports and books, and the processes in them."""

from __future__ import annotations

import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from cluster.client import Client
from headway_core.contract.documents import load_gateway_report, load_runtime_report
from headway_core.contract.reports import GatewayReport, RuntimeReport
from rendering import CHART

PATIENCE = ("--wait", "--timeout", "240s")


@dataclass(frozen=True)
class Pod:
    """One pod that is not on its way out."""

    uid: str
    address: str
    """Empty while it has none."""
    node: str
    restarts: int
    ready: bool


@dataclass(frozen=True)
class Release:
    """The chart, installed under `name`. `values` is the file that it was installed with."""

    cluster: Client
    namespace: str
    values: Path
    name: str = "rel"

    def install(self, *flags: str) -> str:
        """Returns when everything is ready. Raises CommandFailed."""
        return self.helm("install", *PATIENCE, *flags)

    def upgrade(self, *flags: str) -> str:
        """The same."""
        return self.helm("upgrade", *PATIENCE, *flags)

    def helm(self, verb: str, *flags: str) -> str:
        """`install` or `upgrade` of this chart and these values."""
        return self.cluster.helm(
            verb, self.name, str(CHART), "--namespace", self.namespace, "--values", str(self.values), *flags
        )

    def part(self, component: str) -> str:
        """Name of a component's Deployment: `gateway`, `operator`, or a pool."""
        return f"{self.name}-headway-{component}"

    @property
    def url(self) -> str:
        """Where clients ask, from this machine."""
        service = self.cluster.get(f"service/{self.part('gateway')}", namespace=self.namespace)
        return f"http://{service['spec']['clusterIP']}"

    def client(self) -> openai.OpenAI:
        """The official client, without retries of its own."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def pods(self, component: str, pool: str | None = None) -> dict[str, Pod]:
        """Those of a component (`gateway`, `runtime`, `operator`) that are not on their way out, by name."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        selector += f",headway.dev/runtime={self.part(pool)}" if pool else ""
        listed = self.cluster.get("pods", "-l", selector, namespace=self.namespace)["items"]
        return {pod["metadata"]["name"]: _pod(pod) for pod in listed if "deletionTimestamp" not in pod["metadata"]}

    def runtimes(self) -> dict[str, RuntimeReport]:
        """Load reports, by pod. Raises OSError when one of them does not answer."""
        return {name: load_runtime_report(_read(pod, "/load")) for name, pod in self.pods("runtime").items()}

    def gateways(self) -> dict[str, GatewayReport]:
        """The same of gateways."""
        return {name: load_gateway_report(_read(pod, "/load")) for name, pod in self.pods("gateway").items()}

    def generations(self, pool: str) -> dict[str, int]:
        """Pod → the generation of the ServingSLO whose promise it has in force for this pool; 0: none. Raises
        OSError."""
        found = {}
        for name, pod in self.pods("runtime", pool).items():
            found[name] = json.loads(_read(pod, "/policy")).get("generation", 0)
        for name, pod in self.pods("gateway").items():
            found[name] = json.loads(_read(pod, "/policy")).get(self.part(pool), {}).get("generation", 0)
        return found

    def in_force(self, slo: str, pool: str) -> bool:
        """Whether every gateway has the newest policy of a ServingSLO over the pool, in whatever mode, and a replica
        that is ready."""
        found = self.cluster.get(f"servingslo/{slo}", namespace=self.namespace)
        status = found.get("status", {})
        if status.get("observedGeneration") != found["metadata"]["generation"]:
            return False
        revision = status.get("applied", {}).get("policyRevision", math.inf)
        books = [
            known for report in self.gateways().values() for known in report.pools if known.pool == self.part(pool)
        ]
        return bool(books) and all(
            known.ready_replicas and known.policy is not None and known.policy.revision >= revision for known in books
        )

    def wait_until_ready(self, patience: float = 120.0) -> None:
        """Every Deployment has all its pods available, and none too many."""

        def whole() -> bool:
            deployments = self.cluster.get(
                "deployments", "-l", f"app.kubernetes.io/instance={self.name}", namespace=self.namespace
            )["items"]
            return all(map(_whole, deployments))

        self.cluster.wait_for(whole, "all Deployments are whole again", patience=patience, pause=0.5)

    def wait_until_settled(self, patience: float = 30.0) -> None:
        """The books of everybody are as if nobody had ever asked: nothing waits, nothing runs, every block is free or
        reusable, and each offered request has exactly one outcome.
        """
        unsettled: list[str] = []

        def settled() -> bool:
            try:
                unsettled[:] = [*self._unsettled_runtimes(), *self._unsettled_gateways()]
            except OSError as error:
                unsettled[:] = [str(error)]
            return not unsettled

        try:
            self.cluster.wait_for(settled, "the books are settled", patience=patience, pause=0.5)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {'; '.join(unsettled)}") from None

    def _unsettled_runtimes(self) -> Iterator[str]:
        for name, report in self.runtimes().items():
            found = (report.running, report.waiting, report.free_blocks, report.free_slots)
            wanted = (0, 0, report.limits.total_blocks, report.effective.max_num_seqs)
            if found != wanted:
                yield f"{name} has (running, waiting, free blocks, free slots) {found}, not {wanted}"

    def _unsettled_gateways(self) -> Iterator[str]:
        for name, report in self.gateways().items():
            for pool in report.pools:
                if any(pool.replica_in_flight.values()):
                    yield f"{name} has requests open on {pool.replica_in_flight}"
                for label, books in pool.classes.items():
                    if (books.queued, books.in_flight) != (0, 0) or books.offered != sum(books.outcomes.values()):
                        yield f"{name}, class {label}: {books}"

    def process(self, pod: str, words: str) -> psutil.Process:
        """The process in `pod` whose command line holds `words`, as this machine sees it. Raises LookupError."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOSTNAME") == pod and words in " ".join(process.cmdline()):
                    return process
        raise LookupError(f"no process with {words!r} in its command line runs in {pod}")


def values_file(path: Path, base: Path, **changes: Any) -> Path:
    """`base` with `changes` merged into it, written to `path`; a None takes a key away, so that the chart's own value
    counts."""
    path.write_text(json.dumps(_merged(json.loads(base.read_text()), changes)))
    return path


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**base}
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(base.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def _pod(document: Mapping[str, Any]) -> Pod:
    status = document["status"]
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in status.get("conditions", [])
    )
    restarts = sum(each["restartCount"] for each in status.get("containerStatuses", []))
    return Pod(
        document["metadata"]["uid"], status.get("podIP", ""), document["spec"].get("nodeName", ""), restarts, ready
    )


def _whole(deployment: Mapping[str, Any]) -> bool:
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")]
    return counts == [wanted] * 4 and status.get("observedGeneration") == deployment["metadata"]["generation"]


def _read(pod: Pod, path: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://{pod.address}:8001{path}", timeout=5) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:  # a runtime that has no policy says so
            return error.read()
        raise OSError(f"{pod.address}: {error}") from None
