"""Changes that an operator of the cluster makes on any day, each under a steady load: nobody is failed, shed or cut
off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import binaries, product_images
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from cluster.full_cluster import FullCluster
from deeds import Deeds
from fleet_watch import FleetWatch
from release import Pod, Release
from under_load import but_ok, install, promise, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def release(
    full_cluster: Client, product_values: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Release]:
    with fresh_namespace(full_cluster, request) as namespace:
        installed = install(full_cluster, namespace, product_values, tmp_path_factory.mktemp("release"))
        promise(installed)
        yield installed


def test_an_upgrade_that_changes_gateways_and_runtimes_costs_nobody_an_answer(release: Release, tmp_path: Path):
    """One runtime: its successor must be known to every gateway before it goes, although resolvers know only old
    addresses for 30 s."""
    old = everybody(release)
    with traffic(release, tmp_path) as flowing:
        release.upgrade("--set", "gateway.maxQueueRequests=500", "--set", "runtime.keepAliveSeconds=121")
        wait_until_gone(release, old)
        lines = flowing.finish()
    assert but_ok(lines) == []
    release.wait_until_settled()
    assert restarts(release) == 0


@pytest.mark.full
@pytest.mark.parametrize("component", ["gateway", "chat"])
def test_a_rollout_restart_costs_nobody_an_answer(release: Release, tmp_path: Path, component: str):
    release.upgrade()
    deployment = f"deployment/{release.part(component)}"
    old = release.pods("gateway" if component == "gateway" else "runtime")
    with traffic(release, tmp_path) as flowing:
        release.cluster.kubectl("rollout", "restart", deployment, "-n", release.namespace)
        release.cluster.kubectl("rollout", "status", deployment, "-n", release.namespace, "--timeout=180s", timeout=200)
        wait_until_gone(release, old)
        lines = flowing.finish()
    assert but_ok(lines) == []
    release.wait_until_settled()
    assert restarts(release) == 0


@pytest.mark.full
def test_a_replica_that_is_no_longer_needed_is_cordoned_and_goes_once_it_is_empty(release: Release, tmp_path: Path):
    cluster, namespace = release.cluster, release.namespace
    if cluster.audit is None:
        pytest.skip("no audit log of a cluster that is not ours")
    deeds = Deeds(cluster.audit, namespace, release.part("operator"))
    with traffic(release, tmp_path) as flowing, watch(release) as watched:
        bound(release, 2)
        cluster.wait_for(lambda: len(busy(watched)) == 2 == len(ready(release)), "a second one serves", patience=90)
        asked = time.time()
        bound(release, 1)
        cluster.wait_for(lambda: deeds.scalings(asked) != [], "one replica is asked for", patience=90, pause=1)
        lines = flowing.finish()
    cordon = next(write for write in deeds.policies("chat", asked) if write.cordoned)
    mark = next(mark for mark in deeds.marks(asked) if mark.cost is not None)
    (scaling,) = deeds.scalings(asked)
    assert cordon.at < mark.at < scaling.at and scaling.replicas == 1
    assert cordon.cordoned == (mark.pod,)
    before = {name: report.running + report.waiting for name, report in watched.at(cordon.at).reports.items()}
    assert before[mark.pod] <= min(before.values()) + 2, f"none goes while another is clearly emptier: {before}"
    at_the_end = watched.at(scaling.at).reports[mark.pod]
    assert (at_the_end.running, at_the_end.waiting) == (0, 0), "nothing runs on it any more"
    cluster.wait_for(lambda: mark.pod not in release.pods("runtime"), "it is told to go")
    assert but_ok(lines) == []
    release.wait_until_settled()


@pytest.mark.full
def test_the_drain_of_a_node_costs_nobody_an_answer(
    product_values: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    """Two of each on two nodes, and budgets that let one of each go at a time. Whoever has no other place waits for the
    node's return."""
    with two_nodes() as cluster, fresh_namespace(cluster, request) as namespace:
        release = install(cluster, namespace, product_values, tmp_path, replicas=2)
        promise(release)
        for component in ("gateway", "runtime"):
            assert {pod.node for pod in release.pods(component).values()} == {"node1", "node2"}, "spread over the nodes"
        # node1 is where this test's way into the cluster leads through.
        leaving = {name: pod for name, pod in everybody(release).items() if pod.node == "node2"}
        with traffic(release, tmp_path) as flowing:
            cluster.kubectl(
                "drain", "node2", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s", timeout=200
            )
            wait_until_gone(release, leaving)
            cluster.kubectl("uncordon", "node2")
            lines = flowing.finish()
        assert but_ok(lines) == []
        release.wait_until_ready()
        release.wait_until_settled()
        assert restarts(release) == 0


@contextmanager
def two_nodes() -> Iterator[FullCluster]:
    if lack := FullCluster.lacking() or [f"not built: {name}" for name in binaries.missing(binaries.FULL)]:
        pytest.skip("; ".join(lack))
    cluster = FullCluster(binaries.CACHE / "run" / f"tests-{os.getpid()}-two", nodes=2, bound=True)
    cluster.up(lambda text: None)
    try:
        cluster.load_images(product_images.archives())
        yield cluster
    finally:
        cluster.down()


def bound(release: Release, replicas: int) -> None:
    """Has the operator keep exactly so many."""
    spec = {"mode": "Enforce", "bounds": {"replicas": {"min": replicas, "max": replicas}}}
    release.cluster.kubectl(
        "patch", "sslo/chat", "-n", release.namespace, "--type", "merge", "-p", json.dumps({"spec": spec})
    )


def watch(release: Release) -> FleetWatch:
    return FleetWatch(
        release.cluster.kubeconfig, release.namespace, f"headway.dev/runtime={release.part('chat')}", every=0.5
    )


def busy(watched: FleetWatch) -> list[str]:
    return [name for name, report in watched.last.reports.items() if report.running]


def ready(release: Release) -> list[str]:
    return [name for name, pod in release.pods("runtime").items() if pod.ready]


def everybody(release: Release) -> dict[str, Pod]:
    return release.pods("gateway") | release.pods("runtime")


def wait_until_gone(release: Release, old: dict[str, Pod]) -> None:
    """Their last stream included: the objects go when the processes have gone."""

    def gone() -> bool:
        return not old.keys() & {
            pod["metadata"]["name"] for pod in release.cluster.get("pods", namespace=release.namespace)["items"]
        }

    release.cluster.wait_for(gone, f"gone: {', '.join(old)}", patience=240, pause=0.5)


def restarts(release: Release) -> int:
    return sum(pod.restarts for pod in everybody(release).values())
