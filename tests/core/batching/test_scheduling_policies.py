"""What is particular to each policy; that all of them lose nothing is proved by the histories."""

import json
import re
from pathlib import Path

import pytest
from headway_core.batching.deadlines import TokenDeadlines
from headway_core.batching.iteration_plan import ItemResult, IterationResult
from headway_core.batching.scheduling_policies import (
    SCHEDULING_POLICIES,
    Fcfs,
    IterationView,
    PriorityPreemptive,
    ShortestJobFirst,
    SloAware,
    by_name,
)
from headway_core.batching.sequence import Sequence
from headway_core.contract.policy import Knobs
from headway_core.latency import StepTimeModel, calibration_shapes


def seconds(shape):
    """A pretended engine: 10 ms, 1 ms a row, 10 µs for each token of context."""
    return 0.010 + 0.001 * (shape.prefill_tokens + shape.decode_rows) + 1e-5 * shape.context_tokens


@pytest.fixture(scope="module")
def step_times():
    model = StepTimeModel()
    shapes = calibration_shapes(max_num_seqs=32, prefill_token_budget=512, max_model_len=2048, pool_tokens=65_536)
    model.calibrate((shape, seconds(shape)) for shape in shapes)
    return model


# ---------------------------------------------------------------- Fcfs


def test_fcfs_sets_the_whole_length_aside_and_never_preempts(engine):
    run = engine(blocks=10, block_size=4, budget=100, policy=Fcfs())
    first = run.add(8, max_tokens=9)
    second = run.add(4, max_tokens=21)
    third = run.add(1, max_tokens=2, priority=9)
    plan = run.launch()
    # 8 + 9 - 1 tokens are 4 blocks, 4 + 21 - 1 are 6: the third fits in none, whatever its class.
    assert [(item.seq_id, len(item.new_blocks)) for item in plan.items] == [(0, 4), (1, 6)]
    run.collect()
    while first.num_outputs < 9:
        assert third.slot is None
        run.step()
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions == 0
    assert second.num_outputs == 21


def test_fcfs_lets_the_first_that_does_not_fit_hold_up_all(engine):
    run = engine(blocks=10, block_size=4, budget=100, policy=Fcfs())
    run.add(8, max_tokens=9)
    large = run.add(4, max_tokens=30)
    small = run.add(1, max_tokens=2)
    run.step()
    assert large.slot is small.slot is None
    run.run()
    started = [item.seq_id for plan in run.plans for item in plan.items if item.start == 0]
    assert started == [0, 1, 2]


# ---------------------------------------------------------------- ShortestJobFirst


def test_the_shortest_job_goes_first_whatever_its_class(engine):
    run = engine(blocks=200, block_size=4, budget=1000, max_num_seqs=1, policy=ShortestJobFirst())
    for prompt, most, priority in ((50, 10, 9), (10, 10, 0), (5, 30, 5), (10, 5, 1)):
        run.add(prompt, max_tokens=most, priority=priority)
    run.run()
    started = [item.seq_id for plan in run.plans for item in plan.items if item.start == 0]
    assert started == [3, 1, 2, 0]
    run.check_end()


def test_a_long_job_is_not_starved_by_short_ones(engine):
    run = engine(blocks=200, block_size=4, budget=1000, max_num_seqs=1, policy=ShortestJobFirst(promote_after=20.0))
    long = run.add(100, max_tokens=10)
    run.add(2, max_tokens=2)
    for _ in range(200):
        if run.scheduler.load().waiting < 3:
            run.add(2, max_tokens=2)
        run.step()
        if long.seq_id in run.finished:
            break
    assert long.seq_id in run.finished
    assert run.now < 20 + 2 + 10 + 5


def test_every_name_gives_a_policy_of_its_own(step_times):
    policies = [by_name(name, step_times) for name in SCHEDULING_POLICIES]
    assert SCHEDULING_POLICIES[0] == "priority" and len(set(map(type, policies))) == len(policies)
    with pytest.raises(KeyError):
        by_name("dynamic", step_times)


def test_the_chart_takes_the_same_names():
    schema = (Path(__file__).parents[3] / "charts/headway/values.schema.json").read_text()
    names = json.loads(re.search(r'"schedulingPolicy": \{.*"enum": (\[.*\])\}', schema)[1])
    assert set(names) == {*SCHEDULING_POLICIES, None}


# ---------------------------------------------------------------- SloAware


def test_the_budget_fills_what_the_tightest_target_leaves(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=10_000, policy=SloAware(step_times=step_times))
    run.add(20, max_tokens=500, tpot_target=0.10)
    run.add(20, max_tokens=500, tpot_target=0.05)
    run.step()
    run.add(2000, max_tokens=5)
    plan = run.launch()
    assert seconds(plan.shape) == pytest.approx(0.05, rel=0.03)
    assert plan.shape.prefill_tokens == pytest.approx(37, abs=2)  # 50 ms - 10 - 2 rows - 42 tokens of context


def test_without_a_target_an_iteration_stays_under_half_a_second(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=10_000, policy=SloAware(step_times=step_times))
    run.add(4000, max_tokens=5)
    assert seconds(run.launch().shape) == pytest.approx(0.5, rel=0.03)


def test_the_limit_stays_the_ceiling(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=100, policy=SloAware(step_times=step_times))
    run.add(4000, max_tokens=5)
    assert run.launch().shape.prefill_tokens == 100


def test_the_least_budget_does_not_lift_the_limit(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=5, policy=SloAware(step_times=step_times, least_budget=24))
    run.add(20, max_tokens=5)
    assert run.launch().shape.prefill_tokens == 5


def test_prefill_that_waits_gets_its_least_budget_even_when_the_target_is_tighter_than_that(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=1000, policy=SloAware(step_times=step_times, least_budget=24))
    run.add(20, max_tokens=500, tpot_target=0.012)
    run.step()
    run.add(100, max_tokens=5)
    assert run.launch().shape.prefill_tokens == 24


def test_slack_does_not_stretch_an_iteration(step_times):
    # The first token was early by far; the last deadline is hours away.
    seq = Sequence(1, 0, 0.0, 10, max_tokens=1000, tpot_target=0.05)
    seq.most_tokens, seq.first_token_at = 1010, 1000.0
    seq.num_tokens += 500
    deadlines = TokenDeadlines()
    deadlines.join(seq)
    view = IterationView(10_000, 1, 100, 0, deadlines)
    budget = SloAware(step_times=step_times).budget(view, 1000.0)
    assert 0.010 + 0.001 * (budget + 1) + 1e-5 * 100 == pytest.approx(0.05, rel=0.05)


def test_a_sequence_past_recovery_no_longer_holds_prefill_down(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=10_000, policy=SloAware(step_times=step_times))
    late = run.add(20, max_tokens=100, tpot_target=0.05)
    run.step()
    run.add(4000, max_tokens=5)
    assert run.launch().shape.prefill_tokens < 50
    run.collect()
    # The clock of these tests goes a second an iteration: after ten of them 89 tokens at 11 ms cannot make up for it.
    for _ in range(8):
        run.step()
    assert late.num_outputs < 100
    assert run.launch().shape.prefill_tokens > 300


def test_before_the_step_time_is_known_the_limit_alone_counts(engine):
    run = engine(blocks=2000, block_size=4, budget=700, policy=SloAware(step_times=StepTimeModel()))
    run.add(20, max_tokens=500, tpot_target=0.012)
    run.step()
    run.add(2000, max_tokens=5)
    assert run.launch().shape.prefill_tokens == 700


def test_deep_context_counts_into_the_budget(step_times):
    model = StepTimeModel()
    shapes = calibration_shapes(max_num_seqs=4, prefill_token_budget=512, max_model_len=4096, pool_tokens=65_536)
    model.calibrate((shape, seconds(shape) + 1e-6 * shape.prefill_pairs) for shape in shapes)
    policy = SloAware(step_times=model)
    shallow, deep = (policy.budget(IterationView(10_000, 0, 0, start, TokenDeadlines()), 0.0) for start in (0, 4000))
    assert deep < shallow / 2


def test_targets_of_those_that_left_do_not_count(engine, step_times):
    run = engine(blocks=2000, block_size=4, budget=10_000, policy=SloAware(step_times=step_times), max_num_seqs=2)
    tight = run.add(20, max_tokens=500, tpot_target=0.02)
    run.step()
    run.add(4000, max_tokens=5)
    assert run.launch().shape.prefill_tokens < 30
    run.collect()
    run.cancel(tight)
    assert run.launch().shape.prefill_tokens > 300


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("policy", [Fcfs(), ShortestJobFirst(), PriorityPreemptive()])
def test_jumping_over_steady_decode_ends_where_walking_does(engine, policy):
    def drive(jump):
        run = engine(blocks=60, block_size=4, budget=32, max_num_seqs=4, policy=policy, prefix_caching=False)
        scheduler = run.scheduler
        iterations = jumped = 0
        for prompt, most in ((10, 40), (7, 55), (20, 33), (3, 60), (12, 25), (5, 5)):
            run.add(prompt, max_tokens=most)
        while len(scheduler):
            plan = scheduler.schedule(0.0)
            outcomes = tuple(ItemResult(item.seq_id, item.epoch, False) for item in plan.items if item.samples)
            scheduler.complete(IterationResult(plan.plan_id, outcomes, None), 0.0)
            iterations += 1
            if jump and plan.stable_for:
                scheduler.fast_forward(plan.stable_for)
                jumped += plan.stable_for
            scheduler.check()
        return iterations, jumped, scheduler.counters

    walked, _, by_walking = drive(jump=False)
    stepped, jumped, by_jumping = drive(jump=True)
    assert stepped + jumped == walked
    assert jumped > walked / 2
    assert by_jumping == by_walking


def test_a_jump_further_than_is_known_to_be_steady_is_refused(engine):
    run = engine(blocks=60, block_size=4)
    run.add(10, max_tokens=20)
    run.step()
    plan = run.launch()
    assert plan.stable_for == 17  # the 2nd token is being computed; the 20th ends it
    run.collect()
    with pytest.raises(ValueError, match="18 iterations asked for, and 17"):
        run.scheduler.fast_forward(18)
    run.scheduler.fast_forward(10)
    run.scheduler.fast_forward(7)
    with pytest.raises(ValueError, match="0 are known"):
        run.scheduler.fast_forward(1)


def test_nothing_is_known_to_be_steady_after_one_ended_by_itself(engine):
    run = engine(blocks=60, block_size=4)
    run.add(10, length=2, max_tokens=20)
    run.add(10, max_tokens=20)
    run.step()
    assert run.launch().stable_for > 0
    run.collect()
    assert len(run.finished) == 1
    with pytest.raises(ValueError, match="0 are known"):
        run.scheduler.fast_forward(1)


@pytest.mark.parametrize("happening", ["add", "cancel", "knobs", "schedule"])
def test_nothing_is_known_to_be_steady_after_something_happened(engine, happening):
    run = engine(blocks=60, block_size=4)
    run.add(10, max_tokens=20)
    other = run.add(10, max_tokens=20)
    run.step()
    assert run.launch().stable_for > 0
    run.collect()
    {
        "add": lambda: run.add(3, max_tokens=3),
        "cancel": lambda: run.cancel(other),
        "knobs": lambda: run.scheduler.set_knobs(Knobs(1, 1)),
        "schedule": run.launch,
    }[happening]()
    with pytest.raises(ValueError, match="0 are known"):
        run.scheduler.fast_forward(1)
