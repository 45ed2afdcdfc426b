"""PoolAdmission as a whole: every request has exactly one answer, and all state returns to nothing."""

from __future__ import annotations

import random
import time

import pytest
from headway_core.admission import (
    RULES,
    AdmissionController,
    AdmissionQueue,
    AdmissionRule,
    Fleet,
    PoolAdmission,
    QueueLimits,
)
from headway_core.admission.rules import Moore
from headway_core.contract.header_names import ShedReason
from headway_core.contract.reports import ClassLoad, ReplicaState


def admission_of(*classes, rule: AdmissionRule = Moore(), limits: QueueLimits = QueueLimits()) -> PoolAdmission:
    return PoolAdmission(
        classes,
        "gw",
        controller=AdmissionController(rule, margin=0.0),
        queue=AdmissionQueue(limits),
        fleet=Fleet("gw", interval=1.0),
    )


@pytest.mark.parametrize("rule", list(RULES.values()))
def test_every_offered_request_is_answered_once_and_nothing_is_left_behind(
    priority_class, request_of, report, rule
) -> None:
    rng = random.Random(11)
    classes = [priority_class(0, 4.0), priority_class(5, 2.0, shares=4)]
    admission = admission_of(*classes, rule=rule, limits=QueueLimits(requests=30, bytes=20_000, seconds=6.0))
    answered: dict[int, str] = {}
    open_now: dict[int, tuple[object, str]] = {}
    offered: set[int] = set()
    cancelled: set[int] = set()
    again = 0

    def act(result) -> None:
        for shed in result.shed:
            assert shed.request_id not in answered
            assert 1 <= shed.retry_after <= 60
            answered[shed.request_id] = shed.reason.value
        for dispatch in result.dispatches:
            assert dispatch.request.request_id not in answered
            answered[dispatch.request.request_id] = "dispatched"
            open_now[dispatch.request.request_id] = (dispatch.request, dispatch.replica_id)

    now = 0.0
    for step in range(4000):
        now += rng.expovariate(25)
        action = rng.random()
        if action < 0.4:
            one = request_of(
                rng.randint(1, 3000), arrival=now, slo=rng.choice(classes), size_bytes=rng.randint(0, 3000)
            )
            offered.add(one.request_id)
            act(admission.submit(one, now))
        elif action < 0.55:
            act(admission.poll(now))
        elif action < 0.7:
            names = ["a", "b", "c"]
            name = rng.choice(names)
            state = ReplicaState.READY if rng.random() < 0.9 else ReplicaState.DRAINING
            inside = sum(replica == name for _, replica in open_now.values())
            admission.report(
                report(
                    name,
                    state=state,
                    free_slots=max(0, 8 - inside),
                    running=min(8, inside),
                    classes=(ClassLoad(0, 0, min(8, inside), rng.randint(0, 2000)),),
                    dispatched={"gw": 10_000},
                ),
                now,
                0.002,
            )
        elif action < 0.95 and open_now:
            which = rng.choice(sorted(open_now))
            request, replica = open_now.pop(which)
            if rng.random() < 0.7:
                admission.first_token(which, now)
            failed = rng.random() < 0.1
            admission.ended(which, now, server_error=failed)
            admission.ended(which, now)
            if failed:
                del answered[which]
                again += 1
                act(admission.resubmit(request, now, [replica]))
        elif len(admission.queue):
            which = rng.choice(admission.queue.order()).request_id
            cancelled.add(which)
            admission.ended(which, now)
        if step % 50 == 0:
            act(admission.poll(now))
            admission.check()
    for which in list(open_now):
        admission.ended(which, now)
    act(admission.poll(now + 100))
    for which, what in list(answered.items()):
        if what == "dispatched":
            admission.ended(which, now)
    assert set(answered) | cancelled == offered
    assert not set(answered) & cancelled
    assert again > 5
    assert list(answered.values()).count("dispatched") > 50
    assert (len(admission.queue), admission.queue.bytes) == (0, 0)
    assert all(admission.fleet.in_flight(name) == 0 for name in admission.fleet)
    admission.check()
    assert all(admission.predicted(which) is None for which in offered)


def test_turns_go_to_the_highest_class_at_once_and_to_an_aged_lower_one_in_its_place(
    priority_class, request_of, report
) -> None:
    low, high = priority_class(0, None, max_queue_time=1000.0), priority_class(9, 500.0)
    admission = admission_of(low, high)
    full = {
        "free_slots": 0,
        "running": 8,
        "classes": (ClassLoad(9, 0, 8, 5000),),
        "prefill_rate": 1000.0,
        "completion_rate": None,
    }
    admission.report(report(**full), 0.0)
    patient = request_of(100, arrival=0.0, slo=low)
    admission.submit(patient, 0.0)
    first = request_of(1000, arrival=0.1, slo=high)
    admission.submit(first, 0.1)
    others = [request_of(1000, arrival=0.2, slo=high) for _ in range(4)]
    for one in others:
        admission.submit(one, 0.2)
    assert len(admission.queue) == 6
    order = []
    for step in range(6):
        # One slot comes free at a time; after eight seconds the low request has aged and has credit.
        now = 1.0 + step * 2.0
        admission.report(
            report(
                free_slots=1, running=7, classes=(ClassLoad(9, 0, 7, 0),), dispatched={"gw": step}, completion_rate=None
            ),
            now,
        )
        (dispatch,) = admission.poll(now).dispatches
        order.append((dispatch.request.request_id, dispatch.priority))
    assert order[0] == (first.request_id, 9)
    place = [request_id for request_id, _ in order].index(patient.request_id)
    assert 1 <= place < 5
    assert order[place][1] == 9, "in the engine too it must not stand behind the class that it was let past"


def test_a_full_queue_gives_up_the_lowest_and_latest_for_a_higher_class_and_refuses_its_own(
    priority_class, request_of, report
) -> None:
    low, high = priority_class(0, 1000.0), priority_class(9, 1000.0)
    admission = admission_of(low, high, limits=QueueLimits(requests=3, bytes=1000, seconds=100))
    admission.report(report(free_slots=0, running=8, classes=(ClassLoad(9, 0, 8, 100),)), 0.0)
    waiting = [request_of(10, arrival=index * 0.1, slo=low, size_bytes=300) for index in range(3)]
    for one in waiting:
        assert admission.submit(one, one.arrival).shed == ()
    (shed,) = admission.submit(request_of(10, arrival=0.5, slo=low), 0.5).shed
    assert shed.reason is ShedReason.QUEUE_FULL
    assert shed.contended
    result = admission.submit(request_of(10, arrival=0.6, slo=high, size_bytes=600), 0.6)
    assert [(one.request_id, one.reason) for one in result.shed] == [
        (waiting[2].request_id, ShedReason.QUEUE_FULL),
        (waiting[1].request_id, ShedReason.QUEUE_FULL),
    ]
    assert len(admission.queue) == 2
    (shed,) = admission.submit(request_of(10, arrival=0.7, slo=high, size_bytes=800), 0.7).shed
    assert shed.reason is ShedReason.QUEUE_FULL
    assert len(admission.queue) == 2, "nobody is given up for one that does not fit all the same"


def test_whoever_waits_too_long_is_told_why(priority_class, request_of, report) -> None:
    slo = priority_class(0, 5.0)
    admission = admission_of(slo)
    admission.report(report(free_slots=0, running=8, classes=(ClassLoad(0, 0, 8, 0),), completion_rate=None), 0.0)
    one = request_of(1000, arrival=0.0, slo=slo)
    admission.submit(one, 0.0)
    assert admission.poll(3.89).shed == ()  # 5 s less its own prefill and an iteration
    (shed,) = admission.poll(3.91).shed
    assert (shed.request_id, shed.reason) == (one.request_id, ShedReason.QUEUE_TIME)
    two = request_of(1000, arrival=4.0, slo=slo)
    admission.submit(two, 4.0)
    admission.remove("r0")
    (shed,) = admission.poll(20.0).shed
    assert shed.reason is ShedReason.NO_REPLICA


def test_when_replicas_slow_down_those_who_cannot_make_it_any_more_are_told_at_the_next_report(
    priority_class, request_of, report
) -> None:
    slo = priority_class(0, 5.0)
    admission = admission_of(slo)
    busy = {"free_slots": 2, "running": 6}
    admission.report(report(classes=(ClassLoad(0, 0, 6, 1000),), prefill_rate=1000.0, **busy), 0.0)
    waiting = [request_of(900, arrival=0.0, slo=slo) for _ in range(3)]
    for one in waiting:
        assert admission.submit(one, 0.0).shed == ()
    admission.report(report(classes=(ClassLoad(0, 0, 6, 1000),), prefill_rate=500.0, **busy), 0.1)
    shed = admission.poll(0.1).shed
    assert len(shed) == 2
    assert {one.reason for one in shed} == {ShedReason.OUTRANKED}


@pytest.mark.parametrize("failed_before", [False, True])
def test_a_long_one_that_could_start_in_an_overload_gives_way_unless_a_replica_failed_it(
    priority_class, request_of, report, failed_before
) -> None:
    slo = priority_class(0, 10.0)
    admission = admission_of(slo)
    busy = {"free_slots": 2, "running": 6, "completion_rate": 100.0}
    for index in range(1000):
        admission.controller.offered(request_of(1 + index % 20 * 100, slo=slo), index / 2.1)
    now = 1000 / 2.1
    admission.report(report(classes=(ClassLoad(0, 0, 6, 1000),), **busy), now)
    long = request_of(1900, arrival=now, slo=slo)
    others = [request_of(500, arrival=now + 0.001 * index, slo=slo) for index in range(14)]
    assert (admission.resubmit(long, now, ["another"]) if failed_before else admission.submit(long, now)).shed == ()
    for one in others:
        assert admission.submit(one, one.arrival).shed == ()
    assert len(admission.queue) == 15
    now += 0.1
    admission.report(report(classes=(ClassLoad(0, 0, 6, 0),), **busy), now)
    result = admission.poll(now)
    if failed_before:
        assert result.shed == ()
        assert result.dispatches[0].request is long
    else:
        assert [(one.request_id, one.reason) for one in result.shed] == [(long.request_id, ShedReason.OUTRANKED)]
        assert result.dispatches[0].request is others[0]
        assert admission.predicted(long.request_id) is None, "nothing is kept of it"
    assert len(admission.queue) + len(result.dispatches) + len(result.shed) == 15


def test_errors_are_compared_for_admitted_and_for_shed_alike(priority_class, request_of, report) -> None:
    slo = priority_class(0, 2.0)
    admission = admission_of(slo)
    admission.report(report(iteration_seconds=0.1), 0.0)
    first = request_of(1500, arrival=0.0, slo=slo)
    assert admission.submit(first, 0.0).dispatches
    assert admission.predicted(first.request_id) == pytest.approx(1.6)
    second = request_of(1500, arrival=0.0, slo=slo)
    (shed,) = admission.submit(second, 0.0).shed
    assert shed.prediction.ttft == pytest.approx(3.1)
    admitted, refused = admission.first_token(first.request_id, 2.0)
    assert (admitted.shed, refused.shed) == (False, True)
    assert admitted.error == pytest.approx(1.6 - 2.0)
    # The one ahead of it came 0.4 s late, so it would have been 0.4 s late too.
    assert refused.error == pytest.approx(-0.4)
    assert admission.first_token(first.request_id, 2.1) == ()


def test_draining_takes_nobody_and_serves_those_who_wait(priority_class, request_of, report) -> None:
    slo = priority_class(0, 50.0)
    admission = admission_of(slo)
    admission.report(report(free_slots=0, running=8, classes=(ClassLoad(0, 0, 8, 0),)), 0.0)
    one = request_of(arrival=0.0, slo=slo)
    admission.submit(one, 0.0)
    admission.draining = True
    (shed,) = admission.submit(request_of(arrival=0.1, slo=slo), 0.1).shed
    assert shed.reason is ShedReason.DRAINING
    assert not shed.contended
    admission.report(report(), 0.2)
    assert [dispatch.request for dispatch in admission.poll(0.2).dispatches] == [one]


def test_another_try_avoids_those_tried_and_repeated_failures_eject(priority_class, request_of, report) -> None:
    slo = priority_class(0, 50.0)
    admission = admission_of(slo)
    for name in ("a", "b"):
        admission.report(report(name), 0.0)
    for _ in range(5):
        one = request_of(arrival=0.0, slo=slo)
        (dispatch,) = admission.submit(one, 0.0).dispatches
        admission.ended(one.request_id, 0.0, server_error=dispatch.replica_id == "a")
        if dispatch.replica_id == "a":
            (second,) = admission.resubmit(one, 0.0, ["a"]).dispatches
            assert second.replica_id == "b"
            (refused,) = admission.resubmit(one, 0.0, ["a", "b"]).shed
            assert refused.reason is ShedReason.NO_REPLICA
            admission.ended(one.request_id, 0.0)
    assert [load.replica_id for load in admission.fleet.loads(0.1)] == ["b"]


def test_one_that_failed_waits_for_another_replica_and_not_for_the_one_that_failed_it(
    priority_class, request_of, report
) -> None:
    slo = priority_class(0, 50.0)
    admission = admission_of(slo)
    admission.report(report("a"), 0.0)
    one = request_of(arrival=0.0, slo=slo)
    assert admission.submit(one, 0.0).dispatches
    admission.report(report("b", free_slots=0, running=8, classes=(ClassLoad(0, 0, 8, 0),), completion_rate=None), 0.1)
    admission.ended(one.request_id, 0.2, server_error=True)
    result = admission.resubmit(one, 0.2, ["a"])
    assert (result.dispatches, result.shed, len(admission.queue)) == ((), (), 1)
    assert admission.poll(0.3).dispatches == ()
    behind = request_of(arrival=0.3, slo=slo)
    admission.submit(behind, 0.3)
    assert [dispatch.request for dispatch in admission.poll(0.3).dispatches] == [behind], "it holds up nobody"
    admission.report(report("b", free_slots=1, running=7), 0.4)
    assert [dispatch.replica_id for dispatch in admission.poll(0.4).dispatches] == ["b"]


def test_a_prefix_that_was_sent_somewhere_draws_its_like_there(priority_class, request_of, report) -> None:
    slo = priority_class(0, 50.0)
    admission = admission_of(slo)
    for name in ("a", "b", "c"):
        admission.report(report(name), 0.0)
    homes = {}
    for topic in range(6):
        one = request_of(1000, arrival=0.0, slo=slo, prefix=(topic, topic + 100), prefix_chunk_tokens=400)
        (dispatch,) = admission.submit(one, 0.0).dispatches
        homes[topic] = dispatch.replica_id
        admission.first_token(one.request_id, 0.0)
        admission.ended(one.request_id, 0.0)
    for topic, home in homes.items():
        like = request_of(1100, arrival=1.0, slo=slo, prefix=(topic, topic + 100, topic + 200), prefix_chunk_tokens=400)
        (dispatch,) = admission.submit(like, 1.0).dispatches
        assert dispatch.replica_id == home
        assert dispatch.prediction.own == pytest.approx(0.3)
        admission.first_token(like.request_id, 1.0)
        admission.ended(like.request_id, 1.0)
    admission.report(report("a", boot_id="restarted"), 2.0)
    assert "a" not in admission.prefixes.matches((0, 100)) and "a" not in admission.prefixes.matches((3, 103))


def test_a_decision_costs_little_more_behind_a_long_queue(priority_class, request_of, report) -> None:
    def cost(waiting: int) -> float:
        """CPU seconds of an offer, the least of many, where so many wait."""
        slo = priority_class(0, 1e6)
        admission = admission_of(slo, limits=QueueLimits(requests=10_000, seconds=1e6))
        for name in "ab":
            admission.report(report(name, free_slots=0, running=8, classes=(ClassLoad(0, 0, 8, 10_000),)), 0.0)
        for _ in range(waiting):
            admission.submit(request_of(100, slo=slo), 0.0)
        assert len(admission.queue) == waiting
        costs = []
        for _ in range(40):
            newcomer = request_of(100, slo=slo)
            begun = time.process_time()
            admission.submit(newcomer, 0.0)
            costs.append(time.process_time() - begun)
            admission.ended(newcomer.request_id, 0.0)
        return min(costs)

    # A hundred times as many wait.
    assert cost(1000) < 20 * cost(10)
