import dataclasses

import pytest
from headway_core.contract.policy import MAX_REVISION, Knobs
from headway_core.planning.capacity import Targets, Workload, solve
from headway_core.planning.knobs import KnobMemory, plan_knobs
from headway_core.planning.plan import (
    Cordon,
    Decision,
    MarkVictims,
    Memory,
    Scale,
    SetKnobs,
    TouchPods,
    WritePolicy,
    plan,
)
from headway_core.planning.snapshot import ClassTraffic, Demand, Phase, Traffic

WINDOW = 60.0


def changes(decision):
    """What was decided to change in the policy."""
    return [change for action in decision.actions if isinstance(action, WritePolicy) for change in action.changes]


def of_kind(decision, kind):
    return [found for found in (*decision.actions, *changes(decision)) if isinstance(found, kind)]


def condition(decision, kind):
    return next(known for known in decision.conditions if known.type == kind)


@pytest.fixture
def best(make):
    """What one replica of `make` carries."""
    return solve(make.model, Workload.of([make.mix]), Targets(0.05, 2.0), make.limits)


@pytest.fixture
def tuned(make, best):
    """The policy that has the right knobs already."""

    def of(slo, cordoned=()):
        return make.policy(slo, Knobs(best.max_num_seqs, best.prefill_token_budget), cordoned)

    return of


def settled(snapshot, slo, seconds=400, step=5.0):
    """Memory after the same observation for `seconds`, and the last decision."""
    memory, now = Memory(), 0.0
    while True:
        decision = plan(snapshot, slo, memory, now)
        memory = decision.memory
        if now >= seconds:
            return decision
        now += step


class TestKnobs:
    def test_wrong_knobs_are_cured_by_knobs_and_no_pod_moves(self, make, best):
        slo = make.slo()
        decision = plan(make.snapshot(best.rate * 1.5, policy=make.policy(slo)), slo, Memory(), 0.0)
        assert of_kind(decision, SetKnobs) == [
            SetKnobs(Knobs(best.max_num_seqs, best.prefill_token_budget), "KnobsChanged", decision.knob_plan.message)
        ]
        assert "is bound by TPOT: TPOT 50ms is reached with" in decision.knob_plan.message
        assert of_kind(decision, Scale) == []

    def test_nothing_moves_inside_the_dead_band(self, make, best, tuned):
        slo = make.slo()
        drifted = dataclasses.replace(make.model, per_context_token=make.model.per_context_token * 1.02)
        pods = (make.replica("a", step_time=drifted), make.replica("b", step_time=drifted))
        assert plan(make.snapshot(best.rate, replicas=pods, policy=tuned(slo)), slo, Memory(), 0.0).actions == ()

    def test_knobs_move_once_a_window_and_a_new_generation_moves_them_at_once(self, make, tuned):
        slo = make.slo()
        first = plan(make.snapshot(1, policy=make.policy(slo)), slo, Memory(), 0.0)
        written = make.policy(slo, first.knobs)
        longer = dataclasses.replace(make.mix, prompt_tokens=1600.0, context_tokens=1650.0)
        shifted = make.snapshot(1, replicas=(make.replica("a", mix=longer),), policy=written)
        memory, moved = first.memory, []
        for tick in range(1, 40):
            decision = plan(shifted, slo, memory, 5.0 * tick)
            memory = decision.memory
            if decision.knobs != first.knobs:
                moved.append(5.0 * tick)
        assert moved[0] == WINDOW, "not before the window is over, then at once: the median has arrived"
        tighter = make.slo(generation=2, objectives={"ttft": {"target": "2s"}, "tpot": {"target": "30ms"}})
        again = plan(shifted, tighter, first.memory, 5.0)
        assert of_kind(again, SetKnobs)

    def test_a_failed_write_is_asked_for_again_in_the_same_words(self, make):
        slo = make.slo()
        snapshot = make.snapshot(1, policy=make.policy(slo))
        first = plan(snapshot, slo, Memory(), 0.0)
        again = plan(snapshot, slo, first.memory, 5.0)
        assert of_kind(again, SetKnobs)[0].knobs == of_kind(first, SetKnobs)[0].knobs

    def test_raising_goes_no_further_than_twice_what_was_seen(self, make):
        slo = make.slo()
        timid = dataclasses.replace(make.model, max_decode_rows=6, max_prefill_tokens=64)
        pods = (make.replica("a", step_time=timid, effective=Knobs(4, 32)),)
        decision = plan(
            make.snapshot(1, replicas=pods, scale=1, policy=make.policy(slo, Knobs(4, 32))), slo, Memory(), 0.0
        )
        assert decision.knobs.max_num_seqs == 12
        assert condition(decision, "Feasible").reason == "BoundByExperience"

    def test_lowering_needs_no_experience(self, make, best):
        slo = make.slo()
        timid = dataclasses.replace(make.model, max_decode_rows=2, max_prefill_tokens=64)
        pods = (make.replica("a", step_time=timid),)
        decision = plan(make.snapshot(1, replicas=pods, scale=1, policy=make.policy(slo)), slo, Memory(), 0.0)
        assert decision.knobs.max_num_seqs == best.max_num_seqs

    def test_one_odd_replica_has_no_veto(self, make, best):
        slo = make.slo()
        odd = dataclasses.replace(make.model, base=0.049)
        pods = (*make.pods(4), make.replica("odd", step_time=odd))
        decision = plan(make.snapshot(1, replicas=pods, scale=5, policy=make.policy(slo)), slo, Memory(), 0.0)
        assert decision.knobs.max_num_seqs == best.max_num_seqs

    def test_an_unreachable_target_keeps_the_last_settings_and_names_the_limit(self, make, tuned):
        slo = make.slo(objectives={"tpot": {"target": "9ms"}})
        decision = plan(make.snapshot(1, policy=tuned(slo)), slo, Memory(), 0.0)
        assert decision.actions == ()
        feasible = condition(decision, "Feasible")
        assert (feasible.status, feasible.reason) == (False, "TPOTUnreachable")
        assert "TPOT 9ms unreachable: one sequence already takes" in feasible.message

    def test_too_few_finished_requests_say_nothing_about_the_mix(self, make):
        slo = make.slo()
        pods = (make.replica("a", mix=dataclasses.replace(make.mix, requests=19)),)
        decision = plan(make.snapshot(1, replicas=pods, scale=1, policy=make.policy(slo)), slo, Memory(), 0.0)
        assert decision.actions == ()
        assert condition(decision, "Feasible").status is None

    def test_the_same_planner_serves_one_machine_without_a_cluster(self, make, best):
        slo = make.slo()
        first = plan_knobs(make.pods(2), slo, Knobs(), memory=KnobMemory(), now=0.0)
        assert (first.memory.moved_at, first.knobs) == (0.0, Knobs(best.max_num_seqs, best.prefill_token_budget))
        second = plan_knobs(make.pods(2), slo, first.knobs, memory=first.memory, now=5.0)
        assert (second.memory.moved_at, second.knobs) == (0.0, first.knobs)

    def test_recommend_settles_on_what_it_recommended_and_locks_nothing(self, make, best):
        slo = make.slo(mode="Recommend")
        memory, seen = Memory(), []
        for tick in range(30):
            known = Knobs(best.max_num_seqs, best.prefill_token_budget) if tick else None
            decision = plan(
                make.snapshot(best.rate * 5.5, policy=make.policy(slo), recommended=known), slo, memory, 5.0 * tick
            )
            memory = decision.memory
            seen.append((decision.knobs, decision.replicas))
        assert set(seen[1:]) == {(Knobs(best.max_num_seqs, best.prefill_token_budget), 6)}


UNKNOWN = {
    "no replica answers": ({"age": None}, {}, "NoMetrics"),
    "reports are stale": ({"age": 16.0}, {}, "StaleMetrics"),
    "no pod is ready": ({"phase": Phase.STARTING}, {}, "NoReadyReplicas"),
    "no gateway pod": ({}, {"gateways": 0, "gateways_reporting": 0, "traffic": None}, "NoGatewayPods"),
    "no gateway answers": ({}, {"gateways_reporting": 0, "traffic": None}, "NoGatewayMetrics"),
    "first reading": ({}, {"traffic": None}, "FirstReading"),
}


class TestUnknownIsNotZero:
    @pytest.mark.parametrize(("pod", "rest", "reason"), UNKNOWN.values(), ids=UNKNOWN)
    def test_replicas_freeze_and_the_state_has_its_own_reason(self, make, tuned, pod, rest, reason):
        slo = make.slo()
        pods = tuple(make.replica(f"pod-{index}", **pod) for index in range(3))
        decision = settled(make.snapshot(0, 3, replicas=pods, policy=tuned(slo), **rest), slo)
        assert (decision.actions, decision.replicas) == ((), 3)
        assert condition(decision, "MetricsAvailable").reason == reason
        assert condition(decision, "MetricsAvailable").status is not True

    def test_no_traffic_is_known_and_lets_go(self, make, tuned):
        slo = make.slo()
        decision = settled(make.snapshot(0, 3, policy=tuned(slo)), slo)
        assert condition(decision, "MetricsAvailable").reason == "NoTraffic"
        assert decision.replicas == 1
        assert condition(decision, "SLOMet").reason == "NoTraffic"

    def test_half_of_the_replicas_may_vote_fewer_may_not(self, make, best, tuned):
        slo = make.slo()
        half = (make.replica("a"), make.replica("b", age=99.0))
        decision = plan(make.snapshot(best.rate * 3.5, replicas=half, policy=tuned(slo)), slo, Memory(), 0.0)
        assert decision.replicas == 4
        assert "1 of 2 serving replicas report" in condition(decision, "MetricsAvailable").message
        third = (*half, make.replica("c", age=99.0))
        decision = plan(make.snapshot(best.rate * 3.5, 3, replicas=third, policy=tuned(slo)), slo, Memory(), 0.0)
        assert decision.actions == ()
        assert condition(decision, "MetricsAvailable").reason == "PartialMetrics"

    def test_one_silent_gateway_allows_up_and_forbids_down(self, make, best, tuned):
        slo = make.slo()
        rest = {"gateways": 2, "gateways_reporting": 1, "policy": tuned(slo)}
        assert settled(make.snapshot(best.rate * 3.5, 2, **rest), slo).replicas == 4
        assert settled(make.snapshot(best.rate * 0.5, 4, **rest), slo).replicas == 4


class TestReplicas:
    @pytest.mark.parametrize("pods", [0.3, 1.5, 2.5, 3.5, 7.5, 12.4])
    def test_replicas_are_demand_over_what_one_carries(self, make, best, tuned, pods):
        slo = make.slo()
        decision = plan(make.snapshot(best.rate * pods, 1, policy=tuned(slo)), slo, Memory(), 0.0)
        assert decision.replicas == max(1, int(pods) + 1)

    def test_pods_that_start_or_fail_neither_count_nor_block(self, make, best, tuned):
        """Four asked for: two serve, one cannot be scheduled, one crashes; the load needs four: nothing is added on
        top."""
        slo = make.slo()
        pods = (
            *make.pods(2),
            make.replica("new", Phase.STARTING, None),
            make.replica("bad", Phase.FAILED, None, "CrashLoopBackOff"),
        )
        decision = plan(make.snapshot(best.rate * 3.5, 4, replicas=pods, policy=tuned(slo)), slo, Memory(), 0.0)
        assert (decision.replicas, decision.actions) == (4, ())
        assert "(1 starting, 1 failing: CrashLoopBackOff)" in condition(decision, "MetricsAvailable").message

    def test_a_step_is_seen_in_the_last_quarter_before_the_window_shows_it(self, make, best, tuned):
        slo = make.slo()
        traffic = Traffic(60.0, {}, make.demand(best.rate * 1.1), make.demand(best.rate * 4, 15.0))
        assert 3 <= plan(make.snapshot(0, 2, traffic=traffic, policy=tuned(slo)), slo, Memory(), 0.0).replicas <= 4

    def test_a_handful_of_requests_is_no_step(self, make, best, tuned):
        slo = make.slo()
        chance = Traffic(60.0, {}, make.demand(best.rate * 1.9), Demand(round(best.rate * 15 * 2.2), 15.0))
        assert plan(make.snapshot(0, 2, traffic=chance, policy=tuned(slo)), slo, Memory(), 0.0).replicas == 2

    def test_at_the_maximum_it_says_what_the_load_needs(self, make, best, tuned):
        slo = make.slo(bounds={"replicas": {"min": 1, "max": 3}})
        decision = plan(make.snapshot(best.rate * 6.5, 3, policy=tuned(slo)), slo, Memory(), 0.0)
        assert decision.replicas == 3
        assert condition(decision, "WithinBounds").reason == "AtMax"
        assert "needs 7 replicas and spec.bounds.replicas.max is 3" in condition(decision, "WithinBounds").message

    def test_fewer_than_the_minimum_is_cured_even_when_nothing_is_known(self, make, tuned):
        slo = make.slo(bounds={"replicas": {"min": 2, "max": 3}})
        decision = plan(make.snapshot(0, 0, replicas=(), policy=tuned(slo)), slo, Memory(), 0.0)
        assert of_kind(decision, Scale)[0].replicas == 2

    @pytest.mark.parametrize("rest", [{"step_time": None}, {"age": None}], ids=["capacity", "demand"])
    def test_more_than_a_lowered_maximum_is_cured_even_when_the_load_is_not_known(self, make, rest):
        slo = make.slo(bounds={"replicas": {"min": 1, "max": 2}})
        replicas = tuple(make.replica(f"pod-{index}", **rest) for index in range(3))
        decision = plan(make.snapshot(1.0, 3, replicas=replicas), slo, Memory(), 0.0)
        (cordon,) = of_kind(decision, Cordon)
        assert len(cordon.replicas) == 1 and "3 replicas are more than spec.bounds.replicas.max 2" in cordon.message
        policy = make.policy(slo, cordoned=cordon.replicas)
        rolling = plan(make.snapshot(1.0, 3, replicas=replicas, rolling=True, policy=policy), slo, Memory(), 0.0)
        assert of_kind(rolling, Scale) == []

    def test_without_bounds_and_under_a_foreign_autoscaler_replicas_are_left_alone(self, make, best, tuned):
        free = make.slo(bounds={})
        decision = plan(make.snapshot(best.rate * 6.5, policy=tuned(free)), free, Memory(), 0.0)
        assert (of_kind(decision, Scale), condition(decision, "ScalingActive").reason) == ([], "NoReplicaBounds")
        slo = make.slo()
        decision = plan(
            make.snapshot(best.rate * 6.5, foreign_autoscaler="HorizontalPodAutoscaler chat"), slo, Memory(), 0.0
        )
        assert (of_kind(decision, Scale), condition(decision, "ScalingActive").reason) == ([], "ForeignAutoscaler")
        assert of_kind(decision, SetKnobs), "knobs are still managed"
        decision = plan(make.snapshot(best.rate * 6.5, scale=None), slo, Memory(), 0.0)
        assert (of_kind(decision, Scale), condition(decision, "ScalingActive").reason) == ([], "ScaleUnknown")

    def test_saturation_takes_the_dead_band_away_and_forbids_down(self, make, best, tuned):
        slo = make.slo()
        calm = make.snapshot(best.rate * 2.03, 2, policy=tuned(slo))
        assert plan(calm, slo, Memory(), 0.0).replicas == 2
        assert plan(dataclasses.replace(calm, saturated=True), slo, Memory(), 0.0).replicas == 3
        idle = make.snapshot(best.rate * 0.5, 3, policy=tuned(slo), saturated=True)
        assert settled(idle, slo).replicas == 3

    def test_replicas_wait_a_window_after_knobs_and_knobs_after_replicas(self, make, best, tuned):
        slo = make.slo()
        wrong = make.snapshot(best.rate * 3.5, 2, policy=make.policy(slo))
        first = plan(wrong, slo, Memory(), 0.0)
        assert (len(of_kind(first, SetKnobs)), of_kind(first, Scale)) == (1, [])
        right = dataclasses.replace(wrong, policy=tuned(slo))
        memory, scaled = first.memory, None
        for tick in range(1, 30):
            decision = plan(right, slo, memory, 5.0 * tick)
            memory = decision.memory
            if scaled is None and of_kind(decision, Scale):
                scaled = 5.0 * tick
        assert scaled == WINDOW
        longer = dataclasses.replace(make.mix, prompt_tokens=1600.0, context_tokens=1650.0)
        moved = plan(dataclasses.replace(right, policy=tuned(slo)), slo, Memory(), 0.0)
        assert of_kind(moved, Scale)
        shifted = dataclasses.replace(right, replicas=(make.replica("a", mix=longer),), scale=4)
        assert of_kind(plan(shifted, slo, moved.memory, 30.0), SetKnobs) == []

    def test_replicas_that_are_refused_for_ever_do_not_starve_the_knobs(self, make, best, tuned):
        """Nobody carries the scale out, and the mix keeps shifting: knobs still move."""
        slo = make.slo()
        memory, moves, current = Memory(), 0, tuned(slo)
        for tick in range(240):
            longer = dataclasses.replace(make.mix, prompt_tokens=400.0 + 10 * tick)
            snapshot = make.snapshot(
                best.rate * 9.5,
                2,
                replicas=(make.replica("a", mix=longer), make.replica("b", mix=longer)),
                policy=current,
            )
            decision = plan(snapshot, slo, memory, 5.0 * tick)
            memory = decision.memory
            for action in of_kind(decision, SetKnobs):
                moves += 1
                current = make.policy(slo, action.knobs)
        assert moves >= 5


class TestScaleDown:
    def test_never_before_a_full_window_was_known(self, make, best, tuned):
        slo = make.slo(behavior={"scaleDown": {"stabilizationWindow": "0s"}})
        snapshot = make.snapshot(best.rate * 0.5, 3, policy=tuned(slo))
        memory, first = Memory(), None
        for tick in range(40):
            decision = plan(snapshot, slo, memory, 5.0 * tick)
            memory = decision.memory
            if first is None and decision.actions:
                first = 5.0 * tick
        assert first == WINDOW

    def test_a_gap_in_what_is_known_starts_the_window_again(self, make, best, tuned):
        slo = make.slo()
        snapshot = make.snapshot(best.rate * 0.5, 3, policy=tuned(slo))
        memory = settled(snapshot, slo, seconds=295).memory
        silent = dataclasses.replace(snapshot, traffic=None, gateways_reporting=0)
        memory = plan(silent, slo, memory, 300.0).memory
        assert plan(snapshot, slo, memory, 400.0).actions == ()

    def test_cordon_then_idle_then_cost_and_scale_emptiest_first(self, make, best, tuned):
        slo = make.slo()
        busy, idle = make.replica("busy", running=5), make.replica("idle")
        pods = (busy, make.replica("middling", running=2), idle)
        snapshot = make.snapshot(
            best.rate * 1.5, replicas=pods, scale=3, policy=tuned(slo), in_flight={"middling": 2, "busy": 5}
        )
        decision = settled(snapshot, slo)
        (write,) = decision.actions
        (cordon,) = write.changes
        assert isinstance(cordon, Cordon)
        assert write.policy.cordoned == cordon.replicas
        assert cordon.replicas == ("idle",)
        after = dataclasses.replace(snapshot, policy=tuned(slo, cordon.replicas))
        (scale,) = plan(after, slo, decision.memory, 405.0).actions
        assert (scale.replicas, scale.victims, scale.reason) == (2, ("idle",), "ScaledDown")

    def test_a_busy_victim_is_waited_for_until_the_budget_is_spent(self, make, best, tuned):
        slo = make.slo()
        pods = (make.replica("a", running=3), make.replica("b", running=2))
        snapshot = make.snapshot(best.rate * 0.5, replicas=pods, policy=tuned(slo, ["b"]), in_flight={"a": 3, "b": 2})
        memory = settled(make.snapshot(best.rate * 0.5, policy=tuned(slo)), slo).memory
        steps = []
        for tick in range(81, 120):
            decision = plan(snapshot, slo, memory, 5.0 * tick, drain_budget=60.0)
            memory = decision.memory
            steps.append(bool(of_kind(decision, Scale)))
        assert steps.index(True) == 12

    @pytest.mark.parametrize("doubt", ["stale report", "a gateway has not obeyed"])
    def test_idle_is_only_what_everybody_confirms(self, make, best, tuned, doubt):
        slo = make.slo()
        pods = (make.replica("a", running=3), make.replica("b", age=20.0 if doubt == "stale report" else 1.0))
        flight = {"a": 3} if doubt == "stale report" else None
        snapshot = make.snapshot(best.rate * 0.5, replicas=pods, policy=tuned(slo, ["b"]), in_flight=flight)
        memory = settled(make.snapshot(best.rate * 0.5, policy=tuned(slo)), slo).memory
        assert of_kind(plan(snapshot, slo, memory, 405.0), Scale) == []

    def test_load_that_comes_back_lifts_the_cordon(self, make, best, tuned):
        slo = make.slo()
        memory = settled(make.snapshot(best.rate * 0.5, policy=tuned(slo)), slo).memory
        decision = plan(make.snapshot(best.rate * 1.8, policy=tuned(slo, ["pod-1"])), slo, memory, 405.0)
        (write,) = decision.actions
        assert (write.policy.cordoned, write.changes) == ((), (Cordon((), "Uncordoned", write.changes[0].message),))

    def test_unready_pods_go_first_and_need_no_cordon(self, make, best, tuned):
        slo = make.slo()
        pods = (*make.pods(2), make.replica("bad", Phase.FAILED, None))
        (scale,) = settled(make.snapshot(best.rate * 1.5, replicas=pods, scale=3, policy=tuned(slo)), slo).actions
        assert (scale.replicas, scale.victims) == (2, ("bad",))

    def test_between_the_smaller_scale_and_the_end_of_the_pods_the_cordon_stays(self, make, best, tuned):
        slo = make.slo()
        snapshot = make.snapshot(best.rate * 1.5, replicas=make.pods(3), scale=2, policy=tuned(slo, ["pod-2"]))
        assert plan(snapshot, slo, Memory(), 0.0).actions == (), "asked already, the controller is slow"
        leaving = (*make.pods(2), make.replica("pod-2", Phase.LEAVING))
        assert plan(dataclasses.replace(snapshot, replicas=leaving), slo, Memory(), 5.0).actions == ()
        (gone,) = plan(dataclasses.replace(snapshot, replicas=make.pods(2)), slo, Memory(), 10.0).actions
        assert (gone.policy.cordoned, [change.replicas for change in gone.changes]) == ((), [()])

    def test_a_rollout_is_neither_cordoned_nor_shrunk(self, make, best, tuned):
        slo = make.slo()
        surge = make.snapshot(best.rate * 0.5, replicas=make.pods(4), scale=3, policy=tuned(slo), rolling=True)
        assert settled(surge, slo).actions == ()

    def test_a_restart_in_the_middle_finds_its_way(self, make, best, tuned):
        """A new operator sees a cordoned pod: it neither cordons another nor lets go of more than the load allows."""
        slo = make.slo()
        snapshot = make.snapshot(best.rate * 0.5, replicas=make.pods(2), policy=tuned(slo, ["pod-0"]), in_flight={})
        memory, scaled = Memory(), []
        for tick in range(100):
            decision = plan(snapshot, slo, memory, 5.0 * tick)
            memory = decision.memory
            scaled += of_kind(decision, Scale)
            for action in of_kind(decision, Cordon):
                snapshot = dataclasses.replace(snapshot, policy=tuned(slo, action.replicas))
            if scaled:
                break
        assert [(action.replicas, len(action.victims)) for action in scaled] == [(1, 1)]
        assert 5.0 * tick >= 300.0

    def test_metrics_lost_in_the_middle_freeze_it_where_it_is(self, make, best, tuned):
        slo = make.slo()
        memory = settled(make.snapshot(best.rate * 0.5, policy=tuned(slo)), slo).memory
        silent = make.snapshot(0, policy=tuned(slo, ["pod-1"]), traffic=None, gateways_reporting=0)
        assert plan(silent, slo, memory, 405.0).actions == ()


class TestActions:
    """What is written is compared with what is wanted, and mode, pause and rights say what of it is done."""

    def settled_snapshot(self, make, best, tuned, slo, **changes):
        return make.snapshot(best.rate, policy=tuned(slo), **changes)

    def test_a_first_policy_is_written_in_every_mode_and_sets_no_knob_unless_enforced(self, make, best):
        for mode, decided in [("Observe", False), ("Recommend", False), ("Enforce", True)]:
            slo = make.slo(mode=mode)
            (write,) = (
                action
                for action in plan(make.snapshot(best.rate), slo, Memory(), 0.0).actions
                if isinstance(action, WritePolicy)
            )
            assert (write.policy.knobs != Knobs(), bool(write.changes)) == (decided, decided)
            assert (write.policy.classes, write.policy.slo_uid, write.policy.revision) == (slo.classes, "u-1", 1)

    @pytest.mark.parametrize("edit", [{"window": 7.0}, {"slo_uid": "other"}, {"min_samples": 1}])
    def test_an_edit_of_what_was_decided_nowhere_is_undone_without_a_word(self, make, best, tuned, edit):
        slo = make.slo()
        edited = dataclasses.replace(tuned(slo), revision=5, **edit)
        (write,) = plan(make.snapshot(best.rate, policy=edited), slo, Memory(), 0.0).actions
        assert (write.policy, write.changes) == (dataclasses.replace(tuned(slo), revision=6), ())

    def test_another_generation_alone_is_not_written(self, make, best, tuned):
        slo = make.slo(generation=2)
        known = dataclasses.replace(tuned(slo), generation=1)
        assert plan(make.snapshot(best.rate, policy=known), slo, Memory(), 0.0).actions == ()

    def test_a_revision_that_pods_would_not_read_is_raised_above_theirs(self, make, best, tuned):
        slo = make.slo()
        (write,) = plan(make.snapshot(best.rate, policy=tuned(slo), highest_revision=9), slo, Memory(), 0.0).actions
        assert write.policy == dataclasses.replace(tuned(slo), revision=10)

    def test_the_highest_revision_of_all_ends_nothing(self, make, best, tuned):
        slo = make.slo()
        last = dataclasses.replace(tuned(slo), revision=MAX_REVISION)
        edited = dataclasses.replace(last, min_samples=1)
        (write,) = plan(
            make.snapshot(best.rate, policy=edited, highest_revision=MAX_REVISION), slo, Memory(), 0
        ).actions
        assert write.policy == last
        assert (
            plan(make.snapshot(best.rate, policy=last, highest_revision=MAX_REVISION + 1), slo, Memory(), 0).actions
            == ()
        )

    def test_pods_that_have_not_read_it_are_touched(self, make, best, tuned):
        slo = make.slo()
        snapshot = self.settled_snapshot(make, best, tuned, slo, unaware=("pod-1", "gateway-0"))
        assert plan(snapshot, slo, Memory(), 0.0).actions == (TouchPods(("pod-1", "gateway-0")),)

    def test_a_mark_goes_unless_somebody_is_cordoned_or_it_leaves(self, make, best, tuned):
        slo = make.slo()
        marked = tuple(dataclasses.replace(known, marked=True) for known in make.pods(2))
        snapshot = self.settled_snapshot(make, best, tuned, slo, replicas=marked)
        assert plan(snapshot, slo, Memory(), 0.0).actions == (MarkVictims(()),)
        leaving = tuple(dataclasses.replace(known, phase=Phase.LEAVING) for known in marked)
        assert plan(dataclasses.replace(snapshot, replicas=leaving), slo, Memory(), 0.0).actions == ()

    @pytest.mark.parametrize("why", ["Paused", "NotEnforced", "Forbidden", "unreadable"])
    def test_what_keeps_replicas_from_being_scaled_is_told_and_kept_out_of_the_actions(self, make, best, tuned, why):
        slo = make.slo(**{"mode": "Recommend"} if why == "NotEnforced" else {})
        if why == "Paused":
            slo = dataclasses.replace(slo, annotations={"headway.dev/paused": "true"})
        snapshot = make.snapshot(
            best.rate * 6.5,
            policy=tuned(slo),
            missing_scaling_rights=("patch deployments/scale.apps",) if why == "Forbidden" else (),
            policy_readable=why != "unreadable",
        )
        decision = plan(snapshot, slo, Memory(), 0.0)
        assert of_kind(decision, Scale) == []
        assert decision.replicas == 7, "what is wanted is known all the same"
        active = condition(decision, "ScalingActive")
        assert active.reason == ("Scaling" if why == "unreadable" else why)

    def test_nothing_is_written_while_paused_or_while_the_policy_cannot_be_read(self, make, best):
        slo = make.slo()
        paused = dataclasses.replace(slo, annotations={"headway.dev/paused": "true"})
        snapshot = make.snapshot(best.rate * 6.5, unaware=("pod-0",))
        assert plan(snapshot, paused, Memory(), 0.0).actions == ()
        assert plan(dataclasses.replace(snapshot, policy_readable=False), slo, Memory(), 0.0).actions == ()

    def test_a_recommendation_is_told_once(self, make, best, tuned):
        slo = make.slo(mode="Recommend")
        snapshot = make.snapshot(best.rate * 5.5, policy=make.policy(slo))
        first = plan(snapshot, slo, Memory(), 0.0)
        assert [action.reason for action in of_kind(first, Decision)] == ["KnobsRecommended", "ReplicasRecommended"]
        told = dataclasses.replace(snapshot, recommended=first.knobs, recommended_replicas=first.replicas)
        assert plan(told, slo, first.memory, 5.0).actions == ()


class TestPromise:
    def class_traffic(self, attained, judged=100, objective="tpot"):
        return ClassTraffic(
            "default", judged, 0, {"ok": judged}, 0, {objective: attained, "all": attained}, {objective: judged}
        )

    @pytest.mark.parametrize(
        ("attained", "judged", "status", "reason"),
        [(99, 100, True, "Kept"), (94, 100, False, "Missed"), (5, 19, None, "TooFewSamples")],
    )
    def test_met_missed_and_too_few(self, make, attained, judged, status, reason):
        slo = make.slo()
        traffic = Traffic(60.0, {"default": self.class_traffic(attained, judged)}, make.demand(1), make.demand(1, 15.0))
        found = condition(plan(make.snapshot(1, traffic=traffic), slo, Memory(), 0.0), "SLOMet")
        assert (found.status, found.reason) == (status, reason)
        if status is False:
            assert found.message == "class default: 94% of 100 requests kept TPOT, 95% are promised"

    def test_answers_that_do_not_stream_are_not_taken_for_samples(self, make):
        """Fifty requests arrived and not one has a first token: the words say what was judged, and what is missing."""
        slo = make.slo()
        counted = self.class_traffic(50, 50, "all")
        traffic = Traffic(60.0, {"default": counted}, make.demand(1), make.demand(1, 15.0))
        found = condition(plan(make.snapshot(1, traffic=traffic), slo, Memory(), 0.0), "SLOMet")
        assert (found.status, found.reason) == (None, "TooFewSamples")
        assert "50 requests arrived in the window of 60s" in found.message
        assert "0 of class default by TTFT, 0 of class default by TPOT; 20 of one kind are needed" in found.message

    def test_traffic_on_the_edge_of_enough_samples_does_not_come_and_go(self, make):
        slo = make.slo()
        memory, seen = Memory(), []
        for judged in (21, 19, 12, 21, 9, 19):
            traffic = Traffic(
                60.0, {"default": self.class_traffic(judged, judged)}, make.demand(1), make.demand(1, 15.0)
            )
            decision = plan(make.snapshot(1, traffic=traffic), slo, memory, 0.0)
            memory = decision.memory
            seen.append(condition(decision, "SLOMet").reason)
        assert seen == ["Kept", "Kept", "Kept", "Kept", "TooFewSamples", "TooFewSamples"]

    def test_attainment_counts_shed_and_failed_but_not_what_clients_did(self):
        outcomes = {"ok": 80, "shed": 15, "upstream_error": 5, "client_error": 50, "client_closed": 50}
        assert ClassTraffic("x", outcomes=outcomes, attained={"all": 76}).attainment == 0.76
        assert ClassTraffic("x").attainment is None


def test_asking_twice_gives_the_same_answer(make, best):
    slo = make.slo()
    snapshot = make.snapshot(best.rate * 3.5)
    assert plan(snapshot, slo, Memory(), 0.0) == plan(snapshot, slo, Memory(), 0.0)
