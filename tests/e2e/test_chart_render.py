"""What the chart renders: with every optional block absent, null, empty or filled, and with values that templates
usually spoil."""

import json
import re
import shlex

import pytest
import yaml
from cluster.client import Client
from headway_core.contract.kubernetes import ANNOTATION_OPERATOR, LABEL_GATEWAY, LABEL_RUNTIME, policy_config_map
from headway_core.contract.metric_names import Metric
from headway_operator.access import NEEDED
from headway_operator.metrics import REGISTRY
from rendering import ABSENT, CHART, container, nested, one, pairwise, render, render_text

pytestmark = pytest.mark.cluster

HASHED = "acme sha256:" + "0" * 64 + " interactive,batch"
PLACED = {
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "priorityClassName": "high",
}

# Block → what it may be. Absent, null and empty must all render; so must something in it.
BLOCKS = {
    "image": [ABSENT, None, {}, {"registry": "registry.example.com/team", "tag": "20240101", "pullSecrets": ["pull"]}],
    "podSecurityContext": [ABSENT, None, {}, {"runAsNonRoot": True, "runAsUser": 1000650000}],
    "commonLabels": [ABSENT, None, {}, {"team": "serving"}],
    "operator": [
        ABSENT,
        None,
        {},
        {"enabled": True, "scope": "Cluster", "gateways": ["other-gateway"], "replicas": 2, **PLACED},
    ],
    "operator.image": [ABSENT, None, {}, {"digest": "sha256:" + "a" * 64}],
    "operator.resources": [ABSENT, None, {}],
    "operator.serviceAccount": [ABSENT, None, {}, {"name": "given"}],
    "operator.extraEnv": [ABSENT, None, [], [{"name": "A", "value": "1"}]],
    "gateway": [ABSENT, None, {}, {"replicas": 1, **PLACED}],
    "gateway.replicas": [ABSENT, None],
    "gateway.image": [ABSENT, None, {}],
    "gateway.service": [ABSENT, None, {}, {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}}],
    "gateway.keys": [ABSENT, None, {}, {"hashed": [HASHED]}, {"existingSecret": "keys"}],
    "gateway.resources": [ABSENT, None, {}],
    "gateway.podDisruptionBudget": [ABSENT, None, {}],
    "gateway.topologySpreadConstraints": [ABSENT, None, []],
    "gateway.drainSeconds": [ABSENT, None],
    "runtime": [
        ABSENT,
        None,
        {},
        {"podLabels": {"team": "x"}, "podAnnotations": {"a": "b"}, "runtimeClassName": "nvidia", **PLACED},
    ],
    "runtime.engine": [
        ABSENT,
        None,
        {},
        {"maxNumSeqs": 64, "kvCacheMemoryBytes": "16GiB", "device": "cuda", "dtype": "bfloat16"},
    ],
    "runtime.gpu": [ABSENT, None, {}, {"count": 2}],
    "runtime.resources": [ABSENT, None, {}],
    "runtime.strategy": [ABSENT, None, {}],
    "runtime.minReadySeconds": [ABSENT, None, 0],
    "runtime.podDisruptionBudget": [ABSENT, None, {}],
    "pools": [
        ABSENT,
        None,
        [],
        [
            {"name": "a", "model": None, "resources": None, "engine": {}},
            {"name": "b", "model": {"hostPath": "/models", "path": "x.gguf"}},
        ],
        [
            {"name": "c", "model": {"pvc": {"claimName": "models"}}, "gpu": {"count": 1}},
            {"name": "d", "model": {"image": {"reference": "example/model:1"}}},
            {
                "name": "e",
                "model": {
                    "initContainer": {
                        "image": "example/fetch:1",
                        "env": [{"name": "A", "value": "b"}],
                        "sizeLimit": "20Gi",
                    }
                },
            },
        ],
    ],
    "networkPolicy": [ABSENT, None, {}, {"enabled": True, "clients": [{"podSelector": {}}], "prometheus": []}],
    "networkPolicy.prometheus": [ABSENT, None, []],
    "monitoring": [ABSENT, None, {}],
    "monitoring.podMonitor": [ABSENT, None, {}, {"enabled": True}],
    "monitoring.serviceMonitor": [ABSENT, None, {}, {"enabled": True, "labels": {"release": "prometheus"}}],
    "monitoring.prometheusRule": [ABSENT, None, {}, {"enabled": True}],
    "monitoring.dashboard": [ABSENT, None, {}, {"enabled": True}],
}
MATRIX = [nested(row) for row in pairwise(BLOCKS)]


@pytest.fixture(scope="module")
def matrix() -> list[str]:
    return [render_text(values=values, release=f"r{number}") for number, values in enumerate(MATRIX)]


@pytest.fixture(scope="module")
def monitoring_kinds(control_plane: Client) -> None:
    """The Prometheus operator's kinds with schemas that let everything pass: enough for a dry run."""
    for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule"):
        plural = f"{kind.lower()}s"
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        version = {"name": "v1", "served": True, "storage": True, "schema": schema}
        names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
        spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
        crd = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        }
        control_plane.kubectl("apply", "-f", "-", stdin=json.dumps({**crd, "spec": spec}))
        control_plane.kubectl("wait", "--for", "condition=established", f"crd/{crd['metadata']['name']}")


def test_helm_finds_nothing_to_complain_about(control_plane: Client):
    assert "0 chart(s) failed" in control_plane.helm("lint", "--strict", str(CHART))


def test_every_pair_of_blocks_is_taken_by_the_api_server(
    matrix: list[str], control_plane: Client, namespace: str, monitoring_kinds: None
):
    """Strict, so that a misspelt or misplaced field counts."""
    documents = "\n---\n".join(matrix).replace("namespace: ns1", f"namespace: {namespace}")
    answer = control_plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=documents, timeout=240
    )
    assert len(answer.splitlines()) > 10 * len(MATRIX)


def test_nothing_of_the_template_language_is_left(matrix: list[str]):
    for text in matrix:
        # Alerts and dashboard speak to Prometheus and Grafana in braces of their own.
        own = "\n---\n".join(
            part for part in text.split("\n---\n") if "kind: PrometheusRule" not in part and "headway.json:" not in part
        )
        assert re.findall(r"\.Values|<no value>|<nil>|%!|\bnull\b|\{\{|[0-9]e\+", own) == []


def test_names_and_label_values_fit_where_kubernetes_puts_them(control_plane: Client):
    long = "a-release-name-of-fifty-three-characters-is-the-longest"[:53]
    for flags in ({}, {"fullnameOverride": "f" * 63}, {"nameOverride": "n" * 63}):
        documents = render(
            values={**flags, "pools": [{"name": "a" * 30}], "operator": {"scope": "Cluster"}}, release=long
        )
        for document in documents:
            if document["kind"] not in ("ClusterRole", "ClusterRoleBinding"):
                longest = 70 if document["kind"] == "ConfigMap" else 63
                assert len(document["metadata"]["name"]) <= longest, document["metadata"]["name"]
            assert [label for label in document["metadata"]["labels"].values() if len(label) > 63] == []


def test_two_long_releases_that_begin_alike_share_no_name():
    begin = "a-release-name-of-fifty-three-characters-is-the-lon"
    first, second = ({(d["kind"], d["metadata"]["name"]) for d in render(release=begin + end)} for end in "ab")
    assert first & second == set()


def test_cluster_scoped_objects_exist_only_in_cluster_scope_and_differ_by_namespace_and_release():
    def cluster_objects(**where):
        return {
            (d["kind"], d["metadata"]["name"])
            for d in render(values=where.pop("values", None), **where)
            if "namespace" not in d["metadata"]
        }

    scope = {"operator": {"scope": "Cluster"}}
    assert cluster_objects() == set()
    names = [
        cluster_objects(values=scope, release=release, namespace=ns)
        for release, ns in (("a", "ns1"), ("a", "ns2"), ("b", "ns1"))
    ]
    assert [len(each) for each in names] == [2, 2, 2]
    assert len(set.union(*names)) == 6


def test_selectors_hold_nothing_that_a_later_version_changes(matrix: list[str]):
    allowed = {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component", LABEL_RUNTIME}
    seen = 0
    for document in (each for text in matrix for each in yaml.safe_load_all(text) if each):
        if document["kind"] == "Deployment":
            selector, labels = (
                document["spec"]["selector"]["matchLabels"],
                document["spec"]["template"]["metadata"]["labels"],
            )
            assert set(selector) <= allowed
            assert selector.items() <= labels.items()
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels), (
                "a new chart version would restart every pod"
            )
            seen += 1
    assert seen > len(MATRIX)


def test_labels_of_the_user_never_replace_those_that_select():
    mine = {"app.kubernetes.io/name": "mine", "app.kubernetes.io/instance": "mine", LABEL_RUNTIME: "mine", "team": "x"}
    documents = render(
        values={
            "commonLabels": mine,
            "gateway": {"podLabels": mine},
            "runtime": {"podLabels": mine},
            "operator": {"podLabels": mine},
        }
    )
    for deployment in (d for d in documents if d["kind"] == "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels["team"] == "x"


def test_what_the_operator_tunes_is_in_no_template():
    documents = render()
    assert "replicas" not in one(documents, "Deployment", "rel-headway-chat")["spec"]
    flags = " ".join(container(documents, "rel-headway-chat")["args"])
    assert "--max-num-seqs" not in flags and "--prefill-token-budget" not in flags
    assert "data" not in one(documents, "ConfigMap", policy_config_map("rel-headway-gateway"))


def test_pods_carry_the_labels_by_which_they_are_found_and_mount_the_policy_as_a_directory():
    documents = render()
    for name, label in (("rel-headway-gateway", LABEL_GATEWAY), ("rel-headway-chat", LABEL_RUNTIME)):
        pod = one(documents, "Deployment", name)["spec"]["template"]
        assert pod["metadata"]["labels"][label] == name
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "policy")
        assert volume["configMap"]["name"] == policy_config_map("rel-headway-gateway")
        (mount,) = (each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "policy")
        assert "subPath" not in mount and mount["readOnly"]


def test_pods_satisfy_the_restricted_standard(control_plane: Client, namespace: str):
    """Asked of the API server's own admission, on a namespace that enforces it."""
    control_plane.kubectl(
        "label",
        "namespace",
        namespace,
        "pod-security.kubernetes.io/enforce=restricted",
        "pod-security.kubernetes.io/enforce-version=latest",
    )
    values = {"pools": [{"name": "chat"}, {"name": "b", "model": {"initContainer": {"image": "example/fetch:1"}}}]}
    pods = []
    for deployment in (d for d in render(values=values, namespace=namespace) if d["kind"] == "Deployment"):
        spec = {
            key: value for key, value in deployment["spec"]["template"]["spec"].items() if key != "serviceAccountName"
        }
        metadata = {"name": deployment["metadata"]["name"], "namespace": namespace}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    control_plane.wait_for(
        lambda: bool(control_plane.get("serviceaccount/default", namespace=namespace)), "the default account"
    )
    control_plane.kubectl(
        "apply", "--dry-run=server", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    )
    assert all(
        container["securityContext"]["readOnlyRootFilesystem"]
        for pod in pods
        for container in pod["spec"]["containers"]
    )


@pytest.mark.parametrize("scope", ["Namespace", "Cluster"])
def test_the_operator_gets_exactly_the_rights_that_it_asks_for(scope: str):
    documents = render(values={"operator": {"scope": scope, "gateways": ["other"]}})
    rules = [
        rule for document in documents if document["kind"] in ("Role", "ClusterRole") for rule in document["rules"]
    ]
    by_name = {
        (verb, rule["resources"][0]): set(rule["resourceNames"])
        for rule in rules
        if "resourceNames" in rule
        for verb in rule["verbs"]
    }
    policies = {policy_config_map("rel-headway-gateway")} | (
        {policy_config_map("other")} if scope == "Cluster" else set()
    )
    lease = {"rel-headway-operator"}
    assert by_name == {
        ("get", "configmaps"): policies,
        ("patch", "configmaps"): policies,
        ("get", "leases"): lease,
        ("update", "leases"): lease,
    }
    given = {
        (verb, rule["apiGroups"][0], rule["resources"][0])
        for rule in rules
        if "resourceNames" not in rule
        for verb in rule["verbs"]
    }
    wanted = {(right.verb, right.group, right.resource) for right in NEEDED}
    assert given == wanted | {("create", "coordination.k8s.io", "leases")}


def test_a_gateway_names_the_operator_of_its_release_and_nobody_when_there_is_none():
    own = {"gateway": {"service": {"annotations": {"a": "b"}}}}
    annotations = [
        one(render(values={**own, **values}), "Service", "rel-headway-gateway")["metadata"]["annotations"]
        for values in ({}, {"operator": None}, {"operator": {"enabled": False}})
    ]
    assert annotations == [{"a": "b", ANNOTATION_OPERATOR: "ns1/rel-headway-operator"}, {"a": "b"}, {"a": "b"}]
    flags = container(render(), "rel-headway-operator")["args"]
    assert {"--lease-namespace=ns1", "--lease-name=rel-headway-operator"} <= set(flags)


def test_a_disruption_budget_never_blocks_the_drain_of_a_single_gateway():
    assert [
        d["kind"]
        for d in render(values={"gateway": {"replicas": 1}, "pools": []})
        if d["kind"] == "PodDisruptionBudget"
    ] == []
    budget = one(render(values={"gateway": {"replicas": 2}}), "PodDisruptionBudget", "rel-headway-gateway")
    assert budget["spec"]["maxUnavailable"] == 1


def test_alerts_and_dashboard_speak_of_metrics_that_exist():
    known = {value for name, value in vars(Metric).items() if name.isupper()} | {
        metric.name for metric in REGISTRY.collect()
    }
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    expressions = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    used = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for expression in expressions
        for name in re.findall(r"\bheadway_\w+", expression)
    }
    assert len(used) > 15
    assert used - known == set()


def test_notes_give_commands_that_name_what_was_installed(control_plane: Client, namespace: str):
    answer = control_plane.helm("install", "rel", str(CHART), "--namespace", namespace, "--dry-run=server")
    notes = answer.partition("NOTES:")[2]
    commands = [shlex.split(line) for line in notes.splitlines() if line.strip().startswith("kubectl")]
    assert [command for command in commands if "rollout" in command] == [
        ["kubectl", "-n", namespace, "rollout", "status", "deployment/rel-headway-chat"]
    ]
    assert "service/rel-headway-gateway" in notes
