import copy

import pytest
from headway_core.errors import SpecError
from headway_core.slo import Mode
from headway_core.slo_parser import parse_slo

MINIMAL = {
    "apiVersion": "headway.dev/v1alpha1",
    "kind": "ServingSLO",
    "metadata": {"name": "chat"},
    "spec": {"targetRef": {"name": "chat-runtime"}, "objectives": {"ttft": {"target": "1s"}}},
}
FULL = {
    **MINIMAL,
    "metadata": {
        "name": "chat",
        "namespace": "prod",
        "uid": "u-1",
        "generation": 3,
        "annotations": {"headway.dev/paused": "true"},
    },
    "spec": {
        "mode": "Recommend",
        "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-runtime"},
        "serviceRef": {"name": "chat-pods", "port": 8080},
        "gatewayRef": {"name": "headway-gateway"},
        "objectives": {
            "ttft": {"target": "1s", "perThousandPromptTokens": "250ms", "percentile": 95},
            "tpot": {"target": "50ms", "percentile": "99.9"},
        },
        "defaultClass": "interactive",
        "classes": [
            {
                "name": "batch",
                "priority": 0,
                "shares": 1,
                "serviceTiers": ["flex"],
                "maxQueueTime": "10m",
                "objectives": {"ttft": {"target": "60s", "percentile": 90}},
            },
            {"name": "interactive", "priority": 100, "shares": 8, "serviceTiers": ["auto", "default", "priority"]},
        ],
        "bounds": {"replicas": {"min": 1, "max": 8}, "maxNumSeqs": {"max": 256}, "prefillTokenBudget": {"min": 64}},
        "evaluation": {"window": "1m", "minSamples": 20},
        "behavior": {"scaleUp": {"stabilizationWindow": "0s"}, "scaleDown": {"stabilizationWindow": "5m"}},
    },
}


def changed(document, path, value):
    """A copy with the member at `path` set, or removed when `value` is `...`."""
    result = copy.deepcopy(document)
    *parents, last = path
    place = result
    for step in parents:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def test_minimal_object_gets_every_default():
    slo = parse_slo(MINIMAL)
    assert (slo.mode, slo.service_name, slo.service_port, slo.gateway_name) == (
        Mode.ENFORCE,
        "chat-runtime",
        8000,
        None,
    )
    assert slo.bounds.replicas is None, "a default maximum would scale down what is there"
    assert [known.name for known in slo.classes] == ["default"] == [slo.default_class]
    assert (slo.window, slo.min_samples, slo.scale_up_stabilization, slo.scale_down_stabilization) == (
        60.0,
        20,
        0.0,
        300.0,
    )
    assert slo.objectives.tpot is None


def test_full_object_is_read_whole_and_classes_are_ordered_by_priority():
    slo = parse_slo(FULL)
    assert [known.name for known in slo.classes] == ["interactive", "batch"]
    interactive, batch = slo.classes
    assert interactive.objectives == slo.objectives
    assert batch.objectives.ttft.target == 60 and batch.objectives.ttft.percentile == 90
    assert batch.objectives.tpot == slo.objectives.tpot, "what a class does not say, it inherits"
    assert slo.objectives.tpot.percentile == 99.9
    assert slo.objectives.ttft.limit(2000) == pytest.approx(1.5)
    assert batch.max_queue_time == 600
    assert (slo.bounds.replicas.min, slo.bounds.replicas.max) == (1, 8)
    assert slo.bounds.prefill_token_budget.clip(3) == 64 and slo.bounds.max_num_seqs.clip(999) == 256


@pytest.mark.parametrize(
    ("path", "value", "field", "word"),
    [
        (["apiVersion"], "headway.dev/v2", "apiVersion", "must be headway.dev/v1alpha1"),
        (["kind"], "Pod", "kind", "ServingSLO"),
        (["spec"], ..., "spec", "required"),
        (["spec", "targetRef"], ..., "spec.targetRef", "required"),
        (["spec", "targetRef", "name"], "", "spec.targetRef.name", "string"),
        (["spec", "targetRef", "name"], "x" * 64, "spec.targetRef.name", "63"),
        (["spec", "targetRef", "kind"], "StatefulSet", "spec.targetRef.kind", "Deployment"),
        (["spec", "objectives"], {}, "spec.objectives", "at least one objective"),
        (["spec", "objectives", "ttft", "target"], "0s", "spec.objectives.ttft.target", "at least"),
        (["spec", "objectives", "ttft", "target"], "1.5s", "spec.objectives.ttft.target", "duration"),
        (["spec", "objectives", "ttft", "target"], 1, "spec.objectives.ttft.target", "duration"),
        (["spec", "objectives", "ttft", "target"], ..., "spec.objectives.ttft.target", "required"),
        (["spec", "objectives", "ttft", "percentile"], 95.5, "spec.objectives.ttft.percentile", "decimal string"),
        (["spec", "objectives", "ttft", "percentile"], 100, "spec.objectives.ttft.percentile", "between 0 and 100"),
        (["spec", "objectives", "ttft", "percentile"], True, "spec.objectives.ttft.percentile", "between 0 and 100"),
        (["spec", "objectives", "ttft", "percentile"], 0, "spec.objectives.ttft.percentile", "between 0 and 100"),
        (["spec", "objectives", "tpto"], {}, "spec.objectives.tpto", "not a field"),
        (["spec", "mode"], "enforce", "spec.mode", "Enforce"),
        (["spec", "defaultClass"], "nobody", "spec.defaultClass", "interactive"),
        (["spec", "defaultClass"], ..., "spec.defaultClass", "required"),
        (["spec", "classes"], [], "spec.defaultClass", "lists none"),
        (["spec", "classes", 0, "priority"], 100, "spec.classes[1].priority", "unique"),
        (["spec", "classes", 0, "name"], "interactive", "spec.classes[1].name", "unique"),
        (["spec", "classes", 0, "serviceTiers"], ["auto"], "spec.classes", "one class only"),
        (["spec", "classes", 0, "priority"], 1.5, "spec.classes[0].priority", "whole number"),
        (["spec", "classes", 0, "priority"], -(2**63), "spec.classes[0].priority", "whole number"),
        (["spec", "bounds", "replicas"], {"min": 5, "max": 2}, "spec.bounds.replicas", "min must be <= max"),
        (["spec", "bounds", "replicas"], {"min": 0, "max": 2}, "spec.bounds.replicas.min", "from 1"),
        (["spec", "bounds", "replicas"], {"min": 1}, "spec.bounds.replicas", "both min and max"),
        (["spec", "bounds", "maxNumSeqs"], {"max": 0}, "spec.bounds.maxNumSeqs.max", "from 1"),
        (["spec", "evaluation", "window"], "0s", "spec.evaluation.window", "at least"),
        (["spec", "serviceRef", "port"], 70000, "spec.serviceRef.port", "65535"),
        (["spec", "extra"], 1, "spec.extra", "not a field"),
        (["spec", "objectives"], [], "spec.objectives", "object"),
    ],
)
def test_a_rule_that_is_broken_is_named_by_its_place(path, value, field, word):
    with pytest.raises(SpecError) as caught:
        parse_slo(changed(FULL, path, value))
    assert caught.value.field == field
    assert word in str(caught.value)


def test_nine_classes_are_too_many():
    spec = [{"name": f"c{i}", "priority": i} for i in range(9)]
    with pytest.raises(SpecError, match="at most 8"):
        parse_slo(changed(FULL, ["spec", "classes"], spec))


@pytest.mark.parametrize("document", [None, [], "x", {}, 5])
def test_documents_of_another_shape_are_refused(document):
    with pytest.raises(SpecError):
        parse_slo(document)
