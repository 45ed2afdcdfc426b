"""Least privilege: no call is refused and no right unused; one verb less is named in a condition, and the rest goes
on."""

import time

import pytest

pytestmark = pytest.mark.cluster

VERBS = [
    ("list", "deployments", "TargetResolved", "Forbidden"),
    ("watch", "deployments", "TargetResolved", "Forbidden"),
    ("list", "services", "TargetResolved", "Forbidden"),
    ("watch", "services", "TargetResolved", "Forbidden"),
    ("list", "pods", "Ready", "MissingPermission"),
    ("watch", "pods", "Ready", "MissingPermission"),
    ("patch", "pods", "Ready", "MissingPermission"),
    ("watch", "servingslos", "Ready", "MissingPermission"),
    ("get", "deployments/scale", "ScalingActive", "Forbidden"),
    ("patch", "deployments/scale", "ScalingActive", "Forbidden"),
    ("list", "horizontalpodautoscalers", "ScalingActive", "Forbidden"),
    ("create", "events", "Ready", "MissingPermission"),
    ("get", "configmaps", "KnobsApplied", "Forbidden"),
    ("patch", "configmaps", "KnobsApplied", "Forbidden"),
]
BLIND = {
    ("list", "deployments"),
    ("watch", "deployments"),
    ("list", "services"),
    ("watch", "services"),
    ("list", "pods"),
}
"""Without these nothing can be decided at all."""


@pytest.mark.parametrize(("verb", "resource", "kind", "reason"), VERBS, ids=str)
def test_a_missing_verb_is_named_and_the_rest_goes_on(world, tools, verb, resource, kind, reason):
    world.build(replicas=1)
    world.grant(tools.without(verb, resource))
    world.rate = 10.0
    world.slo(bounds={"replicas": {"min": 1, "max": 8}})
    operator = world.operator()
    message = world.wait_condition(kind, "False", reason)
    assert verb in message
    assert resource.split("/")[0] in message
    assert operator.process.poll() is None
    if (verb, resource) not in BLIND | {("get", "configmaps"), ("patch", "configmaps")}:
        world.wait(
            lambda: world.policy() and world.policy().knobs.max_num_seqs, "knobs are set all the same", patience=60
        )
    if kind != "ScalingActive" and (verb, resource) not in BLIND and resource != "configmaps":
        world.wait(lambda: world.scale() == 3, "replicas too", patience=60)
    if kind == "ScalingActive":
        assert world.scale() == 1


@pytest.mark.parametrize(("verb", "resource"), [("list", "servingslos"), ("patch", "servingslos/status")])
def test_where_no_condition_can_be_written_the_log_and_an_event_say_it(world, tools, verb, resource):
    world.build(replicas=1)
    world.grant(tools.without(verb, resource))
    world.rate = 5.0
    world.slo()
    operator = world.operator()
    world.wait(lambda: f"missing right: {verb} {resource}" in operator.text, "the log names it")
    if verb == "patch":
        world.wait(
            lambda: any(reason == "MissingPermission" and "patch" in message for reason, message in world.events()),
            "an event",
        )
        world.wait(lambda: world.policy() and world.policy().knobs.max_num_seqs, "knobs are set all the same")
    world.wait(lambda: "headway_operator_missing_rights 1.0" in operator.metrics(), "a figure")
    assert operator.process.poll() is None


def test_a_right_that_is_taken_away_and_given_back(world, tools):
    """While it runs: the condition names the verb, and once it is granted again everything goes on without a
    restart."""
    world.build(replicas=1)
    world.rate = 2.0
    world.slo(bounds={"replicas": {"min": 1, "max": 8}})
    operator = world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.grant(tools.without("patch", "deployments/scale"))
    world.rate = 10.0
    message = world.wait_condition("ScalingActive", "False", "Refused", patience=60)
    assert "deployments/scale" in message or "patch" in message
    world.edit({"spec": {"objectives": {"tpot": {"target": "40ms"}}}})
    world.wait(lambda: world.policy().generation == 2, "knobs go on")
    world.grant(tools.rules)
    world.wait(lambda: world.scale() >= 3, "granted again", patience=150)
    world.wait_condition("ScalingActive", "True", "Scaling", patience=90)
    assert operator.process.poll() is None


def test_nothing_is_refused_and_no_right_is_unused(world, tools):
    """Up, down, knobs, events and the lease: the audit log has every verb of the rules, and not one 403, and nothing
    cluster-wide."""
    world.build(replicas=1)
    world.rate = 10.0
    mark = world.plane.audit.mark()
    world.slo(bounds={"replicas": {"min": 1, "max": 8}})
    operator = world.operator("--drain-budget", "5s")
    world.wait(lambda: world.scale() == 3, "up", patience=60)
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.rate = 2.0
    world.wait(lambda: world.scale() == 1, "down", patience=90)
    operator.stop()  # a watch is logged when it ends
    time.sleep(1)
    world.plane.audit.settle()
    entries = world.plane.audit.entries(since=mark, user=world.user)
    assert [entry.uri for entry in entries if entry.code == 403] == []
    reviews = ("selfsubjectaccessreviews",)
    outside = [
        entry.uri
        for entry in entries
        if entry.resource and entry.resource not in reviews and entry.namespace != world.namespace
    ]
    assert outside == []
    used = {
        (entry.verb, f"{entry.resource}/{entry.subresource}" if entry.subresource else entry.resource)
        for entry in entries
        if entry.resource
    }
    granted = {(verb, name) for _, name, verbs in tools.rules for verb in verbs.split()}
    assert granted - used == set()
    assert {step for step in used if step[1] not in reviews} - granted == set()
