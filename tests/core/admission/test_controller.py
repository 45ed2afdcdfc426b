"""Deciding about admission: when to shed, whom to displace, and that asking changes nothing."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
from headway_core.admission import RULES, AdmissionController, AdmissionRule, Admit, PoolLoad, Shed, Wait
from headway_core.admission.rules import LittlesLaw, Moore, OpenAdmission, PredictedTtft, QueuedTokens
from headway_core.contract.header_names import ShedReason


def controller(rule: AdmissionRule = Moore(), **options: object) -> AdmissionController:
    return AdmissionController(rule, **{"margin": 0.0, **options})  # type: ignore[arg-type]


def test_an_idle_pool_admits_and_a_busy_one_keeps_waiting_until_the_last_useful_instant(
    priority_class, request_of, busy
) -> None:
    slo = priority_class(target=10.0)
    one = request_of(2000, arrival=3.0, slo=slo)
    idle = busy(backlog=0.0)
    decision = controller().decide(one, idle, [slo], 3.0)
    assert isinstance(decision, Admit)
    assert decision.prediction.ttft == pytest.approx(2.0)
    decision = controller().decide(one, busy(backlog=4000.0), [slo], 3.0)
    assert isinstance(decision, Wait)
    # Deadline 13, own prefill 2 s.
    assert decision.expiry == pytest.approx(11.0)
    assert decision.displaced == ()


@pytest.mark.parametrize("rule", [Moore(), PredictedTtft()])
def test_shed_exactly_when_the_prediction_exceeds_target_less_margin(priority_class, request_of, busy, rule) -> None:
    slo = priority_class(target=10.0)
    admission = controller(rule, margin=0.1)
    for backlog, shed in ((7999.0, False), (8001.0, True)):
        decision = admission.decide(request_of(1000, slo=slo), busy(backlog=backlog), [slo], 0.0)
        assert isinstance(decision, Shed) is shed
    assert decision.reason is ShedReason.PREFILL_WAIT
    assert decision.contended


def test_asking_again_changes_nothing_and_answers_the_same(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    admission = controller()
    waiting = [request_of(tokens, arrival=index * 0.01, slo=slo) for index, tokens in enumerate((3000, 900, 800))]
    load = busy(*waiting, backlog=100.0)
    newcomer = request_of(1000, arrival=0.5, slo=slo)
    before = copy.deepcopy((load.waiting, load.replicas[0].backlog))
    result = [admission.decide(newcomer, load, [slo], 0.5) for _ in range(3)]
    assert result[0] == result[1] == result[2]
    assert isinstance(result[0], Wait)
    assert result[0].displaced
    assert (load.waiting, load.replicas[0].backlog) == before
    # One that waits already may be asked for too: it is not counted twice.
    again = admission.decide(waiting[1], load, [slo], 0.5)
    assert isinstance(again, Wait)
    assert again.prediction.prefill_wait == pytest.approx(3.1)


def test_moore_gives_up_the_largest_up_to_the_first_that_would_be_late(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    small, large, middle = (request_of(tokens, arrival=0.1 * i, slo=slo) for i, tokens in enumerate((500, 2500, 1500)))
    newcomer = request_of(800, arrival=0.3, slo=slo)
    decision = controller().decide(newcomer, busy(small, large, middle, backlog=300.0), [slo], 0.3)
    assert isinstance(decision, Wait)
    assert [(one.request_id, one.reason) for one in decision.displaced] == [(large.request_id, ShedReason.OUTRANKED)]
    # The largest may be the newcomer itself.
    decision = controller().decide(
        request_of(3000, arrival=0.3, slo=slo), busy(small, large, middle, backlog=300.0), [slo], 0.3
    )
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.PREFILL_WAIT


def test_who_was_turned_away_before_is_displaced_only_for_much_shorter_ones(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    waiting = [request_of(tokens, arrival=0.0, slo=slo) for tokens in (1500, 500)]
    load = busy(*waiting, backlog=1000.0)  # of 5,000 tokens that can be in time
    came_back = request_of(2500, arrival=0.3, slo=slo, retry=True)
    decision = controller().decide(came_back, load, [slo], 0.3)
    assert isinstance(decision, Wait)
    assert [one.request_id for one in decision.displaced] == [waiting[0].request_id]
    fresh = controller().decide(request_of(2500, arrival=0.3, slo=slo), load, [slo], 0.3)
    assert isinstance(fresh, Shed)
    # Four times as long as the next one, it goes again.
    short = [request_of(tokens, arrival=0.0, slo=slo) for tokens in (600, 600, 600, 600)]
    assert isinstance(controller().decide(came_back, busy(*short, backlog=1000.0), [slo], 0.3), Shed)


def test_nobody_is_displaced_for_one_that_would_be_late_alone(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    waiting = [request_of(1000, arrival=0.0, slo=slo) for _ in range(2)]
    decision = controller().decide(
        request_of(400, arrival=0.0, slo=slo), busy(*waiting, backlog=4700.0, priority=0), [slo], 0.0
    )
    assert isinstance(decision, Shed)
    # And those that wait are given up only when it is reviewed whether they can still make it.
    late = controller().review(busy(*waiting, backlog=4700.0, priority=0), [slo], 0.0)
    assert {one.request_id for one in late} == {one.request_id for one in waiting}


def test_a_high_newcomer_costs_the_lowest_class_first_and_never_its_betters(priority_class, request_of, busy) -> None:
    low, middle, high = priority_class(0, 4.0), priority_class(5, 4.0), priority_class(9, 4.0)
    order = [low, middle, high]
    waiting = [request_of(1000, slo=low), request_of(1200, slo=middle), request_of(600, slo=high)]
    decision = controller().decide(request_of(1000, slo=high, arrival=0.0), busy(*waiting, backlog=1000.0), order, 0.0)
    assert isinstance(decision, Wait)
    assert [one.request_id for one in decision.displaced] == [waiting[0].request_id]
    # A low newcomer that does not fit is shed itself, however large the higher ones are.
    decision = controller().decide(request_of(1000, slo=low), busy(*waiting[1:], backlog=1500.0), order, 0.0)
    assert isinstance(decision, Shed)


def test_where_slots_are_short_the_late_one_goes_since_every_slot_is_alike(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    waiting = [request_of(100, arrival=0.0, slo=slo) for _ in range(4)]
    decision = controller().decide(
        request_of(10, arrival=0.0, slo=slo),
        busy(*waiting, backlog=1.0, free_slots=0, completion_rate=0.95),
        [slo],
        0.0,
    )
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.SLOT_WAIT


def test_where_slots_are_short_a_slower_moment_costs_nobody_who_waits_their_place(
    priority_class, request_of, busy
) -> None:
    slo = priority_class(target=5.0)
    waiting = [request_of(100, arrival=0.0, slo=slo) for _ in range(4)]
    # Fewer answers end at this moment: the last two would be late, the newcomer too.
    load = busy(*waiting, backlog=1.0, free_slots=0, completion_rate=0.5)
    assert controller().review(load, [slo], 0.0) == ()
    newcomer = request_of(10, arrival=0.5, slo=slo)
    decision = controller().decide(newcomer, load, [slo], 0.5)
    assert isinstance(decision, Shed)
    assert decision.request_id == newcomer.request_id
    # Where prefill is short, those that cannot be served in time give way to the others.
    slow = busy(*waiting, backlog=1.0, prefill_rate=50.0)
    assert [one.request_id for one in controller().review(slow, [slo], 0.0)] == [one.request_id for one in waiting[2:]]


def test_while_rates_are_unknown_one_iteration_goes_in_the_rest_waits_and_nobody_is_shed(
    priority_class, request_of, busy
) -> None:
    slo = priority_class(target=1.0)
    unknown = {"prefill_rate": None, "budget": 512}
    decision = controller().decide(request_of(5000, slo=slo), busy(backlog=100.0, **unknown), [slo], 0.0)
    assert isinstance(decision, Admit)
    decision = controller().decide(request_of(5000, slo=slo), busy(backlog=600.0, **unknown), [slo], 0.0)
    assert isinstance(decision, Wait)
    assert decision.prediction.ttft is None
    assert decision.expiry == 1.0, "past its deadline it is late whatever is unknown"


def test_one_wait_that_is_too_long_is_reason_enough_while_the_others_are_unknown(
    priority_class, request_of, busy
) -> None:
    slo = priority_class(target=5.0)
    full = {"prefill_rate": None, "free_slots": 0}
    decision = controller().decide(request_of(100, slo=slo), busy(completion_rate=0.25, **full), [slo], 0.0)
    assert isinstance(decision, Wait)
    waiting = request_of(100, slo=slo)
    decision = controller().decide(request_of(100, slo=slo), busy(waiting, completion_rate=0.25, **full), [slo], 0.0)
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.SLOT_WAIT


def test_a_class_without_a_ttft_objective_waits_as_long_as_it_may(priority_class, request_of, busy) -> None:
    batch = priority_class(0, target=None)
    decision = controller().decide(request_of(1000, slo=batch), busy(backlog=1e6), [batch], 0.0)
    assert isinstance(decision, Wait)
    assert decision.expiry == math.inf


def test_nothing_ready_and_draining_are_not_contention(priority_class, request_of, busy) -> None:
    slo = priority_class()
    empty = controller().decide(request_of(slo=slo), PoolLoad(()), [slo], 0.0)
    leaving = controller().decide(request_of(slo=slo), replace(busy(), draining=True), [slo], 0.0)
    assert isinstance(empty, Shed)
    assert isinstance(leaving, Shed)
    assert (empty.reason, leaving.reason) == (ShedReason.NO_REPLICA, ShedReason.DRAINING)
    assert not empty.contended
    assert not leaving.contended
    assert empty.retry_after >= 1


def test_the_rules_beside_it_do_what_their_names_say(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    large = request_of(3000, arrival=10.0, slo=slo)
    load = busy(backlog=4000.0)
    outcome = {rule: controller(rule).decide(large, load, [slo], 10.0) for rule in RULES.values()}
    assert isinstance(outcome[PredictedTtft()], Shed)
    assert isinstance(outcome[Moore()], Shed)
    assert isinstance(outcome[QueuedTokens()], Wait), "its own prompt does not count"
    assert isinstance(outcome[OpenAdmission()], Wait)
    assert isinstance(controller(OpenAdmission()).decide(large, busy(backlog=1e9), [slo], 10.0), Wait)
    assert isinstance(controller(QueuedTokens()).decide(large, busy(backlog=5001.0), [slo], 10.0), Shed)


def test_littles_law_bounds_how_many_may_wait_by_what_was_admitted(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    admission = controller(LittlesLaw())
    waiting = [request_of(10, arrival=60.0, slo=slo) for _ in range(9)]
    newcomer = request_of(1000, arrival=60.0, slo=slo)
    assert isinstance(admission.decide(newcomer, busy(*waiting), [slo], 60.0), Wait), "an unknown rate binds nobody"
    for step in range(120):
        admission.admitted(newcomer, step * 0.5)  # two a second
    # 2/s · (5 - 1) s: eight may be ahead.
    assert isinstance(admission.decide(newcomer, busy(*waiting[:7]), [slo], 60.0), Wait)
    assert isinstance(admission.decide(newcomer, busy(*waiting), [slo], 60.0), Shed)


def test_without_a_prediction_littles_law_is_what_bounds_the_wait(priority_class, request_of, busy) -> None:
    slo = priority_class(target=5.0)
    admission = controller()
    waiting = [request_of(10, arrival=60.0, slo=slo) for _ in range(11)]
    for step in range(120):
        admission.admitted(waiting[0], step * 0.5)
    newcomer = request_of(10, arrival=60.0, slo=slo)
    assert isinstance(admission.decide(newcomer, busy(*waiting, prefill_rate=None), [slo], 60.0), Shed)
    assert isinstance(admission.decide(newcomer, busy(*waiting[:9], prefill_rate=None), [slo], 60.0), Wait)
    assert isinstance(admission.decide(newcomer, busy(*waiting), [slo], 60.0), Wait), (
        "a prediction that holds is never overruled"
    )


def test_the_margin_is_learned_from_errors_near_the_target_and_leaves_room_to_learn_more(
    priority_class, request_of
) -> None:
    slo = priority_class(target=10.0)
    admission = AdmissionController()
    one = request_of(slo=slo)
    assert admission.margin(one) == 0.0
    for _ in range(50):
        admission.compare(0, predicted=0.5, actual=4.0)  # far from the target: says nothing about it
    assert admission.margin(one) == 0.0
    for late in range(40):
        admission.compare(0, predicted=8.0, actual=8.0 + late / 20)
    assert admission.margin(one) == pytest.approx(1.45, abs=0.06)
    for _ in range(400):
        admission.compare(0, predicted=8.0, actual=100.0)
    assert admission.margin(one) == 5.0
    for _ in range(400):
        admission.compare(0, predicted=8.0, actual=3.0)
    assert admission.margin(one) == 0.0, "being early is no reason for a negative margin"


def test_saturation_is_raised_by_offered_work_before_any_queue_and_sheds_nobody(
    priority_class, request_of, busy
) -> None:
    slo = priority_class(target=10.0)
    admission = controller()
    load = busy(backlog=0.0)
    for step in range(300):
        admission.offered(request_of(90, slo=slo), step * 0.1)  # 900 tokens a second against 1,000
    assert not admission.saturated(load, 30.0)
    for step in range(300, 900):
        admission.offered(request_of(120, slo=slo), step * 0.1)
    assert admission.saturated(load, 90.0)
    assert isinstance(admission.decide(request_of(1000, arrival=90.0, slo=slo), load, [slo], 90.0), Admit)
    calm = controller()
    for step in range(900):
        calm.offered(request_of(90, slo=slo), step * 0.1)
        calm.offered(request_of(90, slo=slo, retry=True), step * 0.1)
    assert not calm.saturated(load, 90.0), "repetitions are no demand"
    assert not admission.saturated(busy(prefill_rate=None), 90.0), "an unknown capacity is not a small one"


def test_lower_classes_are_charged_with_the_rate_of_higher_ones(priority_class, request_of, busy) -> None:
    low, high = priority_class(0, target=5.0), priority_class(9, target=5.0, shares=9)
    admission = controller()
    for step in range(600):
        admission.offered(request_of(80, slo=high), step * 0.1)
    higher = admission.higher_work([low, high], 60.0)
    assert higher[9] == 0
    assert higher[0] == pytest.approx(800, rel=0.05)
    load = busy(request_of(2000, arrival=60.0, slo=high), backlog=500.0)
    one = request_of(1000, arrival=60.0, slo=low)
    assert isinstance(admission.decide(one, load, [low, high], 60.0), Wait)
    assert isinstance(admission.decide(one, replace(load, higher_work=higher), [low, high], 60.0), Shed)
