"""kill -9 under a steady load, one component after another: the documented effect and no other, and recovery by itself.

A stream that is lost because its runtime died ends in an in-band error event. A gateway is the one that would say so:
with it, connections break. Whoever is not on what died notices nothing. Afterwards the books are exact, and nothing was
restarted but what was killed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from cluster.full_cluster import FullCluster
from deeds import Deeds
from release import Pod, Release
from under_load import but_ok, install, promise, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

REFUSED_FOR = 10.0
"""Seconds after the end of a gateway within which a new connection may still be led to where it was."""


@pytest.fixture(scope="module")
def release(
    full_cluster: Client, product_values: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Release]:
    with fresh_namespace(full_cluster, request) as namespace:
        installed = install(full_cluster, namespace, product_values, tmp_path_factory.mktemp("release"), replicas=2)
        promise(installed)
        yield installed


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("headway_runtime.engine.process", id="engine"),
        pytest.param("-m headway_runtime ", id="server", marks=pytest.mark.full),
    ],
)
def test_a_runtime_that_dies_loses_its_own_streams_and_says_so_in_each(release: Release, tmp_path: Path, words: str):
    before = everybody(release)
    with traffic(release, tmp_path) as flowing:
        victim = busiest(release)
        died = kill(release.process(victim, words))
        wait_until_restarted(release, victim, before)
        lines = flowing.finish()
    lost = [line for line in lines if line["outcome"] == "lost"]
    assert lost != [], "something ran on it"
    print(f"{len(lost)} of {len(lines)} streams were lost: {Counter(line['error'] for line in lost)}")
    assert all(line["first"] <= died + 1 and abs(line["end"] - died) < 3 for line in lost), (
        "only streams that had begun, and at once"
    )
    assert but_ok([line for line in lines if line["outcome"] != "lost"]) == []
    assert restarted(release, before) == {victim: 1}
    release.wait_until_settled()


def test_a_gateway_that_dies_breaks_its_own_connections_and_no_others(release: Release, tmp_path: Path):
    before = everybody(release)
    with traffic(release, tmp_path) as flowing:
        victim = next(
            name
            for name, report in release.gateways().items()
            if any(sum(p.replica_in_flight.values()) for p in report.pools)
        )
        died = kill(release.process(victim, "headway_gateway"))
        wait_until_restarted(release, victim, before)
        lines = flowing.finish()
    cut = [line for line in lines if line["outcome"] == "truncated"]
    refused = [line for line in lines if line["outcome"] == "failed"]
    assert cut != [], "something ran through it"
    until = max([died, *(line["due"] for line in refused)]) - died
    print(f"{len(cut)} of {len(lines)} streams were cut, {len(refused)} connections were refused within {until:.1f} s")
    assert all(line["due"] <= died and abs(line["end"] - died) < 1 for line in cut), "only what ran through it"
    assert all(line["end"] >= died - 1 and line["due"] <= died + REFUSED_FOR for line in refused), (
        "connections are soon led to the other one"
    )
    assert but_ok([line for line in lines if line["outcome"] not in ("truncated", "failed")]) == []
    assert restarted(release, before) == {victim: 1}
    release.wait_until_settled()


@pytest.mark.full
def test_an_operator_that_dies_is_not_missed_until_something_is_to_be_decided(release: Release, tmp_path: Path):
    before = everybody(release)
    (victim,) = release.pods("operator")
    with traffic(release, tmp_path) as flowing:
        kill(release.process(victim, "headway_operator"))
        wait_until_restarted(release, victim, before)
        assert_it_acts(release)
        lines = flowing.finish()
    assert but_ok(lines) == []
    assert restarted(release, before) == {victim: 1}
    release.wait_until_settled()


@pytest.mark.full
def test_a_minute_without_the_api_server_costs_nobody_an_answer_and_restarts_nothing(release: Release, tmp_path: Path):
    if release.cluster.audit is None:
        pytest.skip("a cluster that is not ours is not stopped")
    before = everybody(release)
    with traffic(release, tmp_path) as flowing:
        release.cluster.stop_api_server(kill=True)
        try:
            flowing.flow_for(60)
        finally:
            release.cluster.start_api_server()
        assert_it_acts(release)
        lines = flowing.finish()
    assert but_ok(lines) == []
    assert restarted(release, before) == {}
    release.wait_until_settled()


@pytest.mark.full
def test_a_kubelet_that_is_gone_for_a_while_costs_nobody_an_answer_and_restarts_nothing(
    release: Release, tmp_path: Path
):
    if not isinstance(release.cluster, FullCluster):
        pytest.skip("a node that is not ours is left alone")
    (node,) = release.cluster.nodes
    before = everybody(release)
    with traffic(release, tmp_path) as flowing:
        node.kill_kubelet()
        try:
            flowing.flow_for(15)
        finally:
            node.revive_kubelet()
        release.cluster.wait_for(
            lambda: all(pod.ready for pod in everybody(release).values()), "all pods are ready", patience=60
        )
        flowing.flow_for(5)
        lines = flowing.finish()
    assert but_ok(lines) == []
    assert restarted(release, before) == {}
    release.wait_until_settled()


def everybody(release: Release) -> dict[str, Pod]:
    return release.pods("gateway") | release.pods("runtime") | release.pods("operator")


def kill(process: psutil.Process) -> float:
    """When: wall clock."""
    process.send_signal(signal.SIGKILL)
    return time.time()


def busiest(release: Release) -> str:
    """The runtime that most runs on."""
    return max((report.running, name) for name, report in release.runtimes().items())[1]


def wait_until_restarted(release: Release, victim: str, before: dict[str, Pod]) -> None:
    killed = time.time()

    def back() -> bool:
        now = everybody(release)[victim]
        return now.ready and now.restarts > before[victim].restarts

    release.cluster.wait_for(back, f"{victim} is back by itself", patience=240, pause=0.5)
    print(f"{victim} is ready again after {time.time() - killed:.0f} s")


def restarted(release: Release, before: dict[str, Pod]) -> dict[str, int]:
    """Pod → restarts since then. The pods are the same ones."""
    now = everybody(release)
    assert {name: pod.uid for name, pod in now.items()} == {name: pod.uid for name, pod in before.items()}
    return {
        name: pod.restarts - before[name].restarts for name, pod in now.items() if pod.restarts != before[name].restarts
    }


def assert_it_acts(release: Release) -> None:
    """Somebody holds the lease and looks at objects: a changed promise is soon in force everywhere."""
    began = time.time()
    number = release.cluster.get("servingslo/chat", namespace=release.namespace)["metadata"]["generation"]
    objectives = {"ttft": {"target": f"{60 + number}s", "percentile": 50}, "tpot": {"target": "10s", "percentile": 50}}
    promise(
        release, patience=240, objectives=objectives
    )  # a kubelet that lost the API server asks again after its own time
    took = time.time() - began
    if release.cluster.audit is not None:
        write = Deeds(release.cluster.audit, release.namespace, release.part("operator")).policies("chat", began)[-1]
        print(f"a changed promise was written after {write.at - began:.0f} s and in force after {took:.0f} s")
