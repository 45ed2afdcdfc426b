"""The rules on top of `headway_core.batching.scheduler`, one small case each."""

from itertools import pairwise
from math import ceil, log2

import pytest
from headway_core.batching.plan import EventKind, IterationResult, Limits, Outcome
from headway_core.batching.policies import PriorityPreemptive
from headway_core.batching.sequence import State
from headway_core.errors import Unschedulable


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
    batch = run.add(50, length=2, rank=0)
    run.step()
    assert batch.num_computed == 10
    urgent = run.add(15, length=2, rank=1)
    plan = run.launch()
    assert [(item.seq_id, item.count) for item in plan.items] == [(urgent.seq_id, 10)]
    assert batch.row is not None
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
            assert item.samples == (item.start + item.count >= seq.num_prompt), "nothing is sampled before the last chunk"


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
    assert run.scheduler.load(0.0).cached_blocks == 0


# ---------------------------------------------------------------- rule 2: limits


def test_lowering_both_knobs_drains_down_and_kills_nobody(engine):
    run = engine(blocks=200, block_size=4, budget=64, max_num_seqs=6)
    for _ in range(12):
        run.add(40, length=10)
    for _ in range(5):
        run.step()
    assert run.scheduler.load(0.0).running == 6
    assert max(plan.shape.prefill_tokens for plan in run.plans) > 8
    run.scheduler.set_limits(Limits(2, 8))
    before = len(run.plans)
    running = [run.scheduler.load(0.0).running]
    while run.step():
        running.append(run.scheduler.load(0.0).running)
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
    run.scheduler.set_limits(Limits(4, 80))
    plan = run.launch()
    assert plan.shape.prefill_tokens == 76
    assert run.scheduler.load(0.0).running == 4


def test_above_a_lowered_limit_an_urgent_one_comes_in_exchange_only(engine):
    run = engine(blocks=200, block_size=4, budget=100, max_num_seqs=4)
    for _ in range(4):
        run.add(10, length=50)
    run.step()
    run.scheduler.set_limits(Limits(2, 100))
    urgent = run.add(10, length=5, rank=5)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert run.scheduler.load(0.0).running == 4
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


# ---------------------------------------------------------------- rule 4: preemption


def test_an_urgent_request_with_full_slots_starts_within_one_iteration(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=2)
    low = [run.add(6, length=30) for _ in range(2)]
    run.step()
    run.step()
    urgent = run.add(6, length=3, rank=1)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert [seq.state for seq in low] == [State.RUNNING, State.PREEMPTED]
    events = run.collect()
    assert events[0] == (EventKind.PREEMPTED, low[1].seq_id)
    assert urgent.num_outputs == 1
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions_for_slots == 1
    assert run.scheduler.counters.preemptions_for_blocks == 0


def test_one_that_is_in_the_plan_already_can_be_preempted_in_the_same_call(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=1)
    low = run.add(4, length=30)
    run.step()
    run.step()
    computed = low.num_computed
    urgent = run.add(4, length=2, rank=1)
    plan = run.launch()
    assert ids(plan) == [urgent.seq_id], "its decode was drawn up first, and taken out again"
    assert plan.freed_rows == (0,)
    assert plan.items[0].row == 0
    assert plan.shape.decode_rows == plan.shape.context_tokens == 0
    assert (low.num_computed, low.num_inflight, low.high_water) == (0, 0, computed)
    run.run()
    run.check_end()


def test_no_slot_is_taken_from_an_equal_class(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=1)
    run.add(4, length=10, rank=1)
    run.step()
    for rank in (0, 1):
        run.add(4, length=2, rank=rank)
    for _ in range(3):
        assert ids(run.launch()) == [0]
        run.collect()
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions == 0


def test_a_higher_class_takes_the_blocks_of_a_paused_partial_prefill(engine):
    run = engine(blocks=12, block_size=4, budget=8)
    batch = run.add(40, length=2, rank=0)
    run.step()
    assert (batch.num_computed, len(batch.blocks)) == (8, 11)
    small = run.add(2, length=2, rank=1)
    plan = run.launch()
    assert ids(plan)[0] == small.seq_id
    assert batch.state is State.RUNNING, "one block is left: nobody has to go"
    run.collect()
    urgent = run.add(8, length=2, rank=1)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert batch.state is State.PREEMPTED
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions_for_blocks == 1


def test_nobody_is_evicted_when_that_would_not_make_enough_room(engine):
    run = engine(blocks=10, block_size=4, budget=100)
    high = run.add(18, length=10, rank=1)
    low = run.add(6, length=10, rank=0)
    run.step()
    large = run.add(24, length=2, rank=1)  # 7 blocks; the low one has 2, and 3 are free
    for _ in range(3):
        run.step()
    assert (high.state, low.state, large.state) == (State.RUNNING, State.RUNNING, State.WAITING)
    run.run()
    run.check_end()


@pytest.mark.parametrize(("prompt", "evicts"), [(27, True), (31, False)])
def test_blocks_that_a_newcomer_would_share_make_no_room_for_it(engine, prompt, evicts):
    run = engine(blocks=8, block_size=4, budget=100)
    run.add(3, length=12, rank=2)
    low = run.add([*range(8), 1], length=3, rank=0)
    run.step()
    assert run.scheduler.load(0.0).free_blocks == 4
    # The low one holds 3 blocks, of which the urgent one would share 2: evicting it makes room for 1 more than the 4 that are free.
    urgent = run.add([*range(8), *range(20, 12 + prompt)], max_tokens=1, rank=1)
    run.launch()
    assert (urgent.row is not None) == evicts
    assert low.preemptions == evicts
    run.run()
    run.check_end()


def test_only_as_many_are_evicted_as_are_needed(engine):
    run = engine(blocks=13, block_size=4, budget=100)
    short, long = run.add(3, length=30, rank=0), run.add(28, length=30, rank=0)
    run.add(7, length=30, rank=0)
    run.step()
    assert run.scheduler.load(0.0).free_blocks == 2
    urgent = run.add(24, length=2, rank=1)  # 7 blocks: the long one alone makes enough room, the others together do not
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert (short.preemptions, long.preemptions) == (0, 1)
    run.run()
    run.check_end()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_decode_without_a_block_evicts_the_lowest_class_then_the_least_sunk_never_the_oldest(engine, victim):
    ranks, prompts = {
        0: ([0, 1, 1], [11, 3, 3]),  # the lowest class, though it has most to compute again and is the oldest of its class
        1: ([0, 0, 0], [3, 7, 11]),  # of one class the least sunk, though the oldest has less
        2: ([0, 0, 0], [3, 11, 7]),
    }[victim]
    run = engine(blocks=2 + sum(ceil((prompt + 1) / 4) for prompt in prompts), block_size=4, budget=100)
    sequences = [run.add(prompt, length=16, rank=rank) for prompt, rank in zip(prompts, ranks, strict=True)]
    while not run.scheduler.counters.preemptions:
        run.step()
    assert [seq.preemptions for seq in sequences] == [index == victim for index in range(3)]
    run.run()
    run.check_end()


def test_a_low_class_never_evicts_a_higher_one(engine):
    run = engine(blocks=8, block_size=4, budget=100)
    low = run.add(15, length=15, rank=0)
    high = run.add(3, length=15, rank=1)
    other = run.add(3, length=15, rank=1)
    run.run()
    run.check_end()
    assert low.preemptions > 0
    assert high.preemptions == 0
    assert other.preemptions == 0 or low.preemptions > 0


def test_one_that_was_preempted_three_times_is_spared_while_another_can_be_found(engine):
    run = engine(blocks=9, block_size=4, budget=100)
    oldest, often, fresh = run.add(11, length=30), run.add(3, length=30), run.add(7, length=30)
    run.step()
    often.preemptions = 3
    assert often.num_computed < fresh.num_computed
    while not run.victims:
        run.step()
    assert (oldest.preemptions, often.preemptions, fresh.preemptions) == (0, 3, 1)


def test_preempted_ones_come_back_before_newcomers_of_their_class_and_after_higher_classes(engine):
    run = engine(blocks=100, block_size=4, budget=100, max_num_seqs=2, prefix_caching=False)
    low = [run.add(6, length=8) for _ in range(2)]
    run.step()
    newcomer = run.add(6, length=8, arrival=-1.0)  # an older arrival does not help against the preempted
    urgent = [run.add(6, length=3, rank=1) for _ in range(3)]
    run.run()
    run.check_end()
    starts = [item.seq_id for plan in run.plans for item in plan.items if item.start == 0]
    assert starts == [0, 1, *(seq.seq_id for seq in urgent), 0, 1, newcomer.seq_id]
    assert [seq.preemptions for seq in low] == [1, 1]


# ---------------------------------------------------------------- rule 5: no livelock


def test_a_start_leaves_a_block_free_for_each_that_runs(engine):
    run = engine(blocks=9, block_size=4, budget=100)
    for _ in range(4):
        run.add(6, length=2)
    # Of 2 blocks each: 2 + 0, 4 + 1, 6 + 2, and 8 + 3 are more than there are.
    assert len(run.launch().items) == 3
    run.collect()
    run.run()
    run.check_end()


def test_an_urgent_one_need_not_leave_blocks_for_a_lower_class(engine):
    run = engine(blocks=4, block_size=4, budget=100)
    low = run.add(6, length=2)
    run.step()
    urgent = run.add(6, length=2, rank=1)
    assert urgent.seq_id in ids(run.launch())
    assert low.preemptions == 0


@pytest.mark.parametrize("preemptions", [1, 2, 3])
def test_each_eviction_doubles_the_room_that_a_resumption_needs(engine, preemptions):
    for spare in (2**preemptions - 1, 2**preemptions):
        run = engine(blocks=3 + 2 + 1 + spare, block_size=4, budget=100, prefix_caching=False)
        run.add(10, length=30)
        run.step()
        often = run.add(6, length=2, preemptions=preemptions)
        run.launch()
        # The other one has 3 blocks and gets one more left for it, this one needs 2.
        assert (often.row is not None) == (spare == 2**preemptions)


def test_after_many_evictions_it_resumes_only_in_a_pool_that_is_otherwise_empty(engine):
    run = engine(blocks=20, block_size=4, budget=100, prefix_caching=False)
    other = run.add(3, length=5)
    run.step()
    often = run.add(6, length=20, preemptions=50)
    while other.seq_id not in run.finished:
        assert often.row is None
        run.step()
    run.step()
    assert often.row is not None
    run.run()
    run.check_end()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("patience", [None, 60.0])
def test_requests_that_each_nearly_fill_the_pool_all_finish_with_bounded_preemptions(engine, depth, patience):
    run = engine(blocks=26, block_size=16, budget=32, depth=depth, max_num_seqs=8, policy=PriorityPreemptive(patience=patience))
    large = [run.add(200, max_tokens=200) for _ in range(6)]
    drip, steps = [], 0
    while run.step():
        steps += 1
        if steps % 10 == 0 and len(drip) < 40:
            drip.append(run.add(5 + len(drip) % 20, max_tokens=10))
    run.check_end()
    serial = 6 * (200 / 32 + 200) + 40 * (1 + 10)
    assert steps < 4 * serial
    bound = 1 + ceil(log2(26))
    assert max(seq.preemptions for seq in run.sequences.values()) <= bound
    assert sum(seq.num_outputs for seq in large) == 1200


def test_growing_sequences_in_a_tiny_pool_are_preempted_often_and_within_the_bound(engine):
    run = engine(blocks=32, block_size=2, budget=8, max_num_seqs=16, policy=PriorityPreemptive(patience=None))
    for _ in range(60):
        run.add(2, max_tokens=40)
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions_for_blocks >= 40
    assert run.scheduler.counters.recomputed_tokens > 200
    assert 3 <= max(seq.preemptions for seq in run.sequences.values()) <= 1 + log2(32)


def test_the_oldest_of_the_highest_class_is_never_evicted(engine):
    run = engine(blocks=16, block_size=2, budget=8, max_num_seqs=8)
    first = run.add(4, max_tokens=27, rank=1)
    for _ in range(30):
        run.add(4, max_tokens=24, rank=1)
        run.step()
    run.run()
    run.check_end()
    assert first.preemptions == 0
    assert run.scheduler.counters.preemptions > 10


def test_under_an_endless_stream_of_a_higher_class_a_low_one_ends_within_its_patience(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(patience=50.0))
    low = run.add(10, length=10)
    for _ in range(2000):
        for _ in range(3):
            if run.scheduler.load(0.0).waiting < 10:
                run.add(10, length=4, rank=1)
        run.step()
        if low.seq_id in run.finished:
            break
    assert low.seq_id in run.finished
    # Promoted after 50 s of waiting; then the next slot, one prefill and ten tokens, one a second.
    assert low.waited >= 50 or low.preemptions
    assert run.now < 50 + 4 + 10 + 10
    assert low.promoted


def test_without_patience_it_would_wait_for_ever(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(patience=None))
    low = run.add(10, length=10)
    for _ in range(400):
        for _ in range(3):
            if run.scheduler.load(0.0).waiting < 10:
                run.add(10, length=4, rank=1)
        run.step()
    assert low.seq_id not in run.finished


def test_a_long_queue_of_one_class_promotes_nobody(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(patience=5.0))
    for _ in range(20):
        run.add(10, length=6)
        run.now += 0.01
    run.run()
    run.check_end()
    assert run.now > 50
    assert not any(seq.promoted for seq in run.sequences.values())


def test_a_paused_partial_prefill_ages_too(engine):
    run = engine(blocks=400, block_size=4, budget=8, max_num_seqs=8, policy=PriorityPreemptive(patience=20.0))
    low = run.add(40, length=1)
    run.step()
    assert low.num_computed == 8
    for _ in range(100):
        if low.seq_id in run.finished:
            break
        run.add(8, length=1, rank=1)
        run.step()
    assert low.promoted
    assert run.now < 20 + 1 + 5 + 1
    assert low.preemptions == 0


def test_only_one_is_promoted_at_a_time(engine):
    run = engine(blocks=200, block_size=4, budget=32, max_num_seqs=4, policy=PriorityPreemptive(patience=20.0))
    for _ in range(20):
        run.add(10, length=6)
    for _ in range(300):
        while run.scheduler.load(0.0).waiting < 30:
            run.add(10, length=4, rank=1)
        run.step()
        assert sum(seq.promoted for seq in run.alive()) <= 1
    assert sum(seq.promoted and seq.seq_id in run.finished for seq in run.sequences.values()) > 5


# ---------------------------------------------------------------- rule 6: two plans in flight


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
    assert run.scheduler.load(0.0).running == 0
    assert run.scheduler.load(0.0).free_blocks < 20, "its blocks are still in flight"
    assert run.collect() == ()
    assert run.scheduler.load(0.0).free_blocks == 20
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
    run.add(6, length=1, rank=1)
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
    assert run.scheduler.load(0.0).free_blocks == 0
    run.cancel(leaving)
    assert run.launch() is None
    run.collect()
    assert ids(run.launch()) == [first.seq_id, third.seq_id]
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions == 0


def test_results_come_in_the_order_of_the_plans_and_complete(engine):
    run = engine(blocks=20, block_size=4, budget=100, depth=2)
    run.add(6, length=4)
    first, second = run.launch(), run.launch()
    before = run.scheduler.load(0.0)
    for result in (
        IterationResult(second.plan_id, (Outcome(0, second.items[0].epoch, False),), None),
        IterationResult(first.plan_id, (), None),
        IterationResult(99, (), None),
    ):
        with pytest.raises(ValueError, match="plan"):
            run.scheduler.complete(result, 0.0)
        assert run.scheduler.load(0.0) == before
    run.run()
    run.check_end()


# ---------------------------------------------------------------- entering and leaving


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(39, None, True), (40, None, False), (20, 20, True), (20, 21, False), (39, 1, True)]
)
def test_what_could_never_fit_is_refused_with_both_numbers(engine, prompt, max_tokens, fits):
    run = engine(blocks=10, block_size=4)
    if fits:
        seq = run.add(prompt, max_tokens=max_tokens)
        assert seq.most_tokens == prompt + max_tokens if max_tokens else 40
        run.run()
        run.check_end()
    else:
        with pytest.raises(Unschedulable) as caught:
            run.add(prompt, max_tokens=max_tokens)
        assert (caught.value.needed_tokens, caught.value.pool_tokens) == (prompt + (max_tokens or 1), 40)
        assert len(run.scheduler) == 0


def test_a_number_in_use_is_refused(engine):
    run = engine(blocks=10, block_size=4)
    seq = run.add(3, length=2)
    with pytest.raises(ValueError, match="added before"):
        run.scheduler.add(seq, 0.0)
    run.run()
    with pytest.raises(ValueError, match="added before"):
        run.scheduler.add(seq, 0.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_cancelling_gives_everything_back_in_every_state(engine, depth):
    run = engine(blocks=24, block_size=4, budget=8, max_num_seqs=2, depth=depth)
    decoding, prefilling, waiting = run.add(4, length=30), run.add(40, length=5), run.add(4, length=5)
    run.step()
    run.step()
    urgent = run.add(4, length=30, rank=1)
    run.step()
    preempted = next(seq for seq in (decoding, prefilling) if seq.state is State.PREEMPTED)
    running = next(seq for seq in (decoding, prefilling) if seq.state is State.RUNNING)
    run.launch()
    for seq in (waiting, preempted, running, urgent):
        run.cancel(seq)
        run.scheduler.check()
        assert seq.state is State.FINISHED
        assert not run.scheduler.cancel(seq.seq_id, run.now)
    assert run.scheduler.load(0.0).running == run.scheduler.load(0.0).waiting == 0
    while run.flying:
        assert all(event.kind is EventKind.PREEMPTED for event in run.collect())
    assert run.launch() is None
    run.check_end()
    assert run.scheduler.counters.cancelled == 4


def test_one_outcome_that_ends_does_not_touch_the_neighbours(engine):
    run = engine(blocks=40, block_size=4, budget=100)
    lengths = [1, 5, 2, 9, 1]
    for length in lengths:
        run.add(6, length=length)
    run.run()
    run.check_end()
    assert [len(outputs) for outputs in run.outputs.values()] == lengths


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("depth", [1, 2])
def test_followers_wait_for_the_leaders_prompt_and_then_hit_it(engine, depth):
    run = engine(blocks=100, block_size=4, budget=8, depth=depth)
    prompt = list(range(22))
    leader, *followers = [run.add(prompt, length=5, group=1) for _ in range(3)]
    other = run.add(4, length=2)
    while leader.num_outputs == 0:
        assert all(seq.state is State.WAITING for seq in followers)
        run.step()
    run.run()
    run.check_end()
    assert [seq.cached_tokens for seq in followers] == [20, 20]
    assert run.scheduler.counters.prefill_tokens == 22 + 2 + 2 + 4
    assert other.num_outputs == 2


def test_when_the_leader_goes_before_its_prompt_is_done_a_follower_leads(engine):
    run = engine(blocks=100, block_size=4, budget=8)
    prompt = list(range(22))
    leader, second, third = [run.add(prompt, length=2, group=1) for _ in range(3)]
    run.step()
    run.cancel(leader)
    run.step()
    assert (second.state, third.state) == (State.RUNNING, State.WAITING)
    run.cancel(second)
    run.run()
    run.check_end()
    assert third.num_outputs == 2


def test_nothing_is_held_back_where_nothing_could_be_hit(engine):
    for options, prompt in (({"prefix_caching": False}, 22), ({}, 4)):
        run = engine(blocks=100, block_size=4, budget=100, **options)
        for _ in range(3):
            run.add(list(range(prompt)), length=2, group=1)
        assert len(run.launch().items) == 3
        run.run()
        run.check_end()


def test_a_late_member_of_a_group_whose_prompt_is_known_starts_at_once(engine):
    run = engine(blocks=100, block_size=4, budget=100)
    prompt = list(range(22))
    run.add(prompt, length=30, group=1)
    run.step()
    late = run.add(prompt, length=2, group=1)
    assert late.seq_id in ids(run.launch())
    assert late.cached_tokens == 20


# ---------------------------------------------------------------- reports


def test_the_load_says_what_waits_runs_and_remains(engine):
    run = engine(blocks=30, block_size=4, budget=8, max_num_seqs=2)
    run.add(20, length=5, rank=1)
    run.add(10, length=5, rank=0)
    run.add(6, length=5, rank=0)
    load = run.scheduler.load(2.0)
    assert (load.at, load.running, load.waiting, load.free_slots, load.free_blocks) == (2.0, 0, 3, 2, 30)
    assert [(c.priority, c.waiting, c.running, c.remaining_prefill_tokens) for c in load.classes] == [(1, 1, 0, 20), (0, 2, 0, 16)]
    run.step()
    load = run.scheduler.load(3.0)
    assert (load.running, load.waiting, load.free_slots, load.free_blocks) == (1, 2, 1, 24)
    assert [(c.priority, c.waiting, c.running, c.remaining_prefill_tokens) for c in load.classes] == [(1, 0, 1, 12), (0, 2, 0, 16)]
    run.run()
    load = run.scheduler.load(9.0)
    assert load.classes == ()
    assert 0 < load.cached_blocks < load.free_blocks == 30


def test_the_counters_add_up(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=2)
    low = run.add(10, length=10)
    run.step()
    run.step()
    run.add(10, length=2, rank=1)
    run.add(10, length=2, rank=1)
    run.run()
    run.check_end()
    counters = run.scheduler.counters
    assert counters.preemptions_for_slots == counters.preemptions == low.preemptions == 1
    # 11 tokens were computed; 8 of them are found again in the cache, 3 are computed again.
    assert counters.resumed_hit_tokens == 8
    assert counters.recomputed_tokens == 3
    assert counters.output_tokens == 14
    assert counters.finished == 3
    assert counters.iterations == len(run.plans)
