"""Every condition and every reason, reached on a real API server by making it so, and left again by itself when it is
cured."""

import dataclasses
import json
import time

import pytest
from headway_core.contract.policy import Knobs
from kubernetes import client

pytestmark = pytest.mark.cluster


def cell(world, replicas=1, rate=5.0, **spec):
    world.build(replicas=replicas)
    world.rate = rate
    world.slo(**spec)
    return world.operator()


def test_missing_pieces_are_named_one_by_one_and_found_when_they_come(world):
    """Nothing stands at first; each piece is made after its absence was told. The operator is never restarted."""
    world.grant_all()
    world.slo(gatewayRef=None)
    world.operator()
    assert "create it" in world.wait_condition("TargetResolved", "False", "DeploymentNotFound")
    assert world.condition("Ready")[:2] == ("False", "DeploymentNotFound")
    assert world.condition("SLOMet")[:2] == ("Unknown", "TargetNotResolved")
    world.deploy("chat-runtime", 1, {"app": "x"})
    assert "spec.serviceRef" in world.wait_condition("TargetResolved", "False", "ServiceNotFound")
    world.service("chat-runtime", {"app": "y"})
    world.wait_condition("TargetResolved", "False", "ServiceSelectsOthers")
    world.core.patch_namespaced_service("chat-runtime", world.namespace, {"spec": {"selector": {"app": "x"}}})
    assert "headway.dev/runtime" in world.wait_condition("TargetResolved", "False", "NotARuntime")
    world.apps.delete_namespaced_deployment("chat-runtime", world.namespace)
    world.wait_condition("TargetResolved", "False", "DeploymentNotFound")
    world.deploy("chat-runtime", 1, {"app": "x", "headway.dev/runtime": "chat-runtime"})
    assert "spec.gatewayRef is not set" in world.wait_condition("TargetResolved", "False", "GatewayNotSet")
    world.edit({"spec": {"gatewayRef": {"name": "headway-gateway"}}})
    world.wait_condition("TargetResolved", "False", "GatewayNotFound")
    world.service("headway-gateway", {"headway.dev/gateway": "headway-gateway"})
    world.wait_condition("TargetResolved", "True", "Resolved")
    world.wait_condition("MetricsAvailable", "False", "NoGatewayPods")
    world.deploy("headway-gateway", 1, {"headway.dev/gateway": "headway-gateway"})
    world.wait_condition("MetricsAvailable", "True", "NoTraffic")
    assert "kubectl create configmap headway-gateway-policy" in world.wait_condition(
        "KnobsApplied", "False", "ConfigMapNotFound"
    )
    assert world.condition("Ready")[:2] == ("False", "ConfigMapNotFound")
    world.core.create_namespaced_config_map(world.namespace, {"metadata": {"name": "headway-gateway-policy"}})
    world.wait_condition("KnobsApplied", "True", "Acknowledged", patience=60)
    world.wait_condition("Ready", "True", "Enforcing")
    world.wait_condition("SLOMet", "Unknown", "NoTraffic")
    world.rate = 1.0
    world.wait_condition("SLOMet", "Unknown", "TooFewSamples")
    world.rate = 20.0
    world.wait_condition("SLOMet", "True", "Kept")
    reasons = [reason for reason, _ in world.events()]
    assert reasons.count("DeploymentNotFound") == 1, "twice within five minutes, told once"
    assert {"ServiceNotFound", "GatewayNotFound", "ConfigMapNotFound", "Resolved"} <= set(reasons)


def test_pods_without_news(world):
    """No metrics, garbage, stale metrics, no ready pod, no gateway answer: each its own reason; knobs and replicas are
    left alone."""
    cell(world, replicas=2, bounds={"replicas": {"min": 1, "max": 4}})
    first, second = world.wait(lambda: len(world.pods()) == 2 and world.pods(), "two pods")
    gateway = world.wait(lambda: world.pods("headway.dev/gateway"), "a gateway")[0]
    world.wait_condition("MetricsAvailable", "True", "Reporting")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    knobs = world.policy().knobs
    world.garbage.add(first)
    world.wait(
        lambda: "1 of 2 serving replicas report" in world.condition("MetricsAvailable")[2],
        "one of two votes",
        patience=60,
    )
    assert world.condition("MetricsAvailable")[0] == "True", "half may decide"
    world.silent.add(second)
    message = world.wait_condition("MetricsAvailable", "False", "StaleMetrics")
    assert "frozen" in message
    assert world.condition("Ready")[:2] == ("False", "StaleMetrics")
    world.garbage.clear()
    world.silent.clear()
    world.wait_condition("MetricsAvailable", "True", "Reporting")
    world.silent.add(gateway)
    world.wait_condition("MetricsAvailable", "False", "NoGatewayMetrics")
    world.silent.clear()
    world.wait_condition("MetricsAvailable", "True", "Reporting")
    for name in (first, second):
        world.unready(name)
    assert "no replica is ready" in world.wait_condition("MetricsAvailable", "False", "NoReadyReplicas")
    assert world.condition("KnobsApplied")[:2] == ("Unknown", "NoReplicas")
    assert world.scale() == 2
    assert world.policy().knobs == knobs


def test_pods_that_never_answered_are_not_stale(world):
    world.never = True
    cell(world, rate=0.0)
    assert "port 8001" in world.wait_condition("MetricsAvailable", "False", "NoMetrics")


def test_fewer_than_half(world):
    cell(world, replicas=3)
    world.wait_condition("MetricsAvailable", "True", "Reporting")
    world.silent.update(world.pods()[:2])
    world.wait_condition("MetricsAvailable", "False", "PartialMetrics")


def test_failing_pods_neither_block_nor_count(world):
    """Two of four serve, one cannot be scheduled, one crashes: the decision is the one that two good pods give."""
    world.build(replicas=4)
    pods = world.wait(lambda: len(world.pods()) == 4 and world.pods(), "four pods")
    world.stuck.update({pods[0]: "CrashLoopBackOff", pods[1]: "ImagePullBackOff"})
    world.start_up = 3.0
    world.rate = 8.0
    world.slo(bounds={"replicas": {"min": 4, "max": 6}})
    world.operator()
    message = world.wait_condition("MetricsAvailable", "True", "Reporting")
    world.wait(lambda: "2 failing" in world.condition("MetricsAvailable")[2], "the failing ones are told")
    assert "CrashLoopBackOff" in world.condition("MetricsAvailable")[2], message
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    time.sleep(5)
    assert world.scale() == 4


def test_promises_that_cannot_be_kept_or_are_not(world):
    cell(world, replicas=1, rate=20.0, bounds={"replicas": {"min": 1, "max": 1}})
    world.wait_condition("Feasible", "True", "BoundByTPOT")
    assert "is 1: raise it" in world.wait_condition("WithinBounds", "False", "AtMax")
    knobs = world.wait(lambda: world.policy().knobs.max_num_seqs and world.policy().knobs, "knobs")
    world.edit({"spec": {"objectives": {"tpot": {"target": "9ms"}}}})
    message = world.wait_condition("Feasible", "False", "TPOTUnreachable")
    assert "TPOT 9ms unreachable: one sequence already takes 10." in message
    assert world.condition("Ready")[:2] == ("False", "TPOTUnreachable")
    assert world.policy().knobs == knobs, "the last settings stay"
    world.edit({"spec": {"objectives": {"tpot": None, "ttft": {"target": "30ms"}}}})
    world.wait_condition("Feasible", "False", "TTFTUnreachable")
    world.rate = 0.3
    world.edit(
        {
            "spec": {
                "objectives": {"tpot": {"target": "50ms"}, "ttft": {"target": "2s"}},
                "bounds": {"maxNumSeqs": {"min": 200}},
            }
        }
    )
    assert "maxNumSeqs.min 200" in world.wait_condition("WithinBounds", "False", "KnobsForced")
    world.edit({"spec": {"bounds": {"maxNumSeqs": None}}})
    world.quality, world.rate = 0.5, 20.0
    world.wait_condition("SLOMet", "False", "Missed")


def test_what_binds_a_replica_is_named(world):
    cell(world)
    world.wait_condition("Feasible", "True", "BoundByTPOT")
    roomy = world.limits
    for capacity, reason in (
        (dataclasses.replace(roomy, total_blocks=200), "BoundByKVBlocks"),
        (dataclasses.replace(roomy, max_num_seqs=9), "BoundByStartUpCapacity"),
        (dataclasses.replace(roomy, prefill_token_budget=32), "BoundByPrefillTokenBudget"),
    ):
        world.limits = capacity
        world.wait_condition("Feasible", "True", reason)
    world.limits = roomy
    world.edit({"spec": {"bounds": {"maxNumSeqs": {"max": 5}}}})
    assert "spec.bounds.maxNumSeqs.max is 5" in world.wait_condition("Feasible", "True", "BoundBySpecBounds")
    world.wait(lambda: world.policy().knobs.max_num_seqs == 5, "the bound is in force")
    world.model = dataclasses.replace(world.model, max_decode_rows=4)
    world.edit({"spec": {"bounds": None}})
    assert "no more than 8 sequences" in world.wait_condition("Feasible", "True", "BoundByExperience")
    world.model = dataclasses.replace(world.model, max_decode_rows=256, base=0.3)
    world.edit({"spec": {"objectives": {"tpot": None}}})
    assert "no TPOT objective" in world.wait_condition("Feasible", "True", "BoundByIterationLength")


def test_too_little_to_know_the_mix(world):
    world.mix = None
    cell(world)
    assert "are needed to know the mix" in world.wait_condition("Feasible", "Unknown", "NotEnoughData")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    assert world.policy().knobs == Knobs(), "promises go out; no knob is guessed"


def test_policies_that_are_not_read(world):
    cell(world)
    pods = world.wait(world.pods, "a pod")
    world.deaf.update(pods)
    world.wait_condition("KnobsApplied", "Unknown", "Waiting")
    touches = lambda: [step for step in world.writes(world.born_at) if step == ("patch", "pods")]  # noqa: E731
    world.wait(lambda: len(touches()) >= 3, "touched again and again", patience=30)
    world.deaf.clear()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.refusal = "chat.json: is not JSON"
    assert "is not JSON" in world.wait_condition("KnobsApplied", "False", "Refused")
    world.refusal = None
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.clamped = {"prefillTokenBudget": "start-up capacity"}
    assert "start-up capacity" in world.wait_condition("KnobsApplied", "True", "Clamped")


def test_a_policy_that_the_api_server_refuses(world):
    """Somebody made the ConfigMap immutable: the condition repeats the API server's words, and a new ConfigMap cures
    it."""
    cell(world)
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    revision = world.policy().revision
    world.core.patch_namespaced_config_map("headway-gateway-policy", world.namespace, {"immutable": True})
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    assert "immutable" in world.wait_condition("KnobsApplied", "False", "WriteFailed")
    assert world.condition("Ready")[:2] == ("False", "WriteFailed")
    world.core.delete_namespaced_config_map("headway-gateway-policy", world.namespace)
    world.core.create_namespaced_config_map(world.namespace, {"metadata": {"name": "headway-gateway-policy"}})
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    assert world.policy().revision > revision, "what pods acknowledged is outvoted although the ConfigMap is new"


@pytest.mark.full
def test_pods_that_do_not_read_policies_are_a_fault_after_two_minutes(world):
    cell(world)
    world.deaf.update(world.wait(world.pods, "a pod"))
    world.wait_condition("KnobsApplied", "Unknown", "Waiting")
    assert "started with --policy" in world.wait_condition("KnobsApplied", "False", "NotAcknowledged", patience=180)
    assert world.condition("Ready")[:2] == ("False", "NotAcknowledged")


def test_two_objects_on_one_target_the_oldest_owns_it(world):
    cell(world)
    world.wait_condition("Ready", "True", "Enforcing")
    time.sleep(1.1)  # creation times are whole seconds
    world.slo(name="late", objectives={"tpot": {"target": "20ms"}})
    message = world.wait_condition("Accepted", "False", "TargetOwned", name="late")
    assert "older ServingSLO chat" in message
    assert world.condition("TargetResolved", "late")[:2] == ("Unknown", "NotAccepted")
    assert world.policy("late") is None
    revision = world.policy().revision
    world.delete()
    world.wait_condition("Ready", "True", "Enforcing", name="late", patience=60)
    assert world.policy("late").revision > revision


def test_an_autoscaler_of_somebody_else_makes_it_turn_knobs_only(world):
    world.build()
    scaling = client.AutoscalingV2Api(world.api)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-runtime"}
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 3}
    scaling.create_namespaced_horizontal_pod_autoscaler(world.namespace, {"metadata": {"name": "theirs"}, "spec": spec})
    world.rate = 40.0
    world.slo(bounds={"replicas": {"min": 1, "max": 6}})
    world.operator()
    assert "HorizontalPodAutoscaler theirs" in world.wait_condition("ScalingActive", "False", "ForeignAutoscaler")
    world.wait(lambda: world.policy() and world.policy().knobs.max_num_seqs, "knobs are managed")
    world.wait_condition("Ready", "True", "Enforcing")
    assert world.scale() == 1
    assert "replicas" not in world.status()["desired"]


def test_paused_and_without_bounds(world):
    cell(world, rate=40.0, annotations={"headway.dev/paused": "true"}, bounds={"replicas": {"min": 1, "max": 4}})
    world.wait_condition("KnobsApplied", "False", "Paused")
    world.wait_condition("ScalingActive", "False", "Paused")
    world.wait_condition("Ready", "True", "Paused")
    world.wait(lambda: (world.status().get("desired") or {}).get("replicas") == 4, "what it would do")
    assert world.policy() is None
    assert world.scale() == 1
    world.edit({"metadata": {"annotations": {"headway.dev/paused": None}}})
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.wait(lambda: world.scale() == 4, "released")
    world.edit({"spec": {"bounds": None}})
    assert "set spec.bounds.replicas" in world.wait_condition("ScalingActive", "False", "NoReplicaBounds")
    world.edit({"spec": {"mode": "Observe"}})
    world.wait_condition("Ready", "True", "Observing")


def test_one_bad_object_does_not_hold_up_the_good_ones(world):
    """Twenty objects whose target is missing and one that is whole: the whole one is reconciled as if it were alone."""
    cell(world)
    world.wait_condition("Ready", "True", "Enforcing")
    for number in range(20):
        world.slo(name=f"bad-{number}", targetRef={"name": f"nowhere-{number}"})
    world.wait_condition("Ready", "False", "DeploymentNotFound", name="bad-19")
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    began = time.monotonic()
    world.wait(lambda: world.policy().generation == 2, "the good one is handled")
    assert time.monotonic() - began < 15
    for number in range(20):
        assert world.condition("Ready", f"bad-{number}")[1] == "DeploymentNotFound"


def test_a_spec_that_a_laxer_schema_let_through_is_told_and_cured_by_an_edit(world, tools):
    """Somebody installed the resource without its rules: the operator has its own, keeps what was in force, and needs
    no restart."""
    cell(world)
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    policy = world.policy()
    lax = tools.crd
    del lax["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["bounds"][
        "properties"
    ]["replicas"]["x-kubernetes-validations"]
    world.plane.kubectl("replace", "-f", "-", stdin=json.dumps(lax))
    try:
        world.wait(
            lambda: world.edit({"spec": {"bounds": {"replicas": {"min": 5, "max": 2}}}}), "the laxer schema is served"
        )
        message = world.wait_condition("Accepted", "False", "InvalidSpec")
        assert "spec.bounds.replicas: min must be <= max, not 5 > 2" in message
        assert world.condition("Ready")[:2] == ("False", "InvalidSpec")
        assert world.condition("TargetResolved")[:2] == ("Unknown", "NotAccepted")
        assert (world.policy(), world.scale()) == (policy, 1)
        world.edit({"spec": {"bounds": {"replicas": {"min": 1, "max": 2}}}})
        world.wait_condition("Ready", "True", "Enforcing")
    finally:
        world.plane.kubectl("replace", "-f", str(tools.path))


def test_an_older_schema_is_refused_with_the_command_that_upgrades_it(world, tools):
    """Its status lacks a field that is written today: nothing is reconciled, the condition says what to do, and nobody
    loops."""
    world.build()
    world.rate = 5.0
    world.slo()
    older = tools.crd
    del older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["desired"]
    extensions = client.ApiextensionsV1Api(world.api)

    def replace(document):
        live = extensions.read_custom_resource_definition("servingslos.headway.dev")
        body = {
            **document,
            "metadata": {"name": document["metadata"]["name"], "resourceVersion": live.metadata.resource_version},
        }
        extensions.replace_custom_resource_definition("servingslos.headway.dev", body)

    replace(older)
    try:
        published = "Sequences that a replica should run at once"
        path = "/openapi/v3/apis/headway.dev/v1alpha1"
        world.wait(lambda: published not in world.plane.kubectl("get", "--raw", path), "the older schema is served")
        world.operator()
        message = world.wait_condition("Ready", "False", "StaleSchema")
        assert "it lacks status.desired" in message
        assert "kubectl apply --server-side -f crds/servingslos.headway.dev.yaml" in message
        mark = world.plane.audit.mark()
        time.sleep(8)
        world.assert_silent(mark)
        assert world.policy() is None
    finally:
        world.plane.kubectl("replace", "-f", str(tools.path))
    world.wait_condition("Ready", "True", "Enforcing", patience=90)


def test_a_cluster_without_the_resource_is_waited_for(world, tools):
    """The operator starts first: it says what to install, and goes on by itself once it is there."""
    extensions = client.ApiextensionsV1Api(world.api)
    extensions.delete_custom_resource_definition("servingslos.headway.dev")
    world.wait(
        lambda: "servingslos" not in world.plane.kubectl("api-resources", "--api-group", "headway.dev"), "it is gone"
    )
    world.build()
    operator = world.operator()
    world.wait(lambda: "is not installed: kubectl apply" in operator.text, "the log says what to do")
    time.sleep(3)
    assert operator.text.count("is not installed") == 1, "said once in ten seconds"
    world.plane.kubectl("apply", "--server-side", "-f", str(tools.path))
    world.rate = 5.0
    world.wait(world.slo, "the resource is served")
    world.wait_condition("Ready", "True", "Enforcing", patience=90)
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    world.wait(lambda: world.policy().generation == 2, "and watched", patience=20)
    world.plane.wait_for(
        lambda: world.plane.kubectl("explain", "sslo") != "", "kubectl knows the short name again", patience=30
    )
