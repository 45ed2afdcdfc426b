"""Rules 1 to 3 of `headway_core.batching.scheduler`, one small case each: who is in an iteration, under which
limits."""

from itertools import pairwise

import pytest
from headway_core.batching.sequence import State
from headway_core.contract.policy import Knobs


def ids(plan):
    return [item.seq_id for item in plan.items]


# ---------------------------------------------------------------- rule 1: decodes in every iteration, prefill in order


def test_decodes_are_in_every_iteration_and_prefill_shares_the_budget(engine):
    run = engine(blocks=100, block_size=4, budget=8)
    first = run.add(8, length=20)
    run.step()
    run.add(30, length=3)
    for start in (0, 8, 16, 24):
        plan = run.launch()
        assert ids(plan) == [0, 1]
        assert plan.items[1].start == start
        assert plan.items[1].samples == (start == 24)
        run.collect()
    assert first.num_outputs == 5
    run.run()
    run.check_end()


def test_prefill_goes_by_class_then_arrival_a_partial_one_or_a_new_one_alike(engine):
    run = engine(blocks=100, block_size=4, budget=10)
    batch = run.add(50, length=2, priority=0)
    run.step()
    assert batch.num_computed == 10
    urgent = run.add(15, length=2, priority=1)
    plan = run.launch()
    assert [(item.seq_id, item.count) for item in plan.items] == [(urgent.seq_id, 10)]
    assert batch.slot is not None
    assert batch.blocks
    run.collect()
    plan = run.launch()
    assert [(item.seq_id, item.count) for item in plan.items] == [(urgent.seq_id, 5), (batch.seq_id, 5)]
    assert plan.items[1].start == 10
    run.run()
    run.check_end()
    assert run.scheduler.counters.recomputed_tokens == 0


def test_equal_classes_keep_arrival_order(engine):
    run = engine(blocks=100, block_size=4, budget=100, max_num_seqs=1)
    sequences = [run.add(5, length=2, arrival=arrival) for arrival in (3.0, 1.0, 2.0, 1.0)]
    run.run()
    started = [item.seq_id for plan in run.plans for item in plan.items if item.start == 0]
    assert started == [1, 3, 2, 0]
    assert len(sequences) == 4


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_lengths_around_blocks_and_budgets_are_cut_right(engine, budget, depth):
    run = engine(blocks=200, block_size=16, budget=budget, depth=depth, max_num_seqs=16)
    for length in {1, 15, 16, 17, budget - 1, budget, budget + 1, 2 * budget} - {0, 2000}:
        run.add(min(length, 400), length=5)
    run.run()
    run.check_end()
    for plan in run.plans:
        for item in plan.items:
            seq = run.sequences[item.seq_id]
            assert item.samples == (item.start + item.count >= seq.num_prompt), (
                "nothing is sampled before the last chunk"
            )


def test_a_prompt_alone_is_given_again_from_the_cache_but_for_its_last_token(engine):
    run = engine(blocks=20, block_size=4, budget=100)
    prompt = list(range(12))
    run.add(prompt, length=1)
    run.run()
    again = run.add(prompt, length=1)
    plan = run.launch()
    assert (plan.items[0].start, plan.items[0].count) == (8, 4)
    assert again.cached_tokens == 8
    run.run()
    run.check_end()
    assert run.scheduler.counters.prefix_hit_tokens == 8


def test_generated_tokens_extend_what_can_be_reused(engine):
    run = engine(blocks=40, block_size=4, budget=100)
    first = run.add(list(range(6)), length=12)
    run.run()
    conversation = run.prompts[first.seq_id] + run.outputs[first.seq_id] + [1, 2, 3]
    following = run.add(conversation, length=2)
    run.run()
    run.check_end()
    assert following.cached_tokens == 16  # 17 of the first one's 18 tokens were computed, in 4 full blocks


def test_without_prefix_caching_nothing_is_reused(engine):
    run = engine(blocks=20, block_size=4, budget=100, prefix_caching=False)
    for _ in range(3):
        run.add(list(range(12)), length=2)
        run.run()
    run.check_end()
    assert run.scheduler.counters.prefix_hit_tokens == 0
    assert run.scheduler.counters.prefill_tokens == 36
    assert run.scheduler.load().cached_blocks == 0


# ---------------------------------------------------------------- rule 2: limits


def test_lowering_both_knobs_drains_down_and_kills_nobody(engine):
    run = engine(blocks=200, block_size=4, budget=64, max_num_seqs=6)
    for _ in range(12):
        run.add(40, length=10)
    for _ in range(5):
        run.step()
    assert run.scheduler.load().running == 6
    assert max(plan.shape.prefill_tokens for plan in run.plans) > 8
    run.scheduler.set_knobs(Knobs(2, 8))
    before = len(run.plans)
    running = [run.scheduler.load().running]
    while run.step():
        running.append(run.scheduler.load().running)
    assert all(plan.shape.prefill_tokens <= 8 for plan in run.plans[before:])
    drained = next(index for index, count in enumerate(running) if count <= 2)
    assert all(later <= earlier for earlier, later in pairwise(running[: drained + 1]))
    assert all(count <= 2 for count in running[drained:])
    run.check_end()
    assert run.scheduler.counters.preemptions == 0


def test_raising_the_knobs_takes_effect_in_the_next_iteration(engine):
    run = engine(blocks=200, block_size=4, budget=4, max_num_seqs=1)
    for _ in range(4):
        run.add(20, length=5)
    run.step()
    run.scheduler.set_knobs(Knobs(4, 80))
    plan = run.launch()
    assert plan.shape.prefill_tokens == 76
    assert run.scheduler.load().running == 4


def test_above_a_lowered_limit_an_urgent_one_comes_in_exchange_only(engine):
    run = engine(blocks=200, block_size=4, budget=100, max_num_seqs=4)
    for _ in range(4):
        run.add(10, length=50)
    run.step()
    run.scheduler.set_knobs(Knobs(2, 100))
    urgent = run.add(10, length=5, priority=5)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert run.scheduler.load().running == 4
    run.run()
    run.check_end()


# ---------------------------------------------------------------- rule 3: who does not fit holds up those behind it


def test_a_start_needs_room_for_all_known_tokens_and_the_next(engine):
    run = engine(blocks=6, block_size=4, budget=100)
    run.add(8, length=8)
    large = run.add(12, length=2)
    small = run.add(2, length=2)
    plan = run.launch()
    # 8 + 1 tokens take 3 blocks of 6; 12 + 1 need 4; the small one would fit, but it is behind.
    assert ids(plan) == [0]
    assert large.state is small.state is State.WAITING
    run.run()
    run.check_end()


def test_a_prompt_that_fills_its_blocks_takes_one_more(engine):
    run = engine(blocks=3, block_size=4, budget=100)
    seq = run.add(8, length=2)
    plan = run.launch()
    assert len(plan.items[0].new_blocks) == 3
    run.collect()
    assert run.launch().items[0].new_blocks == ()
    run.run()
    run.check_end()
    last = engine(blocks=2, block_size=4, budget=100)
    last.add(7, max_tokens=1)
    assert len(last.launch().items[0].new_blocks) == 2
    assert seq.num_outputs == 2
