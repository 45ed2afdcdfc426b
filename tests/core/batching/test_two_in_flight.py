"""Rule 6 of `headway_core.batching.scheduler`: a second plan before the first is complete."""

import pytest
from headway_core.batching.iteration_plan import EventKind, ItemResult, IterationResult
from headway_core.batching.sequence import State


def ids(plan):
    return [item.seq_id for item in plan.items]


def test_a_second_plan_goes_on_with_the_token_that_is_being_sampled(engine):
    run = engine(blocks=20, block_size=4, budget=100, depth=2)
    run.add(6, length=4)
    first, second = run.launch(), run.launch()
    assert [(item.start, item.count) for item in first.items + second.items] == [(0, 6), (6, 1)]
    run.collect()
    run.collect()
    run.run()
    run.check_end()


def test_a_token_beyond_the_end_is_dropped(engine):
    run = engine(blocks=20, block_size=4, budget=100, depth=2)
    seq = run.add(6, length=2)
    run.launch()
    run.launch()
    run.collect()
    assert run.launch() is not None  # the third token of a sequence that turns out to have two
    assert [event.kind for event in run.collect()] == [EventKind.TOKEN, EventKind.FINISHED]
    assert run.scheduler.load().running == 0
    assert run.scheduler.load().free_blocks < 20, "its blocks are still in flight"
    assert run.collect() == ()
    assert run.scheduler.load().free_blocks == 20
    assert seq.num_outputs == 2


def test_no_token_beyond_max_tokens_is_planned(engine):
    run = engine(blocks=20, block_size=4, budget=100, depth=2)
    run.add(6, max_tokens=2)
    run.launch()
    run.launch()
    assert run.launch() is None
    run.run()
    run.check_end()


def test_a_token_sampled_before_an_eviction_is_dropped_and_sampled_again(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=1, depth=2)
    low = run.add(6, length=4)
    run.launch()
    run.add(6, length=1, priority=1)
    run.launch()
    assert low.state is State.PREEMPTED
    assert [event for event in run.collect() if event.seq_id == low.seq_id] == [(EventKind.PREEMPTED, low.seq_id)]
    assert low.num_outputs == 0
    run.run()
    run.check_end()


def test_a_decode_sits_out_rather_than_evict_when_blocks_are_on_their_way(engine):
    run = engine(blocks=7, block_size=4, budget=100, depth=2)
    first, leaving, third = run.add(3, length=9), run.add(7, length=9), run.add(3, length=9)
    run.launch()
    while first.num_computed + first.num_inflight < 8:
        run.launch()
        run.collect()
    assert run.scheduler.load().free_blocks == 0
    run.cancel(leaving)
    assert run.launch() is None
    run.collect()
    assert ids(run.launch()) == [first.seq_id, third.seq_id]
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions == 0


def test_nobody_is_evicted_for_blocks_that_are_on_their_way(engine):
    run = engine(blocks=8, block_size=4, budget=100, depth=2)
    leaving, low = run.add(14, length=9), run.add(3, length=9)
    run.launch()
    run.launch()
    run.cancel(leaving)
    urgent = run.add(20, length=1, priority=1)  # 6 blocks: 3 are free, 4 are given up and in flight
    run.launch()
    assert (urgent.slot, low.preemptions) == (None, 0)
    run.collect()
    run.collect()
    run.launch()
    assert (urgent.slot is not None, low.preemptions) == (True, 0)
    run.run()
    run.check_end()


def test_results_come_in_the_order_of_the_plans_and_complete(engine):
    run = engine(blocks=20, block_size=4, budget=100, depth=2)
    run.add(6, length=4)
    first, second = run.launch(), run.launch()
    before = run.scheduler.load()
    for result in (
        IterationResult(second.plan_id, (ItemResult(0, second.items[0].epoch, False),), None),
        IterationResult(first.plan_id, (), None),
        IterationResult(99, (), None),
    ):
        with pytest.raises(ValueError, match="plan"):
            run.scheduler.complete(result, 0.0)
        assert run.scheduler.load() == before
    run.run()
    run.check_end()
