"""Two operators: exactly one acts; the other takes over soon; nothing is written twice."""

import signal
import time

import pytest

pytestmark = pytest.mark.cluster

LEASE = "headway-operator"


def leader(world):
    lease = world.plane.get(f"lease/{LEASE}", namespace=world.namespace)["spec"]
    return lease["holderIdentity"]


def holders(world):
    """The operators that say that they hold the lease now, by their own /metrics."""
    return [operator for operator in world.operators if operator.process.poll() is None and operator.leads]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_other_takes_over_within_20_seconds_and_no_write_is_doubled(world, how):
    world.build(replicas=2)
    world.rate = 5.0
    world.slo()
    world.operator()
    world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.wait(lambda: len(holders(world)) == 1, "one leads")
    first = holders(world)[0]
    mark = world.plane.audit.mark()
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.wait(lambda: world.status()["observedGeneration"] == 2 and world.policy().generation == 2, "applied")
    time.sleep(3)
    assert world.writes(mark).count(("patch", "configmaps")) == 1

    began = time.monotonic()
    first.stop(how)
    world.wait(lambda: len(holders(world)) == 1, "the other leads", patience=30)
    taken = time.monotonic() - began
    assert taken < 20, taken
    if how is signal.SIGTERM:
        assert taken < 8, "it was given back"
    world.edit({"spec": {"objectives": {"tpot": {"target": "40ms"}}}})
    world.wait(lambda: world.policy().generation == 3, "the other acts")


def test_a_leader_that_cannot_renew_stops_before_another_may_start(world):
    """The right to the lease is taken from the leader alone: it goes silent, and only then the other acts."""
    world.build(replicas=1)
    world.rate = 5.0
    world.slo()
    world.grant(
        [rule for rule in world.rules if rule[1] != "leases"]
        + [("coordination.k8s.io", "leases", "get create update")],
        "second",
    )
    first = world.operator("--lease-duration", "6s")
    world.wait(lambda: first.leads, "the first leads")
    second = world.operator("--lease-duration", "6s", account="second")
    world.grant([rule for rule in world.rules if rule[1] != "leases"])
    overlap = []

    def taken():
        overlap.append(first.leads and second.leads)
        return second.leads

    world.wait(taken, "the second leads", patience=40)
    assert not any(overlap)
    assert not first.leads
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    mark = world.plane.audit.mark()
    world.wait(lambda: world.policy().generation == 2, "the second acts")
    assert [entry for entry in world.changes(mark) if entry.user == world.user] == []


def test_two_releases_in_one_namespace_leave_each_others_objects_alone(world):
    """Each has its operator, with a lease and rights of its own; the gateway's Service names the one that manages what
    is behind it."""
    world.build(replicas=1)
    world.rate = 5.0
    owner = {"metadata": {"annotations": {"headway.dev/operator": f"{world.namespace}/one-operator"}}}
    world.core.patch_namespaced_service("headway-gateway", world.namespace, owner)
    world.grant(world.rules, "other")
    world.slo()
    other = world.operator("--lease-name", "other-operator", account="other")
    world.wait(lambda: "left to the operator" in other.text, "the other says whose it is")
    world.operator("--lease-name", "one-operator")
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.wait_condition("Ready", "True", "Enforcing")
    strangers = world.plane.audit.entries(
        since=world.born_at, user=f"system:serviceaccount:{world.namespace}:other", verb={"patch", "create", "update"}
    )
    assert {entry.resource for entry in strangers} <= {"leases", "selfsubjectaccessreviews"}
    assert "headway_slo_condition{" not in other.metrics()
    world.core.patch_namespaced_service(
        "headway-gateway", world.namespace, {"metadata": {"annotations": {"headway.dev/operator": None}}}
    )
    world.wait(lambda: "headway_slo_condition{" in other.metrics(), "unnamed again: whoever finds it")


@pytest.mark.full
def test_rolling_restarts_have_one_writer_at_a_time(world):
    world.build(replicas=1)
    world.rate = 5.0
    world.slo()
    world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    for number in range(3):
        old = world.operators[-1]
        world.operator()
        world.wait(lambda: "lease" in world.operators[-1].text or world.operators[-1].port, "started")
        old.stop()
        world.edit({"spec": {"objectives": {"tpot": {"target": f"{30 + number}ms"}}}})
        world.wait(lambda number=number: world.policy().generation == number + 2, "the new one acts", patience=30)
    entries = world.plane.audit.entries(since=world.born_at, user=world.user, verb={"update"}, resource="leases")
    terms = [
        entry.body["spec"]["holderIdentity"]
        for entry in entries
        if entry.code < 300 and entry.body["spec"]["holderIdentity"]
    ]
    changes = [name for name, before in zip(terms, [None, *terms], strict=False) if name != before]
    assert len(changes) == len(set(changes)), "nobody came back after another had it"
