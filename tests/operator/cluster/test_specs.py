"""Specs that the API server must accept or refuse, each with words that name the place; the parser of the core must
agree."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from headway_core.contract.kubernetes import LABEL_RUNTIME, policy_config_map
from headway_core.errors import SpecError
from headway_core.slo_parser import parse_slo
from kubernetes import client, config
from rendering import one, render

pytestmark = pytest.mark.cluster

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))

BASE = {
    "apiVersion": "headway.dev/v1alpha1",
    "kind": "ServingSLO",
    "metadata": {"name": "chat"},
    "spec": {
        "targetRef": {"name": "chat-runtime"},
        "gatewayRef": {"name": "headway-gateway"},
        "objectives": {"ttft": {"target": "1s"}, "tpot": {"target": "50ms"}},
    },
}
A, B = {"name": "a", "priority": 1}, {"name": "b", "priority": 2}
GONE = object()

ACCEPTED = {
    "as it is": {},
    "only ttft": {"objectives": {"ttft": {"target": "1s"}}},
    "only tpot": {"objectives": {"tpot": {"target": "1ms"}}},
    "compound duration": {"objectives.ttft.target": "1m30s500ms"},
    "days of waiting": {"objectives.ttft.target": "99999h"},
    "length term": {"objectives.ttft.perThousandPromptTokens": "250ms"},
    "length term of nothing": {"objectives.ttft.perThousandPromptTokens": "0s"},
    "percentile 1": {"objectives.ttft.percentile": 1},
    "percentile 99": {"objectives.ttft.percentile": 99},
    "percentile as text": {"objectives.ttft.percentile": "95"},
    "three decimals": {"objectives.tpot.percentile": "99.999"},
    "a fraction of one": {"objectives.tpot.percentile": "0.001"},
    "observe": {"mode": "Observe"},
    "recommend": {"mode": "Recommend"},
    "whole target": {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}},
    "63 characters": {"targetRef.name": "x" * 63},
    "service": {"serviceRef": {"name": "pods", "port": 65535}},
    "service by port alone": {"serviceRef": {"port": 8080}},
    "no gateway": {"gatewayRef": GONE},
    "one class": {"classes": [A], "defaultClass": "a"},
    "two classes": {"classes": [A, B], "defaultClass": "b"},
    "no class": {"classes": []},
    "eight classes": {"classes": [{"name": f"c{n}", "priority": n} for n in range(8)], "defaultClass": "c7"},
    "full class": {
        "classes": [
            {
                **A,
                "shares": 1000,
                "serviceTiers": ["flex", "auto"],
                "maxQueueTime": "10m",
                "objectives": {"ttft": {"target": "60s"}},
            }
        ],
        "defaultClass": "a",
    },
    "negative priority": {"classes": [{"name": "a", "priority": -1_000_000}], "defaultClass": "a"},
    "replicas": {"bounds": {"replicas": {"min": 1, "max": 1}}},
    "open bounds": {"bounds": {"maxNumSeqs": {"max": 256}, "prefillTokenBudget": {"min": 64}}},
    "empty bounds": {"bounds": {}},
    "window": {"evaluation": {"window": "1h", "minSamples": 1}},
    "shortest window": {"evaluation": {"window": "1s"}},
    "stabilisation": {
        "behavior": {"scaleDown": {"stabilizationWindow": "0s"}, "scaleUp": {"stabilizationWindow": "1h"}}
    },
}

NAME, DURATION = "should match '^[a-z0-9]", "should match '^([0-9]{1,5}(h|m|s|ms)){1,4}$'"
REFUSED = {
    "no objective": ({"objectives": {}}, "needs at least one objective"),
    "no objectives": ({"objectives": GONE}, "spec.objectives: Required value"),
    "objectives of null": ({"objectives": None}, "spec.objectives"),
    "no target": ({"targetRef": GONE}, "spec.targetRef: Required value"),
    "target without a name": ({"targetRef": {}}, "spec.targetRef.name: Required value"),
    "empty name": ({"targetRef.name": ""}, "spec.targetRef.name"),
    "64 characters": ({"targetRef.name": "x" * 64}, "Too long: may not be more than 63"),
    "253 characters": ({"targetRef.name": "x" * 253}, "Too long: may not be more than 63"),
    "capitals": ({"targetRef.name": "Chat"}, NAME),
    "another kind": ({"targetRef.kind": "StatefulSet"}, 'supported values: "Deployment"'),
    "another group": ({"targetRef.apiVersion": "v1"}, 'supported values: "apps/v1"'),
    "a namespace in the target": ({"targetRef.namespace": "other"}, 'unknown field "spec.targetRef.namespace"'),
    "ttft of zero": ({"objectives.ttft.target": "0s"}, "must be more than 0s"),
    "tpot of zero": ({"objectives.tpot.target": "0ms"}, "must be more than 0s"),
    "ttft without a target": ({"objectives.ttft": {"percentile": 95}}, "spec.objectives.ttft.target: Required value"),
    "target as a number": ({"objectives.ttft.target": 1}, 'must be of type string: "integer"'),
    "decimal duration": ({"objectives.ttft.target": "1.5s"}, DURATION),
    "negative duration": ({"objectives.ttft.target": "-1s"}, DURATION),
    "no unit": ({"objectives.ttft.target": "10"}, DURATION),
    "microseconds": ({"objectives.tpot.target": "500us"}, DURATION),
    "exponent": ({"objectives.tpot.target": "1e999"}, DURATION),
    "words": ({"objectives.tpot.target": "fast"}, DURATION),
    "percentile 0": ({"objectives.ttft.percentile": 0}, "must be a whole number or a decimal string between 0 and 100"),
    "percentile 100": (
        {"objectives.ttft.percentile": 100},
        "must be a whole number or a decimal string between 0 and 100",
    ),
    "percentile -5": (
        {"objectives.ttft.percentile": -5},
        "must be a whole number or a decimal string between 0 and 100",
    ),
    "float percentile": ({"objectives.ttft.percentile": 99.9}, "spec.objectives.ttft.percentile"),
    "percentile of nothing": (
        {"objectives.ttft.percentile": "0.000"},
        "must be a whole number or a decimal string between 0 and 100",
    ),
    "percentile in words": (
        {"objectives.ttft.percentile": "most"},
        "must be a whole number or a decimal string between 0 and 100",
    ),
    "percentile of four decimals": (
        {"objectives.ttft.percentile": "9.9999"},
        "must be a whole number or a decimal string between 0 and 100",
    ),
    "length term for tpot": ({"objectives.tpot.perThousandPromptTokens": "1ms"}, "unknown field"),
    "unknown mode": ({"mode": "Force"}, 'supported values: "Observe", "Recommend", "Enforce"'),
    "empty mode": ({"mode": ""}, "supported values"),
    "unknown field": ({"target": "x"}, 'unknown field "spec.target"'),
    "port 0": ({"serviceRef": {"port": 0}}, "should be greater than or equal to 1"),
    "port 65536": ({"serviceRef": {"port": 65536}}, "should be less than or equal to 65535"),
    "gateway without a name": ({"gatewayRef": {}}, "spec.gatewayRef.name: Required value"),
    "classes without a default": ({"classes": [A]}, "defaultClass must name one of spec.classes"),
    "a default without classes": ({"defaultClass": "a"}, "defaultClass must name one of spec.classes"),
    "unknown default": ({"classes": [A], "defaultClass": "z"}, "defaultClass must name one of spec.classes"),
    "two of a name": ({"classes": [A, {**A, "priority": 9}], "defaultClass": "a"}, "Duplicate value"),
    "two of a priority": ({"classes": [A, {**B, "priority": 1}], "defaultClass": "a"}, "priorities must be unique"),
    "a class without a priority": (
        {"classes": [{"name": "a"}], "defaultClass": "a"},
        "spec.classes[0].priority: Required value",
    ),
    "nine classes": (
        {"classes": [{"name": f"c{n}", "priority": n} for n in range(9)], "defaultClass": "c0"},
        "must have at most 8 items",
    ),
    "a tier twice": (
        {"classes": [{**A, "serviceTiers": ["x"]}, {**B, "serviceTiers": ["x"]}], "defaultClass": "a"},
        "a service tier may lead to one class only",
    ),
    "no shares": ({"classes": [{**A, "shares": 0}], "defaultClass": "a"}, "should be greater than or equal to 1"),
    "no queue": ({"classes": [{**A, "maxQueueTime": "0s"}], "defaultClass": "a"}, "must be more than 0s"),
    "a class that promises nothing": (
        {"classes": [{**A, "objectives": {}}], "defaultClass": "a"},
        "needs at least one objective",
    ),
    "min over max": ({"bounds": {"replicas": {"min": 5, "max": 2}}}, "min must be <= max"),
    "from zero": ({"bounds": {"replicas": {"min": 0, "max": 2}}}, "should be greater than or equal to 1"),
    "negative replicas": ({"bounds": {"replicas": {"min": -1, "max": 2}}}, "should be greater than or equal to 1"),
    "replicas without max": ({"bounds": {"replicas": {"min": 1}}}, "spec.bounds.replicas.max: Required value"),
    "replicas without min": ({"bounds": {"replicas": {"max": 1}}}, "spec.bounds.replicas.min: Required value"),
    "half a replica": ({"bounds": {"replicas": {"min": 1, "max": 1.5}}}, "must be of type integer"),
    "replicas as text": ({"bounds": {"replicas": {"min": "1", "max": 2}}}, "must be of type integer"),
    "seqs min over max": ({"bounds": {"maxNumSeqs": {"min": 9, "max": 8}}}, "min must be <= max"),
    "budget min over max": ({"bounds": {"prefillTokenBudget": {"min": 9, "max": 8}}}, "min must be <= max"),
    "no sequence": ({"bounds": {"maxNumSeqs": {"max": 0}}}, "should be greater than or equal to 1"),
    "window of nothing": ({"evaluation": {"window": "0s"}}, "must be at least 1s and at most 1h"),
    "window of a day": ({"evaluation": {"window": "24h"}}, "must be at least 1s and at most 1h"),
    "no samples": ({"evaluation": {"minSamples": 0}}, "should be greater than or equal to 1"),
    "stabilisation of a day": ({"behavior": {"scaleDown": {"stabilizationWindow": "24h"}}}, "must be at most 1h"),
}


def made(changes):
    document = copy.deepcopy(BASE)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = document["spec"]
        for step in parents:
            place = place.setdefault(step, {})
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return document


@pytest.fixture(scope="module")
def create(crd):
    """Sends one object as a dry run; returns what the API server made of it, or its complaint."""
    api = config.new_client_from_config(str(crd.kubeconfig))
    custom = client.CustomObjectsApi(api)

    def send(document, **changes):
        try:
            return custom.create_namespaced_custom_object(
                "headway.dev", "v1alpha1", "default", "servingslos", document, dry_run="All", field_validation="Strict"
            )
        except client.ApiException as error:
            return json.loads(error.body)["message"]

    yield send
    api.close()


def test_there_are_enough_cases():
    assert len(ACCEPTED) + len(REFUSED) >= 60


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(create, changes):
    stored = create(made(changes))
    assert isinstance(stored, dict), stored
    parse_slo(stored)
    assert parse_slo(made(changes)).objectives == parse_slo(stored).objectives


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(create, changes, words):
    document = made(changes)
    answer = create(document)
    assert isinstance(answer, str), answer
    assert words.lower() in answer.lower(), answer
    with pytest.raises(SpecError) as caught:
        parse_slo(document)
    assert caught.value.field.startswith("spec"), caught.value


def test_defaults_are_what_the_parser_says_they_are(create):
    stored = create(made({"objectives": {"ttft": {"target": "1s"}}}))
    assert stored["spec"]["mode"] == "Enforce"
    assert stored["spec"]["objectives"]["ttft"]["percentile"] == 95
    assert stored["spec"]["evaluation"] == {"window": "1m", "minSamples": 20}
    assert stored["spec"]["behavior"] == {
        "scaleUp": {"stabilizationWindow": "0s"},
        "scaleDown": {"stabilizationWindow": "5m"},
    }
    plain, filled = parse_slo(made({"objectives": {"ttft": {"target": "1s"}}})), parse_slo(stored)
    for field in (
        "mode",
        "service_port",
        "objectives",
        "classes",
        "bounds",
        "window",
        "min_samples",
        "scale_up_stabilization",
        "scale_down_stabilization",
    ):
        assert getattr(plain, field) == getattr(filled, field), field


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_as_it_is_and_points_at_what_the_chart_makes(create, path):
    """`helm install headway charts/headway`, then `kubectl apply -f examples/...`, with nothing to edit in between."""
    document = yaml.safe_load(path.read_text())
    assert isinstance(create(document), dict)
    slo, release = parse_slo(document), render(release="headway")
    labels = one(release, "Deployment", slo.target_name)["spec"]["template"]["metadata"]["labels"]
    assert LABEL_RUNTIME in labels
    selector = one(release, "Service", slo.service_name)["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert one(release, "Service", slo.gateway_name)
    assert one(release, "ConfigMap", policy_config_map(slo.gateway_name))


def test_the_target_is_immutable_and_a_name_is_at_most_63_long(crd, namespace):
    api = config.new_client_from_config(str(crd.kubeconfig))
    custom = client.CustomObjectsApi(api)
    kind = ("headway.dev", "v1alpha1", namespace, "servingslos")
    custom.create_namespaced_custom_object(*kind, made({}))
    with pytest.raises(client.ApiException, match="targetRef is immutable"):
        custom.patch_namespaced_custom_object(*kind, "chat", {"spec": {"targetRef": {"name": "other"}}})
    custom.patch_namespaced_custom_object(*kind, "chat", {"spec": {"mode": "Observe"}})
    with pytest.raises(client.ApiException, match="at most 63 characters"):
        custom.create_namespaced_custom_object(*kind, {**made({}), "metadata": {"name": "x" * 64}})
    api.close()


@pytest.mark.parametrize(
    "path",
    [
        "spec",
        "spec.objectives.ttft",
        "spec.classes",
        "spec.bounds.replicas",
        "spec.behavior.scaleDown",
        "status",
        "status.conditions",
        "status.decisions",
    ],
)
def test_explain_teaches(crd, path):
    text = crd.kubectl("explain", f"sslo.{path}")
    fields = text.split("FIELDS:")[1]
    assert "<no description>" not in fields
    assert "DESCRIPTION:" in text
