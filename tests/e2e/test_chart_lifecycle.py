"""Install, upgrade, rollback and uninstall against a real API server: what was tuned stays, what did not change does
not restart."""

import json
import shutil
from pathlib import Path

import pytest
from cluster.client import Client
from cluster.errors import CommandFailed
from headway_core.contract.kubernetes import FIELD_MANAGER_PREFIX
from rendering import CHART

pytestmark = pytest.mark.cluster

POLICY = json.dumps({"revision": 17})


@pytest.fixture
def newer_chart(tmp_path: Path) -> Path:
    """The same chart under a later version."""
    chart = tmp_path / "headway"
    shutil.copytree(CHART, chart)
    description = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(description.replace("\nversion: 0.1.0", "\nversion: 0.2.0"))
    assert (chart / "Chart.yaml").read_text() != description
    return chart


@pytest.mark.parametrize("apply", ["true", "false"], ids=["server-side", "client-side"])
def test_upgrade_and_rollback_keep_what_was_tuned_and_restart_no_unchanged_pod(
    control_plane: Client, namespace: str, newer_chart: Path, apply: str
):
    how = (f"--server-side={apply}", "--namespace", namespace)
    control_plane.helm("install", "rel", str(CHART), *how)
    tune(control_plane, namespace)
    before = generations(control_plane, namespace)

    control_plane.helm("upgrade", "rel", str(CHART), *how, "--set", "gateway.maxQueueRequests=500")
    assert tuned(control_plane, namespace) == (3, POLICY)
    assert changed(before, generations(control_plane, namespace)) == ["rel-headway-gateway"]

    before = generations(control_plane, namespace)
    control_plane.helm("upgrade", "rel", str(newer_chart), *how, "--reuse-values")
    assert "headway-0.2.0" in control_plane.helm("list", "--namespace", namespace)
    assert tuned(control_plane, namespace) == (3, POLICY)
    assert changed(before, generations(control_plane, namespace)) == []

    control_plane.helm("rollback", "rel", "1", *how)
    assert tuned(control_plane, namespace) == (3, POLICY)
    assert changed(before, generations(control_plane, namespace)) == ["rel-headway-gateway"]


def test_another_drain_time_rolls_the_pods_it_concerns(control_plane: Client, namespace: str):
    control_plane.helm("install", "rel", str(CHART), "--namespace", namespace)
    before = generations(control_plane, namespace)
    control_plane.helm("upgrade", "rel", str(CHART), "--namespace", namespace, "--set", "runtime.drainSeconds=90")
    assert changed(before, generations(control_plane, namespace)) == ["rel-headway-chat"]


def test_releases_live_side_by_side_and_select_only_their_own_pods(control_plane: Client, namespace: str):
    other = f"{namespace}-2"
    control_plane.kubectl("create", "namespace", other)
    cluster_wide = ("--set", "operator.scope=Cluster")
    places = [
        ("a", namespace, cluster_wide),
        ("a", other, cluster_wide),
        ("b", namespace, cluster_wide),
        ("headway", namespace, ()),
    ]
    try:
        for release, where, flags in places:
            control_plane.helm("install", release, str(CHART), "--namespace", where, *flags)
        for release, where, _ in places:
            for service in control_plane.get(
                "services", "-l", f"app.kubernetes.io/instance={release}", namespace=where
            )["items"]:
                selector = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
                control_plane.wait_for(
                    lambda s=selector, w=where: pods(control_plane, w, s) != [],
                    f"pods of {service['metadata']['name']}",
                )
                owners = {
                    pod["metadata"]["labels"]["app.kubernetes.io/instance"]
                    for pod in pods(control_plane, where, selector)
                }
                assert owners == {release}
    finally:
        for release, where, _ in places:
            control_plane.helm("uninstall", release, "--namespace", where, "--ignore-not-found")
        control_plane.kubectl("delete", "namespace", other, "--wait=false")
    left = control_plane.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
    assert "headway:" not in left


def test_an_operator_of_one_namespace_may_do_nothing_elsewhere(control_plane: Client, namespace: str):
    control_plane.helm("install", "rel", str(CHART), "--namespace", namespace)
    operator = Client(
        control_plane.service_account_kubeconfig(namespace, "rel-headway-operator"), control_plane.kubeconfig.parent
    )
    assert may(operator, "patch", "deployments.apps/chat", namespace, "--subresource=scale")
    assert may(operator, "patch", "configmaps/rel-headway-gateway-policy", namespace)
    for verb, resource in (
        ("get", "secrets"),
        ("list", "configmaps"),
        ("patch", "configmaps/other"),
        ("patch", "deployments.apps/chat"),
        ("delete", "pods"),
        ("create", "pods"),
        ("update", "leases/other"),
        ("patch", "servingslos.headway.dev/chat"),
    ):
        assert not may(operator, verb, resource, namespace), f"{verb} {resource}"
    for verb, resource in (
        ("list", "pods"),
        ("list", "servingslos.headway.dev"),
        ("get", "configmaps/rel-headway-gateway-policy"),
    ):
        assert not may(operator, verb, resource, "default"), f"{verb} {resource} in another namespace"


def test_uninstalling_leaves_no_object_of_the_release(control_plane: Client, namespace: str):
    control_plane.helm("install", "rel", str(CHART), "--namespace", namespace)
    kinds = "deployments,services,configmaps,secrets,roles,rolebindings,serviceaccounts,networkpolicies"
    kinds += ",poddisruptionbudgets"
    chosen = ("-n", namespace, "-l", "app.kubernetes.io/instance=rel", "-o", "name")
    assert len(control_plane.kubectl("get", kinds, *chosen).split()) > 10
    control_plane.helm("uninstall", "rel", "--namespace", namespace)
    control_plane.wait_for(lambda: control_plane.kubectl("get", kinds, *chosen) == "", "everything is gone")


def tune(cluster: Client, namespace: str) -> None:
    """What the operator does: a scale, and a key in the policy under a field manager of the SLO's."""
    cluster.kubectl("scale", "deployment/rel-headway-chat", "--replicas=3", "-n", namespace)
    policy = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "rel-headway-gateway-policy", "namespace": namespace},
        "data": {"chat.json": POLICY},
    }
    cluster.kubectl(
        "apply", "--server-side", f"--field-manager={FIELD_MANAGER_PREFIX}chat", "-f", "-", stdin=json.dumps(policy)
    )


def tuned(cluster: Client, namespace: str) -> tuple[int, str]:
    deployment = cluster.get("deployment/rel-headway-chat", namespace=namespace)
    return deployment["spec"]["replicas"], cluster.get("configmap/rel-headway-gateway-policy", namespace=namespace)[
        "data"
    ]["chat.json"]


def generations(cluster: Client, namespace: str) -> dict[str, int]:
    """Deployment → how often its pods' template changed. The template's own revision is what makes a rollout."""

    def settled() -> bool:
        return all(d["status"].get("observedGeneration") == d["metadata"]["generation"] for d in deployments())

    def deployments() -> list[dict]:
        return cluster.get("deployments", namespace=namespace)["items"]

    cluster.wait_for(settled, "the deployments are observed")
    return {
        d["metadata"]["name"]: int(d["metadata"]["annotations"]["deployment.kubernetes.io/revision"])
        for d in deployments()
    }


def changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return sorted(name for name in before if before[name] != after[name])


def pods(cluster: Client, namespace: str, selector: str) -> list[dict]:
    return cluster.get("pods", "-l", selector, namespace=namespace)["items"]


def may(client: Client, verb: str, resource: str, namespace: str, *flags: str) -> bool:
    try:
        return client.kubectl("auth", "can-i", verb, resource, "-n", namespace, *flags).strip().endswith("yes")
    except CommandFailed:
        return False
