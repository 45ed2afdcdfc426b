"""Emulated accelerators under a steady load, for tests that change or kill something meanwhile.

Two kinds run side by side: short answers, three a second, and now and then one that is written for a quarter of a
minute, so that every pod on its way out has some to finish. Nobody sends twice, so an outcome is what a client without
retries saw.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tiny_model
from cluster.client import Client
from inconclusive import inconclusive
from open_loop import Load, OpenLoop
from release import Release, values_file

PACE = "0.05,0.0001,0.001,0.000001"
"""An iteration of about 60 ms: this machine has time left for the rest."""
SHORT = Load(
    rate=3.0, seconds=900, prompt_tokens=40, output_tokens=40, tokens_per_word=1.0, template_tokens=1.0, seed=1
)
LONG = Load(
    rate=0.25,
    seconds=900,
    prompt_tokens=40,
    output_tokens=160,
    arrivals="uniform",
    tokens_per_word=1.0,
    template_tokens=1.0,
    seed=2,
)
WARM = 6
"""Requests that must have ended before anything is done to the release."""

Line = dict[str, Any]


def install(cluster: Client, namespace: str, base: Path, folder: Path, *, replicas: int = 1, **changes: Any) -> Release:
    """Two gateways and `replicas` accelerators behind them, ready. `base`: values with which the chart runs on this
    cluster."""
    model = tiny_model.write(folder / "model")
    runtime = {
        "minReadySeconds": None,
        "engine": {"maxNumSeqs": 16, "prefillTokenBudget": 256, "kvCacheMemoryBytes": "8MiB"},
        "extraArgs": [f"--pace={PACE}", "--no-calibration"],
    }
    pools = [{"name": "chat", "model": {"hostPath": str(model), "servedName": "tiny"}}]
    values = values_file(folder / "base.json", base, gateway={"replicas": 2}, runtime=runtime, pools=pools)
    release = Release(cluster, namespace, values_file(folder / "values.json", values, **changes))
    release.helm("install", "--set", "runtime.minReadySeconds=0")
    cluster.kubectl("scale", f"deployment/{release.part('chat')}", f"--replicas={replicas}", "-n", namespace)
    release.wait_until_ready(patience=240)
    return release


def promise(release: Release, name: str = "chat", pool: str = "chat", *, patience: float = 90.0, **spec: Any) -> None:
    """A ServingSLO that any machine keeps, observed only unless `spec` says more: what is tested is who is lost, not
    the speed."""
    document = {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "ServingSLO",
        "metadata": {"name": name, "namespace": release.namespace},
        "spec": {
            "mode": "Observe",
            "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": release.part(pool)},
            "gatewayRef": {"name": release.part("gateway")},
            "objectives": {"ttft": {"target": "60s", "percentile": 50}, "tpot": {"target": "10s", "percentile": 50}},
            **spec,
        },
    }
    release.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    number = release.cluster.get(f"servingslo/{name}", namespace=release.namespace)["metadata"]["generation"]

    def in_force() -> bool:
        with contextlib.suppress(OSError):
            return set(release.generations(pool).values()) == {number}
        return False

    release.cluster.wait_for(in_force, "everybody has the promise in force", patience=patience, pause=0.5)


class Traffic:
    """What is being sent and what has come of it."""

    def __init__(self, loads: list[OpenLoop]) -> None:
        self._loads = loads

    def lines(self) -> list[Line]:
        """Of the requests that have ended so far."""
        return [line for load in self._loads for line in load.lines()]

    def flow_for(self, seconds: float) -> None:
        """Lets it run on: what was changed has been changed, and now it must hold."""
        time.sleep(seconds)

    def finish(self) -> list[Line]:
        """Sends no more, and returns the lines of all requests once the last has ended."""
        for load in self._loads:
            load.enough()
        for load in self._loads:
            load.finish(timeout=180)
        return self.lines()


@contextmanager
def traffic(
    release: Release, folder: Path, model: str = "tiny", loads: tuple[Load, ...] = (SHORT, LONG)
) -> Iterator[Traffic]:
    """Through the gateway's Service, and under way when the block is entered."""
    with ExitStack() as stack:
        url = release.url
        running = [
            stack.enter_context(OpenLoop.start([url], model, load, folder / f"{model}-{number}.jsonl"))
            for number, load in enumerate(loads)
        ]
        flowing = Traffic(running)
        release.cluster.wait_for(lambda: len(flowing.lines()) >= WARM, "the load is under way", patience=60)
        yield flowing


def but_ok(lines: list[Line]) -> list[tuple[Any, ...]]:
    """What did not end as it should: outcome, status, seconds from its being due to its end, tokens, and what the
    client was told.

    A 429 is no loss: it says that this machine was too slow for the load, which no change and no death excuses and none
    has to cure. Where that was said to more than a third of the requests the run shows nothing.
    """
    contended = sum(line["status"] == 429 for line in lines)
    if 3 * contended > len(lines):
        inconclusive(f"the machine was too slow for {contended} of {len(lines)} requests")
    return [
        (line["outcome"], line["status"], round((line["end"] or 0) - line["due"], 2), line["tokens"], line["error"])
        for line in sorted(lines, key=lambda line: line["due"])
        if line["outcome"] != "ok" and line["status"] != 429
    ]
