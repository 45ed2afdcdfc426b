"""A ServingSLO's life on a real API server: knobs equal to an oracle, replicas up and down, silence when nothing
changes."""

import signal
import time

import pytest
from headway_core.contract.reports import Mix

pytestmark = pytest.mark.cluster


def oracle(target, s=400.0, o=100.0, c=450.0, a=0.010, b=2e-4, e=1e-6, rho=0.8, block=16):
    """(n*, p*, λ*) of the straight line that the scripted runtimes report, by the formula; no budget is less than a KV
    block."""
    n = (target - a) / (b * s / (rho * o) + b + e * c)
    return n, max(block, n * s / (rho * o)), n / (o * target)


def test_knobs_equal_the_oracle_and_then_there_is_silence(world):
    world.build(replicas=2)
    world.rate = 5.0
    first = world.slo()
    world.operator()
    world.wait_condition("Ready", "True", "Enforcing")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    first_words = next(entry for entry in world.changes(world.born_at) if entry.resource == "servingslos").body[
        "status"
    ]["conditions"]
    assert ("MetricsAvailable", "Unknown", "FirstReading") in [
        (c["type"], c["status"], c["reason"]) for c in first_words
    ]
    n, p, _ = oracle(0.050)
    status = world.status()
    assert abs(status["applied"]["maxNumSeqs"] - n) <= 1
    assert abs(status["applied"]["prefillTokenBudget"] - p) <= 0.05 * p
    assert status["applied"]["acknowledgedReplicas"] == 2
    assert status["desired"] == {key: status["applied"][key] for key in ("maxNumSeqs", "prefillTokenBudget")}
    assert status["decisions"][0]["action"] == "SetKnobs"
    assert "is bound by TPOT" in status["decisions"][0]["message"]
    policy = world.policy()
    assert (policy.slo_uid, policy.pool.name, policy.default_class) == (
        first["metadata"]["uid"],
        "chat-runtime",
        "default",
    )
    assert policy.pool.endpoints[0].host == f"chat-runtime.{world.namespace}.svc"
    managers = world.core.read_namespaced_config_map("headway-gateway-policy", world.namespace).metadata.managed_fields
    assert [entry.manager for entry in managers if entry.operation == "Apply"] == ["headway/chat"]

    world.wait_condition("SLOMet", "True", "Kept")
    world.wait_until_silent()
    mark, version = world.plane.audit.mark(), world.get()["metadata"]["resourceVersion"]
    time.sleep(10)
    world.assert_silent(mark)
    assert world.get()["metadata"]["resourceVersion"] == version

    mark = world.plane.audit.mark()
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    n, p, _ = oracle(0.030)
    world.wait(lambda: abs((world.status().get("applied") or {}).get("maxNumSeqs", 0) - n) <= 1, "the new knobs")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    written = world.writes(mark)
    assert written.count(("patch", "configmaps")) == 1
    assert written.count(("patch", "pods")) == 3, "two runtimes and a gateway, touched once each"
    assert world.status()["observedGeneration"] == 2


def test_a_mix_that_hardly_needs_prefill_keeps_a_block_of_budget(world):
    """Prompts of sixty tokens, nearly all cached: six tokens an iteration would do, and a prompt that is not cached
    would crawl."""
    world.build()
    world.mix = Mix(500, 60.0, 56.0, 100.0, 110.0)
    world.rate = 5.0
    world.slo()
    world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    n, p, _ = oracle(0.050, s=4.0, c=110.0)
    knobs = world.policy().knobs
    assert abs(knobs.max_num_seqs - n) <= 1
    assert knobs.prefill_token_budget == p == 16


def test_a_restart_that_has_nothing_to_do_writes_nothing(world):
    world.build(replicas=2)
    world.rate = 20.0
    world.slo(bounds={"replicas": {"min": 1, "max": 2}})
    operator = world.operator()
    world.wait_condition("Ready", "True", "Enforcing")
    world.wait_condition("SLOMet", "True", "Kept")
    world.wait_condition("WithinBounds", "False", "AtMax")
    for number in (signal.SIGTERM, signal.SIGKILL):
        world.wait_until_silent()
        mark, before = world.plane.audit.mark(), world.status()["conditions"]
        operator.stop(number)
        operator = world.operator("--lease-name", f"after-{number}")  # what is tested is not the wait for the lease
        world.wait(lambda started=operator: "holding the lease" in started.text, "the new operator acts")
        time.sleep(7)  # a window and what follows it
        world.assert_silent(mark, f"{number}: {before}")


def test_replicas_follow_the_load_up_and_down_and_the_emptiest_goes(world):
    world.build(replicas=1)
    _, _, rate = oracle(0.050)
    world.rate = 0.6 * rate
    world.slo(bounds={"replicas": {"min": 1, "max": 6}})
    world.operator("--drain-budget", "30s")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    assert world.scale() == 1
    world.rate = 3.5 * rate
    world.wait(lambda: world.scale() == 4, "four replicas", patience=60)
    world.wait(lambda: world.status().get("readyReplicas") == 4, "four ready")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    busy = world.pods()[1:]
    world.running.update(dict.fromkeys(busy, 3))
    idle = world.pods()[0]
    mark = world.plane.audit.mark()
    world.rate = 2.5 * rate
    world.wait(lambda: world.scale() == 3, "three replicas", patience=60)
    world.wait(lambda: len(world.pods()) == 3, "one pod is gone")
    assert idle not in world.pods()
    steps = [step for step in world.writes(mark) if step[1] in ("configmaps", "deployments/scale", "pods")]
    assert steps[0] == ("patch", "configmaps"), "cordoned before anything else"
    assert steps.index(("patch", "deployments/scale")) > 0
    world.wait(lambda: world.policy().cordoned == (), "the name of the pod that is gone leaves the policy")
    assert [known["action"] for known in world.status()["decisions"]][:2] in (["Cordon", "Scale"], ["Scale", "Cordon"])


def test_recommend_says_the_same_and_applies_nothing(world):
    world.build(replicas=1)
    n, p, rate = oracle(0.050)
    world.rate = 3.5 * rate
    world.slo(mode="Recommend", bounds={"replicas": {"min": 1, "max": 6}})
    world.operator()
    world.wait(lambda: (world.status().get("desired") or {}).get("replicas") == 4, "the recommendation")
    desired = world.status()["desired"]
    assert abs(desired["maxNumSeqs"] - n) <= 1
    assert abs(desired["prefillTokenBudget"] - p) <= 0.05 * p
    world.wait_condition("Ready", "True", "Recommending")
    assert world.condition("KnobsApplied")[:2] == ("False", "NotEnforced")
    assert world.scale() == 1
    assert world.policy().knobs.max_num_seqs is None, "the gateway learns what is promised, and no knob is set"
    mark = world.plane.audit.mark()
    world.edit({"spec": {"mode": "Enforce"}})
    world.wait(lambda: world.scale() == 4, "enforced")
    assert ("patch", "configmaps") in world.writes(mark)


def test_observe_shows_figures_and_desires_nothing(world):
    world.build()
    world.rate = 20.0
    world.quality = 0.5
    world.slo(mode="Observe")
    world.operator()
    message = world.wait_condition("SLOMet", "False", "Missed")
    assert "requests kept TTFT" in message
    assert "95% are promised" in message
    world.wait(lambda: 0.45 <= float((world.status().get("observed") or {}).get("attainment", 0)) <= 0.55, "figures")
    observed = world.status()["observed"]
    assert observed["class"] == "default"
    assert 18 <= float(observed["requestRate"]) <= 22
    assert set(observed) == {"class", "ttft", "tpot", "attainment", "requestRate", "shed"}
    assert "desired" not in world.status()


def test_an_edit_while_nobody_is_there_is_found(world):
    world.build()
    world.rate = 5.0
    world.slo()
    operator = world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    operator.stop(signal.SIGKILL)
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    world.operator("--lease-name", "another")
    n, _, _ = oracle(0.030)
    world.wait(lambda: abs((world.status().get("applied") or {}).get("maxNumSeqs", 0) - n) <= 1, "applied", patience=30)
