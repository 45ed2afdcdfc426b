import pytest
from headway_operator.access import NEEDED, Access
from headway_operator.cache import Cache
from headway_operator.targets import other_operator, resolve


def slo(name="chat", created="2026-01-01T00:00:00Z", **spec):
    whole = {
        "targetRef": {"name": "rt"},
        "gatewayRef": {"name": "gw"},
        "objectives": {"ttft": {"target": "1s"}},
        **spec,
    }
    metadata = {"name": name, "namespace": "ns", "uid": name, "creationTimestamp": created}
    return {"apiVersion": "headway.dev/v1alpha1", "kind": "ServingSLO", "metadata": metadata, "spec": whole}


@pytest.fixture
def cache():
    """A namespace with everything that `slo()` points at."""
    made = Cache(lambda key: None)
    labels = {"headway.dev/runtime": "rt"}
    template = {"metadata": {"labels": labels}}
    made.deployments.put({"metadata": {"name": "rt", "namespace": "ns"}, "spec": {"replicas": 2, "template": template}})
    for name, selector in [("rt", labels), ("gw", {"headway.dev/gateway": "gw"})]:
        made.services.put({"metadata": {"name": name, "namespace": "ns"}, "spec": {"selector": selector}})
    for name, own in [
        ("rt-1", labels),
        ("gw-1", {"headway.dev/gateway": "gw"}),
        ("other-1", {"headway.dev/runtime": "other"}),
    ]:
        made.pods.put({"metadata": {"name": name, "namespace": "ns", "uid": name, "labels": own}})
    return made


def test_everything_is_found_through_the_services(cache):
    target = resolve(slo(), cache, Access()).target
    assert [pod.name for pod in target.runtimes] == ["rt-1"]
    assert [pod.name for pod in target.gateways] == ["gw-1"]
    assert target.config_map == "gw-policy"


@pytest.mark.parametrize(
    "spec", [{"objectives": {}}, {"objectives": None}, {"targetRef": []}, {"mode": 7}, {"surprise": 1}]
)
def test_a_spec_that_an_older_schema_let_through_is_told_and_harms_nobody(cache, spec):
    found = resolve(slo(**spec), cache, Access())
    assert (found.accepted.status, found.accepted.reason, found.target) == (False, "InvalidSpec", None)
    assert "spec" in found.accepted.message
    assert found.resolved.status is None


def test_the_oldest_owns_the_target_and_names_break_ties(cache):
    documents = [slo("b"), slo("a"), slo("young", "2026-01-02T00:00:00Z"), slo("elsewhere", targetRef={"name": "x"})]
    for document in documents:
        cache.slos.put(document)
    assert [resolve(document, cache, Access()).accepted.reason for document in documents] == [
        "TargetOwned",
        "Accepted",
        "TargetOwned",
        "Accepted",
    ]


def test_a_missing_right_is_not_taken_for_a_missing_object(cache):
    cache.deployments.take("DELETED", {"metadata": {"name": "rt", "namespace": "ns"}})
    right = next(known for known in NEEDED if known.resource == "deployments")
    found = resolve(slo(), cache, Access(frozenset([("ns", right)]))).resolved
    assert (found.reason, "list deployments.apps" in found.message) == ("Forbidden", True)
    assert resolve(slo(), cache, Access()).resolved.reason == "DeploymentNotFound"


def test_a_right_missing_in_another_namespace_does_not_matter(cache):
    right = next(known for known in NEEDED if known.resource == "deployments")
    assert resolve(slo(), cache, Access(frozenset([("other", right)]))).target is not None
    assert resolve(slo(), cache, Access(frozenset([("", right)]))).target is None


def test_a_gateway_may_name_the_operator_that_serves_it(cache):
    assert other_operator(slo(), cache, "ns/mine") is None, "nobody named: whoever finds it"
    metadata = {
        "name": "gw",
        "namespace": "ns",
        "resourceVersion": "2",
        "annotations": {"headway.dev/operator": "ns/mine"},
    }
    cache.services.put({"metadata": metadata, "spec": {"selector": {"headway.dev/gateway": "gw"}}})
    assert other_operator(slo(), cache, "ns/mine") is None
    assert other_operator(slo(), cache, "ns/theirs") == "ns/mine"
    for spec in ({"gatewayRef": None}, {"gatewayRef": {"name": "nowhere"}}, {"gatewayRef": []}):
        assert other_operator(slo(**spec), cache, "ns/theirs") is None, "what is wrong with it is for everybody to say"
