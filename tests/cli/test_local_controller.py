import dataclasses

import pytest
from headway_cli.local_controller import LocalController
from headway_cli.slo_file import DEFAULT, read_slo
from headway_core.contract.policy import MAX_REVISION, Endpoint, Knobs
from headway_core.contract.reports import (
    Acknowledgement,
    ClassReport,
    EngineLimits,
    GatewayReport,
    Mix,
    PoolReport,
    ReplicaState,
    RuntimeReport,
    StepTimeReport,
)
from headway_core.histogram import bucket
from headway_core.slo import Mode, TpotObjective

SLO = read_slo(DEFAULT)
ENDPOINTS = {"replica-1": Endpoint("127.0.0.1", 9000, 9001)}


def runtime(**changes):
    made = RuntimeReport(
        replica_id="replica-1",
        pool=SLO.target_name,
        model="m",
        boot_id="b",
        seq=1,
        at=0.0,
        state=ReplicaState.READY,
        limits=EngineLimits(64, 512, 2048, 16, 4096),
        effective=Knobs(64, 512),
        running=3,
        step_time=StepTimeReport(0.02, 0.001, 0.001, 1e-6, 0.0, 0.001, 16, 500, 64, 512, 0.05),
        mix=Mix(100, 200.0, 0.0, 60.0, 230.0),
    )
    return dataclasses.replace(made, **changes)


def gateway(offered, *, attained=0, shed=0, boot="g"):
    counted = ClassReport(
        offered=offered,
        outcomes={"ok": offered - shed, "shed": shed},
        shed={"slot_wait": shed},
        attained={"all": attained, "ttft": attained},
        judged={"ttft": offered - shed},
        ttft={bucket(0.5): offered - shed},
        queued=2,
    )
    return GatewayReport(
        "gw", boot, 1, 0.0, ReplicaState.READY, (PoolReport(SLO.target_name, {"interactive": counted}),)
    )


def test_the_first_policy_carries_the_promise_and_leaves_the_knobs_alone():
    policy = LocalController(SLO, ENDPOINTS).policy()
    assert (policy.revision, policy.knobs, policy.pool.endpoints) == (1, Knobs(), tuple(ENDPOINTS.values()))
    assert policy.classes == SLO.classes


def test_knobs_follow_the_measured_step_time_and_stay_when_nothing_changes():
    controller = LocalController(SLO, ENDPOINTS)
    changed = controller.observe({"replica-1": runtime()}, gateway(0), ["replica-1"], 10.0)
    assert changed is not None
    assert changed.revision == 2
    assert 1 <= changed.knobs.max_num_seqs < 64, "64 sequences at a millisecond each break 150 ms once prefill is added"
    assert controller.observe({"replica-1": runtime()}, gateway(0), ["replica-1"], 11.0) is None


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.RECOMMEND])
def test_without_enforce_nothing_is_written(mode):
    controller = LocalController(dataclasses.replace(SLO, mode=mode), ENDPOINTS)
    assert controller.observe({"replica-1": runtime()}, gateway(0), ["replica-1"], 10.0) is None
    assert controller.policy().revision == 1


def test_a_replica_without_a_mix_changes_nothing():
    controller = LocalController(SLO, ENDPOINTS)
    assert controller.observe({"replica-1": runtime(mix=None)}, gateway(0), ["replica-1"], 10.0) is None
    assert "requests finished" in controller.status(["replica-1"], 10.0).note


def test_a_changed_promise_is_a_higher_revision_at_once():
    controller = LocalController(SLO, ENDPOINTS)
    first = controller.policy().revision
    assert controller.adopt(dataclasses.replace(SLO, window=30.0)).revision == first + 1


def test_knobs_follow_a_changed_promise_at_once_whatever_was_estimated_for_the_old_one():
    controller = LocalController(SLO, ENDPOINTS)
    for second in range(10, 40):
        controller.observe({"replica-1": runtime()}, gateway(0), ["replica-1"], float(second))
    before = controller.policy().knobs
    objectives = dataclasses.replace(SLO.objectives, tpot=TpotObjective(0.05))
    classes = tuple(dataclasses.replace(known, objectives=objectives) for known in SLO.classes)
    controller.adopt(dataclasses.replace(SLO, classes=classes))
    changed = controller.observe({"replica-1": runtime()}, gateway(0), ["replica-1"], 40.0)
    assert changed is not None
    assert changed.knobs.max_num_seqs < before.max_num_seqs / 2


def test_status_differences_the_books_and_knows_no_rate_before_two_looks():
    controller = LocalController(SLO, ENDPOINTS)
    controller.observe({"replica-1": runtime()}, gateway(100, attained=90, shed=10), ["replica-1"], 10.0)
    assert controller.status(["replica-1"], 10.0).classes[0].rate is None
    controller.observe({"replica-1": runtime()}, gateway(140, attained=120, shed=20), ["replica-1"], 20.0)
    row = controller.status(["replica-1"], 20.0).classes[0]
    assert row.rate == pytest.approx(4.0)
    assert row.shed == pytest.approx(10 / 40)
    assert row.attainment == pytest.approx(30 / 40)
    assert row.ttft.value == pytest.approx(0.5, rel=0.05)
    assert (row.queued, row.tpot.value, row.tpot.kept) == (2, None, None)


def test_a_dead_replica_is_not_counted_as_ready():
    controller = LocalController(SLO, ENDPOINTS)
    controller.observe({"replica-1": runtime()}, None, ["replica-1"], 10.0)
    assert controller.status(["replica-1"], 10.0).replicas_ready == 1
    controller.observe({}, None, [], 11.0)
    status = controller.status([], 11.0)
    assert (status.replicas_ready, status.replicas, status.running) == (0, 1, 0)


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.ENFORCE])
@pytest.mark.parametrize("place", ["replica", "gateway"])
def test_a_revision_from_elsewhere_is_overtaken(mode, place):
    """Somebody edited the file: what is in force there now would be kept for good, since only higher revisions are
    taken."""
    controller = LocalController(dataclasses.replace(SLO, mode=mode), ENDPOINTS)
    found = Acknowledgement(1_000, "by hand", Knobs(1, 16), {}, 0.0)
    seen = gateway(0)
    if place == "gateway":
        seen = dataclasses.replace(seen, pools=(dataclasses.replace(seen.pools[0], policy=found),))
    report = runtime(policy=found if place == "replica" else None)
    changed = controller.observe({"replica-1": report}, seen, ["replica-1"], 10.0)
    assert changed is not None and changed.revision == 1_001
    assert controller.observe({"replica-1": report}, seen, ["replica-1"], 11.0) is None


def test_the_highest_revision_of_all_ends_nothing():
    controller = LocalController(SLO, ENDPOINTS)
    report = runtime(policy=Acknowledgement(MAX_REVISION, "by hand", Knobs(1, 16), {}, 0.0))
    changed = controller.observe({"replica-1": report}, gateway(0), ["replica-1"], 10.0)
    assert changed is not None and changed.revision == MAX_REVISION
    assert controller.observe({"replica-1": report}, gateway(0), ["replica-1"], 11.0) is None
    assert controller.adopt(SLO).revision == MAX_REVISION
