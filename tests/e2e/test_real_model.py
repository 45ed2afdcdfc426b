"""The default model on this machine's processor: what the right knob is worth there, and that replicas come and go
without loss.

Speed differs from machine to machine and from minute to minute, so nothing here is an absolute time. The target follows
from what the replica measured of itself, and the operator that acts is compared with the one that only recommends in
neighbouring spans of the same run, in the order ABBA, so that a drift of the machine hits both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from headway_core.contract.reports import RuntimeReport
from headway_core.latency import StepTimeModel
from open_loop import Load, OpenLoop
from release import Release, values_file

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

STREAMS, PROMPT, OUTPUT = 24, 40, 64
"""How many ask at once, and tokens of each."""
ROOM = 32
"""Sequences that a replica takes when nobody tells it better."""
SPAN = 45.0
PAIRS = ("AB", "BA", "AB", "BA")
ARMS = {"A": "recommend", "B": "enforce"}


@pytest.fixture
def release(
    full_cluster: Client, product_values: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Release]:
    """Two pools of one replica with the default model and room for thirty-two sequences: one for each mode."""
    pools = [{"name": name, "model": {"servedName": name}} for name in ARMS.values()]
    runtime = {"minReadySeconds": 0, "engine": {"maxNumSeqs": ROOM, "threads": 1}}
    with fresh_namespace(full_cluster, request) as namespace:
        made = Release(
            full_cluster, namespace, values_file(tmp_path / "values.json", product_values, runtime=runtime, pools=pools)
        )
        made.install()
        yield made
        full_cluster.helm("uninstall", "rel", "--namespace", namespace, "--wait", "--timeout", "240s")


def test_the_operator_that_acts_keeps_tokens_closer_together(
    release: Release, tmp_path: Path, request: pytest.FixtureRequest
):
    rounds = Rounds(release, tmp_path)
    for name in ARMS.values():
        promise(release, name, "Observe", {"tpot": {"target": "10s"}})
        rounds.one(name)
    target = 1.3 * predicted_tpot(release, "recommend", 4)
    for name in ARMS.values():
        promise(
            release, name, name.capitalize(), {"tpot": {"target": f"{target * 1000:.0f}ms"}, "ttft": {"target": "120s"}}
        )
        release.cluster.wait_for(
            lambda: rounds.one(name) and "maxNumSeqs" in desired(release, name),  # noqa: B023
            f"{name} knows",
            patience=240,
        )
    release.cluster.wait_for(
        lambda: knobs(release, "enforce") == desired(release, "enforce")["maxNumSeqs"], "knobs are in force"
    )
    p95 = [{arm: percentile(rounds.span(ARMS[arm]), 0.95) for arm in pair} for pair in PAIRS]
    ratios = [pair["B"] / pair["A"] for pair in p95]
    tell(
        request,
        f"target {target * 1000:.0f} ms; knob {knobs(release, 'enforce')}, without the operator "
        f"{knobs(release, 'recommend')}; "
        f"P95 TPOT in ms {[{ARMS[arm]: round(1000 * value) for arm, value in pair.items()} for pair in p95]}, "
        f"ratios {[round(ratio, 2) for ratio in ratios]}",
    )
    assert knobs(release, "recommend") == ROOM, "nothing was applied where it was only recommended"
    assert sum(ratio < 0.8 for ratio in ratios) >= 3, ratios


def test_replicas_come_and_go_and_no_stream_is_cut(release: Release, tmp_path: Path):
    patient = {"tpot": {"target": "10s"}, "ttft": {"target": "120s"}}
    promise(release, "enforce", "Enforce", patient, replicas=1)
    load = Load(rate=0.5, seconds=900, prompt_tokens=PROMPT, output_tokens=OUTPUT, seed=7)
    with OpenLoop.start([release.url], "enforce", load, tmp_path / "load.jsonl") as running:
        release.cluster.wait_for(lambda: len(running.lines()) >= 5, "the load is under way", patience=90)
        for replicas in (2, 1):
            promise(release, "enforce", "Enforce", patient, replicas=replicas)
            release.cluster.wait_for(
                lambda: served_by(release) == replicas,  # noqa: B023
                f"{replicas} replicas serve",
                patience=240,
                pause=1,
            )
            ended = len(running.lines())
            release.cluster.wait_for(
                lambda: len(running.lines()) >= ended + 10,  # noqa: B023
                "the load goes on",
                patience=120,
                pause=1,
            )
        running.enough()
        summary = running.finish(300)
    assert summary.ok == summary.offered >= 25, summary


class Rounds:
    """All streams at once, again and again."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._release = release
        self._folder = folder
        self._count = 0

    def one(self, model: str) -> list[dict[str, Any]]:
        """One round; the lines of its requests, none of which may fail."""
        self._count += 1
        load = Load(10.0 * STREAMS, 0.1, PROMPT, OUTPUT, arrivals="uniform", seed=self._count)
        with OpenLoop.start([self._release.url], model, load, self._folder / f"{self._count}.jsonl") as running:
            summary = running.finish(300)
            assert summary.ok == summary.offered == STREAMS, summary
            return running.lines()

    def span(self, model: str) -> list[float]:
        """TPOT of all requests of the rounds that began within `SPAN` seconds."""
        until = time.monotonic() + SPAN
        found: list[float] = []
        while time.monotonic() < until:
            found += [line["tpot"] for line in self.one(model)]
        return found


def predicted_tpot(release: Release, name: str, sequences: int) -> float:
    """Seconds of an iteration of so many decodes, by what the pool's replica has measured."""
    step_time = report(release, name).step_time
    assert step_time is not None
    seconds = StepTimeModel.from_report(step_time).decode_seconds(sequences, sequences * (PROMPT + OUTPUT // 2))
    assert seconds is not None
    return seconds


def promise(release: Release, name: str, mode: str, objectives: dict[str, Any], replicas: int | None = None) -> None:
    """Makes or changes the ServingSLO of one pool, and returns when the gateways have it."""
    spec = {
        "mode": mode,
        "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": release.part(name)},
        "gatewayRef": {"name": release.part("gateway")},
        "objectives": objectives,
        "evaluation": {"window": "20s", "minSamples": 10},
        **({} if replicas is None else {"bounds": {"replicas": {"min": replicas, "max": replicas}}}),
    }
    document = {"apiVersion": "headway.dev/v1alpha1", "kind": "ServingSLO", "metadata": {"name": name}, "spec": spec}
    release.cluster.kubectl("apply", "-n", release.namespace, "-f", "-", stdin=json.dumps(document))
    release.cluster.wait_for(
        lambda: release.in_force(name, name), f"the promise over {name} is in force", patience=90, pause=0.5
    )


def desired(release: Release, name: str) -> dict[str, int]:
    """What the operator would have."""
    status = release.cluster.get(f"servingslo/{name}", namespace=release.namespace).get("status", {})
    return dict(status.get("desired") or {})


def knobs(release: Release, name: str) -> int | None:
    """max_num_seqs in force in the pool's replica."""
    return report(release, name).effective.max_num_seqs


def report(release: Release, name: str) -> RuntimeReport:
    """Of the pool's only replica."""
    pool = release.part(name)
    return next(known for known in release.runtimes().values() if known.pool == pool)


def served_by(release: Release) -> int:
    """Replicas of the enforced pool that every gateway sends to; 0 while one too many is still on its way out."""
    pool = release.part("enforce")
    ready = [
        known.ready_replicas for report in release.gateways().values() for known in report.pools if known.pool == pool
    ]
    return min(ready) if min(ready) == len(release.pods("runtime", "enforce")) else 0


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def tell(request: pytest.FixtureRequest, line: str) -> None:
    """A line of the test's output, whether it passes or not."""
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line("\n" + line)
