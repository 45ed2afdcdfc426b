"""The chart with a pool of emulated accelerators, and one ServingSLO over it, as the paced stages use them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiny_model
from cluster.client import Client
from deeds import Deeds
from fleet_watch import FleetWatch
from open_loop import Load, OpenLoop
from oracle import Accelerator
from release import Release, values_file

POOL = "rel-headway-chat"
RUNTIMES = f"headway.dev/runtime={POOL}"
SLO = "chat"


@dataclass(frozen=True, slots=True)
class Start:
    """What the replicas are started with."""

    accelerator: Accelerator
    max_num_seqs: int
    prefill_token_budget: int


@dataclass(frozen=True, slots=True)
class PacedRelease:
    """Installed as `rel` and ready, without a ServingSLO yet."""

    release: Release
    accelerator: Accelerator
    logs: Path
    """Where each replica writes a line for every iteration."""
    results: Path

    @classmethod
    @contextmanager
    def installed(
        cls, cluster: Client, namespace: str, base: Path, folder: Path, start: Start
    ) -> Iterator[PacedRelease]:
        """`base`: values with which the chart runs on this cluster. Uninstalled at the end."""
        logs = folder / "iterations"
        logs.mkdir()
        logs.chmod(0o777)
        values = _with_pool(base, folder / "values.json", tiny_model.write(folder / "model"), logs, start)
        release = Release(cluster, namespace, values)
        release.install()
        try:
            yield cls(release, start.accelerator, logs, folder)
        finally:
            cluster.helm("uninstall", release.name, "--namespace", namespace, "--wait", "--timeout", "240s")

    @property
    def cluster(self) -> Client:
        """Where it runs."""
        return self.release.cluster

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.release.namespace

    def promise(self, mode: str, **spec: Any) -> None:
        """Makes the ServingSLO, and returns when the gateways have it and know a replica that is ready."""
        document = {
            "apiVersion": "headway.dev/v1alpha1",
            "kind": "ServingSLO",
            "metadata": {"name": SLO, "namespace": self.namespace},
            "spec": {
                "mode": mode,
                "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": POOL},
                "gatewayRef": {"name": "rel-headway-gateway"},
                **spec,
            },
        }
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
        self.cluster.wait_for(lambda: self.release.in_force(SLO, "chat"), "the promise is in force", pause=0.5)

    @property
    def status(self) -> dict[str, Any]:
        """Of the ServingSLO, as it is now."""
        return self.cluster.get(f"servingslo/{SLO}", namespace=self.namespace).get("status", {})

    @property
    def scale(self) -> int:
        """Replicas asked for now."""
        return int(self.cluster.get(f"deployment/{POOL}", namespace=self.namespace)["spec"]["replicas"])

    @property
    def deeds(self) -> Deeds:
        """What the operator did. The cluster must be ours, since only then is there an audit log."""
        assert self.cluster.audit is not None
        return Deeds(self.cluster.audit, self.namespace, "rel-headway-operator")

    def watch(self) -> FleetWatch:
        """To enter."""
        return FleetWatch(self.cluster.kubeconfig, self.namespace, RUNTIMES)

    def start_load(self, name: str, load: Load, begin: float) -> OpenLoop:
        """Through the gateway's Service; `name` is that of its file."""
        return OpenLoop.start([self.release.url], "tiny", load, self.results / f"{name}.jsonl", begin)

    def overrun(self, since: float, until: float) -> float:
        """How much longer than told all iterations together took that began in this span of the wall clock: 0.01 is one
        in a hundred.

        The time between two iterations counts, where a sequence went through both.
        """
        shift = time.time() - time.monotonic()  # pods read the same clock
        took = told = 0.0
        for log in self.logs.iterdir():
            steps = [json.loads(line) for line in log.read_text().splitlines()]
            for step, following in pairwise(steps):
                if not since <= step["began"] + shift < until:
                    continue
                shape = step["shape"]
                told += self.accelerator.seconds(shape["prefill_tokens"], shape["decode_rows"], shape["context_tokens"])
                took += following["began"] - step["began"] if following["shape"]["decode_rows"] else step["seconds"]
        return took / told - 1 if told else 0.0


def _with_pool(base: Path, path: Path, model: Path, logs: Path, start: Start) -> Path:
    runtime = json.loads(base.read_text())["runtime"]
    return values_file(
        path,
        base,
        runtime={
            "minReadySeconds": 0,
            "engine": {
                "maxNumSeqs": start.max_num_seqs,
                "prefillTokenBudget": start.prefill_token_budget,
                "blockSize": 16,  # no budget is smaller, and the arithmetic asks for more
                "kvCacheMemoryBytes": "8MiB",
            },
            "extraArgs": [f"--pace={start.accelerator.pace}", "--iteration-log=/iterations/$(POD_NAME).jsonl"],
            "extraVolumes": [
                *runtime["extraVolumes"],
                {"name": "iterations", "hostPath": {"path": str(logs), "type": "Directory"}},
            ],
            "extraVolumeMounts": [*runtime["extraVolumeMounts"], {"name": "iterations", "mountPath": "/iterations"}],
        },
        pools=[{"name": "chat", "model": {"hostPath": str(model), "servedName": "tiny"}}],
    )
