"""Releases side by side: two in one namespace and one of the same name in another; one of them with two gateways and
two models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from open_loop import Load
from release import Release, values_file
from under_load import but_ok, promise, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

GENTLE = Load(rate=1.0, seconds=900, prompt_tokens=30, output_tokens=30, tokens_per_word=1.0, template_tokens=1.0)
MODELS = {
    ("north", "one"): {"chat": "tiny", "code": "coder"},
    ("north", "two"): {"chat": "tiny"},
    ("south", "one"): {"chat": "other"},
}
"""(namespace, release) → pool → the model that it serves."""


@pytest.fixture(scope="module")
def releases(
    full_cluster: Client, product_values: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[tuple[str, str], Release]]:
    folder = tmp_path_factory.mktemp("neighbours")
    model = str(tiny_model.write(folder / "model"))
    engine = {"maxNumSeqs": 8, "prefillTokenBudget": 128, "kvCacheMemoryBytes": "8MiB"}
    runtime = {"engine": engine, "extraArgs": ["--pace=0.05,0.0001,0.001,0.000001", "--no-calibration"]}
    made: dict[tuple[str, str], Release] = {}
    with ExitStack() as stack:
        places = {each: stack.enter_context(fresh_namespace(full_cluster, request)) for each in ("north", "south")}
        for (place, name), models in MODELS.items():
            pools = [
                {"name": pool, "model": {"hostPath": model, "servedName": served}} for pool, served in models.items()
            ]
            values = values_file(
                folder / f"{place}-{name}.json",
                product_values,
                gateway={"replicas": len(models)},
                runtime=runtime,
                pools=pools,
            )
            made[place, name] = Release(full_cluster, places[place], values, name)
            made[place, name].install()
            for pool in models:
                promise(made[place, name], name=f"{name}-{pool}", pool=pool)
        yield made


def test_everybody_gets_answers_of_his_own_release_and_model(releases: dict[tuple[str, str], Release], tmp_path: Path):
    with ExitStack() as stack:
        flowing = []
        for at, release in releases.items():
            for model in MODELS[at].values():
                folder = tmp_path / "-".join((*at, model))
                folder.mkdir()
                flowing.append(stack.enter_context(traffic(release, folder, model, (GENTLE,))))
        flowing[0].flow_for(10)
        for each in flowing:
            assert but_ok(each.finish()) == []
    for at, release in releases.items():
        with release.client() as client:
            assert {model.id for model in client.models.list().data} == set(MODELS[at].values())
        gateways = release.gateways()
        boots = {report.boot_id for report in gateways.values()}
        for runtime in release.runtimes().values():
            assert runtime.dispatched.keys() <= boots, "nobody else sent anything here"
            assert runtime.finished > 0
        served = [
            sum(books.outcomes["ok"] for pool in report.pools for books in pool.classes.values())
            for report in gateways.values()
        ]
        assert all(served), f"every gateway served somebody: {served}"
        release.wait_until_settled()


def test_each_promise_is_kept_by_the_operator_of_its_own_release_and_no_right_is_missing(
    releases: dict[tuple[str, str], Release],
):
    """Over everything so far: one account alone wrote each object, all of its namespace, and it was refused nothing."""
    cluster = next(iter(releases.values())).cluster
    if cluster.audit is None:
        pytest.skip("no audit log of a cluster that is not ours")
    cluster.audit.settle()
    writing = {"create", "update", "patch", "delete"}
    for at, release in releases.items():
        account = f"system:serviceaccount:{release.namespace}:{release.part('operator')}"
        calls = cluster.audit.entries(user=account)
        assert [(call.verb, call.uri, call.code) for call in calls if call.code in (401, 403)] == []
        # To ask for its own rights is a write that writes nothing.
        writes = [call for call in calls if call.verb in writing and call.resource != "selfsubjectaccessreviews"]
        written = {(call.resource, call.subresource, call.name) for call in writes}
        assert {call.namespace for call in writes} == {release.namespace}
        assert {name for kind, _, name in written if kind == "servingslos"} == {
            f"{release.name}-{pool}" for pool in MODELS[at]
        }
        assert {name for kind, _, name in written if kind == "configmaps"} == {f"{release.part('gateway')}-policy"}
        assert {name for kind, _, name in written if kind == "leases"} <= {release.part("operator"), ""}
        own = release.pods("gateway") | release.pods("runtime")
        assert {name for kind, _, name in written if kind == "pods"} <= own.keys()
    default = {f"system:serviceaccount:{release.namespace}:default" for release in releases.values()}
    assert cluster.audit.entries(user=default) == [], "gateways and runtimes have nothing to say to the API server"


def test_every_network_policy_covers_pods_of_one_part_of_one_release(releases: dict[tuple[str, str], Release]):
    for at, release in releases.items():
        policies = release.cluster.get(
            "networkpolicies", "-l", f"app.kubernetes.io/instance={release.name}", namespace=release.namespace
        )
        covered: dict[str, set[str]] = {}
        for policy in policies["items"]:
            covered[policy["metadata"]["name"]] = selected(release, policy["spec"]["podSelector"]["matchLabels"])
            for rule in policy["spec"]["ingress"]:
                senders = [
                    peer["podSelector"]["matchLabels"]
                    for peer in rule.get("from", [])
                    if "namespaceSelector" not in peer
                ]
                for sender in senders:
                    assert selected(release, sender) <= everybody(release) and selected(release, sender), (
                        "lets in nobody else, and somebody"
                    )
        wanted = {release.part(part): set(release.pods(part)) for part in ("gateway", "operator")}
        wanted |= {release.part(pool): set(release.pods("runtime", pool)) for pool in MODELS[at]}
        assert covered == wanted


def test_a_release_that_goes_takes_nobody_else_along(releases: dict[tuple[str, str], Release], tmp_path: Path):
    staying, going = releases["north", "one"], releases["north", "two"]
    before = everybody(staying)
    with traffic(staying, tmp_path, loads=(GENTLE,)) as flowing:
        going.cluster.helm("uninstall", going.name, "--namespace", going.namespace, "--wait", "--timeout", "120s")
        lines = flowing.finish()
    assert but_ok(lines) == []
    assert everybody(staying) == before
    status = staying.cluster.get("servingslo/one-chat", namespace=staying.namespace)["status"]
    assert {known["type"]: known["status"] for known in status["conditions"]}["TargetResolved"] == "True"


def everybody(release: Release) -> set[str]:
    return {name for component in ("gateway", "runtime", "operator") for name in release.pods(component)}


def selected(release: Release, labels: Mapping[str, str]) -> set[str]:
    """Running pods in the namespace that carry these labels."""
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    listed: list[dict[str, Any]] = json.loads(
        release.cluster.kubectl("get", "pods", "-l", selector, "-n", release.namespace, "-o", "json")
    )["items"]
    return {pod["metadata"]["name"] for pod in listed if "deletionTimestamp" not in pod["metadata"]}
