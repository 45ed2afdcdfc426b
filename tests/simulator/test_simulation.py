"""The real admission before real schedulers, under a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from headway_core.admission import RULES, AdmissionRule
from headway_core.admission.rules import Moore, OpenAdmission, PredictedTtft, QueuedTokens
from headway_core.errors import InvalidInput
from headway_core.slo import Objectives, PriorityClass, TpotObjective, TtftObjective
from headway_sim.report import SimulationReport
from headway_sim.scenarios import UNBOUNDED, CycleFigures, alternating, capacity, output_bound
from headway_sim.simulated_replica import ACCELERATOR, ReplicaConfig
from headway_sim.simulation import SimulationConfig, simulate
from headway_sim.synthetic import synthetic
from headway_sim.traces import TraceRequest, at_rate

# About 9,800 prefill tokens a second: 9 requests of the kind below.
REPLICA = ReplicaConfig(
    max_num_seqs=96,
    prefill_token_budget=512,
    step_time=replace(ACCELERATOR, per_row_above=9e-5, knee=96),
    num_blocks=8192,
)
CLASS = PriorityClass("default", 0, Objectives(TtftObjective(2.0)))


def short_answers(count: int, seed: int) -> list[TraceRequest]:
    """Prompts as in conversations, answers an eighth: prefill is what is short, and the simulation is quick."""
    return [
        replace(one, prompt_tokens=min(one.prompt_tokens, 4000), output_tokens=max(1, one.output_tokens // 8))
        for one in synthetic("conv", count, seed)
    ]


def test_an_overload_that_comes_and_goes() -> None:
    # Long prompts meet the queue of the overload here: without `RETURN_WEIGHT` 76% of the repetitions are kept.
    lengths = short_answers(2400, seed=9)
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA, retries=2, seed=9)
    tokens = capacity(lengths, config)
    rate = tokens * len(lengths) / sum(one.prompt_tokens for one in lengths)
    trace = alternating(lengths, (2 * rate, 0.5 * rate), period=10.0, cycles=10, seed=9)
    closed = CycleFigures.of(simulate(trace, config), 10.0, 10, tokens)
    opened = CycleFigures.of(
        simulate(trace, replace(config, rule=OpenAdmission(), queue=UNBOUNDED, retries=0)), 10.0, 10, tokens
    )
    assert closed.admitted_kept >= 0.95
    assert closed.work >= 0.9
    assert opened.admitted_kept < 0.5
    assert closed.returns_after >= 30
    assert closed.returns_kept is not None
    assert closed.returns_kept >= 0.9


def test_the_rules_rank_before_replicas_as_they_do_before_one_server() -> None:
    lengths = short_answers(600, seed=2)
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA, replicas=2, seed=2, queue=UNBOUNDED)
    rate = capacity(lengths * 2, config) * len(lengths) / sum(one.prompt_tokens for one in lengths)
    trace = at_rate(lengths, 1.5 * rate)
    reports = {rule: SimulationReport.of(simulate(trace, replace(config, rule=rule))) for rule in RULES.values()}
    kept = {rule: report.total.ttft_attainment or 0.0 for rule, report in reports.items()}
    assert kept[Moore()] > kept[PredictedTtft()] > kept[QueuedTokens()] > kept[OpenAdmission()]
    moore = reports[Moore()]
    assert moore.total.slo_met is not None
    assert moore.total.slo_met >= 0.97
    # Everything that is promised is reported: quartiles, classes, signed errors of both kinds.
    assert sum(one.offered for one in moore.quartiles) == moore.total.offered == len(trace)
    assert sum(moore.total.shed.values()) + moore.total.admitted == len(trace)
    assert (moore.quartiles[0].ttft_attainment or 0) > (moore.quartiles[3].ttft_attainment or 1)
    assert set(moore.classes) == {"default"}
    assert moore.error_admitted.compared > 200
    assert moore.error_shed.compared > 10
    assert abs(moore.error_admitted.median or 9) < 0.2
    assert json.loads(json.dumps(moore.as_dict()))["total"]["offered"] == len(trace)


def test_what_replicas_get_through_does_not_depend_on_how_long_the_trace_is() -> None:
    lengths = [TraceRequest(at, 1000, 10) for at in range(400)]
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA)
    tokens = capacity(lengths, config)
    assert capacity(lengths[:5], config) == pytest.approx(tokens, rel=0.02), "repeated until there is too much of it"
    assert capacity(lengths, replace(config, replicas=2)) == pytest.approx(2 * tokens, rel=0.05)


def test_a_trace_that_fits_no_replica_has_no_capacity_and_says_so() -> None:
    config = SimulationConfig(classes=(CLASS,), replica=replace(REPLICA, num_blocks=8))
    with pytest.raises(InvalidInput, match="fits into a replica's KV pool"):
        capacity([TraceRequest(0.0, 1000, 10), TraceRequest(1.0, 2000, 10)], config)


def test_progress_rises_to_the_whole() -> None:
    shares: list[float] = []
    simulate(
        at_rate(short_answers(40, seed=1), 10.0), SimulationConfig(classes=(CLASS,), replica=REPLICA), shares.append
    )
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (40, 1.0)


def test_tpot_is_judged_where_it_is_promised_and_there_is_a_pace() -> None:
    trace = [TraceRequest(0.0, 100, 1), TraceRequest(0.1, 100, 20), TraceRequest(0.2, 100, 20)]
    promised = PriorityClass("default", 0, Objectives(TtftObjective(2.0), TpotObjective(0.05)))
    run = simulate(trace, SimulationConfig(classes=(promised,), replica=REPLICA))
    assert [one.tpot_kept for one in run.attempts] == [None, True, True]
    figures = SimulationReport.of(run).total
    assert figures.tpot_attainment == 1.0
    assert figures.tpot_p50 is not None
    assert figures.tpot_p99 is not None
    assert 0 < figures.tpot_p50 <= figures.tpot_p99 < 0.05
    strict = SimulationConfig(
        classes=(PriorityClass("default", 0, Objectives(TtftObjective(2.0), TpotObjective(0.001))),), replica=REPLICA
    )
    assert SimulationReport.of(simulate(trace, strict)).total.tpot_attainment == 0.0
    unpromised = SimulationConfig(classes=(CLASS,), replica=REPLICA)
    assert SimulationReport.of(simulate(trace, unpromised)).total.tpot_attainment is None


def test_the_same_run_twice_is_the_same_run() -> None:
    trace = at_rate(short_answers(150, seed=3), 12.0)
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA, seed=5, size_error=0.2)
    assert SimulationReport.of(simulate(trace, config)) == SimulationReport.of(simulate(trace, config))


def test_where_answers_are_long_the_wait_is_for_slots_and_newcomers_learn_it_at_once() -> None:
    # 16 slots, 200 tokens at 26 ms each: 3.1 a second get through of the 4 that come.
    replica = ReplicaConfig(max_num_seqs=16, step_time=replace(ACCELERATOR, base=0.025))
    trace = output_bound(400, rate=4.0, prompt=300, mean_output=200, seed=4)
    config = SimulationConfig(classes=(CLASS,), replica=replica, queue=UNBOUNDED)

    def told_after(rule: AdmissionRule) -> tuple[float, float]:
        attempts = simulate(trace, replace(config, rule=rule)).attempts
        shed = [one.shed_at - one.arrival for one in attempts if one.shed_at is not None]
        return sum(shed) / max(1, len(shed)), sum(one.ttft_kept for one in attempts) / len(attempts)

    slots, kept = told_after(Moore())
    prefill_only, _ = told_after(QueuedTokens())
    _, opened = told_after(OpenAdmission())
    _, predicted = told_after(PredictedTtft())
    assert kept > 0.6
    assert kept >= predicted - 0.005
    assert opened < 0.3
    assert slots < 1.0
    assert prefill_only > 1.8 * slots, "a rule that knows prefill alone lets them wait in vain to the end"


def test_when_replicas_become_half_as_fast_those_admitted_keep_their_promise() -> None:
    lengths = short_answers(700, seed=6)
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA)
    rate = capacity(lengths * 2, config) * len(lengths) / sum(one.prompt_tokens for one in lengths)
    trace = at_rate(lengths, 0.7 * rate)
    middle = trace[-1].at / 2
    slowed = SimulationReport.of(simulate(trace, replace(config, slowdowns=((middle, 2.0),))))
    opened = SimulationReport.of(
        simulate(trace, replace(config, slowdowns=((middle, 2.0),), rule=OpenAdmission(), queue=UNBOUNDED))
    )
    assert slowed.total.slo_met is not None
    assert slowed.total.slo_met > 0.95
    assert (slowed.total.ttft_attainment or 0) > 0.75
    assert (opened.total.slo_met or 0) < 0.8


def test_higher_classes_are_served_first_and_lower_ones_do_not_starve() -> None:
    high = PriorityClass("interactive", 10, Objectives(TtftObjective(2.0)), shares=9)
    low = PriorityClass("batch", 0, Objectives(tpot=TpotObjective(1.0)), shares=1, max_queue_time=600.0)
    lengths = short_answers(700, seed=7)
    config = SimulationConfig(classes=(high, low), mix=(0.85, 0.15), replica=REPLICA, seed=7, drain=0.0)
    rate = capacity(lengths * 2, config) * len(lengths) / sum(one.prompt_tokens for one in lengths)
    run = simulate(at_rate(lengths, 1.6 * rate), config)
    interactive = [one for one in run.attempts if one.priority_class is high]
    batch = [one for one in run.attempts if one.priority_class is low]
    assert sum(one.ttft_kept for one in interactive) / len(interactive) > 0.6
    served = [one for one in batch if one.first_token_at is not None]
    assert len(served) >= 10
    tokens = {
        which.name: sum(o.request.prompt_tokens for o in run.attempts if o.priority_class is which and o.first_token_at)
        for which in (high, low)
    }
    assert tokens["batch"] >= 0.05 * sum(tokens.values()), (
        "about its share, although interactive work alone would fill the pool"
    )
    # In order of arrival within the class.
    starts = [one.dispatched_at for one in batch if one.dispatched_at is not None]
    assert starts == sorted(starts)


def test_a_replica_that_comes_up_in_a_flood_is_not_trampled() -> None:
    lengths = short_answers(500, seed=8)
    config = SimulationConfig(classes=(CLASS,), replica=REPLICA, starts=(10.0,), seed=8)
    run = simulate(at_rate(lengths, 18.0), config)
    newcomer = [one for one in run.attempts if one.replica_id == "replica-1"]
    first_second = [one for one in newcomer if one.dispatched_at is not None and one.dispatched_at < 11.0]
    assert 0 < sum(one.request.prompt_tokens for one in first_second) < 2 * 9_800
    assert sum(one.ttft_kept for one in newcomer) / len(newcomer) > 0.97
    assert len(newcomer) > 0.3 * sum(one.replica_id == "replica-0" for one in run.attempts)


def test_prefix_affinity_finds_more_in_the_caches_than_the_least_loaded_would() -> None:
    trace = [
        replace(
            one,
            prompt_tokens=min(one.prompt_tokens, 16_000),
            output_tokens=max(1, one.output_tokens // 20),
            prefix=one.prefix[:31],
        )
        for one in synthetic("mooncake", 160, seed=9)
    ]
    patient = PriorityClass("default", 0, Objectives(TtftObjective(30.0)))
    config = SimulationConfig(classes=(patient,), replicas=3, replica=replace(REPLICA, num_blocks=6000), seed=9)
    trace = at_rate(trace, 2.0)
    with_affinity = SimulationReport.of(simulate(trace, config))
    # The caches still work, but admission sees no two prompts alike.
    blind = SimulationReport.of(simulate(trace, replace(config, affinity=False)))
    assert with_affinity.cached_share > 1.05 * blind.cached_share
    assert blind.cached_share > 0.02


@pytest.mark.parametrize(
    "broken",
    [{"mix": (1.0, 1.0)}, {"replicas": 0}, {"poll_interval": 0.0}, {"size_error": 1.0}, {"classes": ()}],
)
def test_a_config_that_means_nothing_is_refused(broken) -> None:
    with pytest.raises(ValueError, match="needs"):
        SimulationConfig(**broken)
