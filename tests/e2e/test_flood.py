"""More comes than one replica can carry, and two more are started: those who wait go in order, and nobody stampedes to
the newcomers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from cluster.client import Client
from fleet_watch import FleetWatch, Look
from headway_core.contract.reports import RuntimeReport
from open_loop import Load
from under_load import Line, install, promise, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

SLOTS = 8
FLOOD = Load(
    rate=7.0, seconds=900, prompt_tokens=40, output_tokens=40, tokens_per_word=1.0, template_tokens=1.0, seed=5
)
"""Twice what one replica carries: 8 slots, 40 iterations of about 60 ms an answer."""
TTFT = 5.0
AHEAD = 2
"""Requests that may wait inside a full replica, so that a slot that comes free is filled at once."""
APART = 0.5
"""Seconds, some iterations: replicas are at different places in theirs."""


def test_from_one_replica_to_three_while_a_flood_comes(
    full_cluster: Client, cluster_namespace: str, product_values: Path, tmp_path: Path
):
    release = install(
        *(full_cluster, cluster_namespace, product_values, tmp_path),
        gateway={"replicas": 1},
        runtime={"engine": {"maxNumSeqs": SLOTS}, "extraArgs": ["--pace=0.05,0.0001,0.001,0.000001"]},
    )
    promise(
        release,
        objectives={"ttft": {"target": f"{TTFT:g}s", "percentile": 90}, "tpot": {"target": "10s", "percentile": 50}},
    )
    (first,) = release.pods("runtime")
    deployment = f"deployment/{release.part('chat')}"
    with (
        traffic(release, tmp_path, loads=(FLOOD,)) as flowing,
        FleetWatch(
            full_cluster.kubeconfig, release.namespace, f"headway.dev/runtime={release.part('chat')}", every=0.25
        ) as watched,
    ):
        full_cluster.kubectl("scale", deployment, "--replicas=3", "-n", release.namespace)
        full_cluster.wait_for(lambda: len(joined(watched.looks, first)) == 2, "both newcomers serve", patience=120)
        flowing.flow_for(15)
        lines = flowing.finish()
    joins = joined(watched.looks, first)
    for name, at in joins.items():
        crowds = [report.running + report.waiting for report in reports(watched.looks, name, at, at + 10)]
        assert max(crowds) <= SLOTS + AHEAD, f"{name} got no more than it has slots for: {crowds}"
    both = max(joins.values())
    done = {
        name: seen[-1].finished - seen[0].finished
        for name in (first, *joins)
        if (seen := reports(watched.looks, name, both, both + 15))
    }
    assert all(0.2 <= count / sum(done.values()) <= 0.5 for count in done.values()), f"each does about a third: {done}"
    assert [line for line in lines if line["outcome"] not in ("ok", "shed")] == []
    after = [line for line in lines if line["due"] >= both + 1]
    assert sum(line["outcome"] == "ok" and line["ttft"] <= TTFT for line in after) >= 0.95 * len(after), (
        "three carry it, the newcomers too"
    )
    answered = sum(line["outcome"] == "ok" for line in lines)
    assert len(overtaken(lines)) <= 0.03 * answered, f"those who wait go in order: {overtaken(lines)}"
    release.wait_until_settled()


def reports(looks: list[Look], name: str, since: float, until: float) -> list[RuntimeReport]:
    return [look.reports[name] for look in looks if since <= look.at < until and name in look.reports]


def joined(looks: list[Look], but: str) -> dict[str, float]:
    """Who came since, and when something first ran on it."""
    found: dict[str, float] = {}
    for look in list(looks):
        for name, report in look.reports.items():
            if name != but and report.running:
                found.setdefault(name, look.at)
    return found


def overtaken(lines: list[Line]) -> list[tuple[float, float]]:
    """Of each answer whose first token came more than `APART` after that of the next one asked for: when it was due,
    and by how much."""
    answered = sorted((line for line in lines if line["first"] is not None), key=lambda line: line["due"])
    return [
        (one["due"], one["first"] - other["first"])
        for one, other in pairwise(answered)
        if one["first"] - other["first"] > APART
    ]
