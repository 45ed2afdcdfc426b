"""Rules 4 and 5 of `headway_core.batching.scheduler`, one small case each: who is evicted, and that it comes to an
end."""

from math import ceil, log2

import pytest
from headway_core.batching.iteration_plan import EventKind
from headway_core.batching.preemption import victim_for_growth
from headway_core.batching.scheduling_policies import PriorityPreemptive
from headway_core.batching.sequence import Sequence, State


def ids(plan):
    return [item.seq_id for item in plan.items]


# ---------------------------------------------------------------- rule 4: preemption


def test_an_urgent_request_with_full_slots_starts_within_one_iteration(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=2)
    low = [run.add(6, length=30) for _ in range(2)]
    run.step()
    run.step()
    urgent = run.add(6, length=3, priority=1)
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


def test_the_oldest_keeps_its_slot_while_another_can_go(engine):
    run = engine(blocks=100, block_size=4, budget=100, max_num_seqs=2)
    oldest, other = run.add(3, length=30), run.add(11, length=30)
    run.step()
    assert oldest.num_computed < other.num_computed
    run.add(6, length=3, priority=1)
    run.launch()
    assert (oldest.preemptions, other.preemptions) == (0, 1)
    run.add(6, length=3, priority=1)
    run.collect()
    run.launch()
    assert (oldest.preemptions, other.preemptions) == (1, 1)
    run.collect()
    run.run()
    run.check_end()


def test_one_that_is_in_the_plan_already_can_be_preempted_in_the_same_call(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=1)
    low = run.add(4, length=30)
    run.step()
    run.step()
    computed = low.num_computed
    urgent = run.add(4, length=2, priority=1)
    plan = run.launch()
    assert ids(plan) == [urgent.seq_id], "its decode was drawn up first, and taken out again"
    assert plan.freed_slots == (0,)
    assert plan.items[0].slot == 0
    assert plan.shape.decode_rows == plan.shape.context_tokens == 0
    assert (low.num_computed, low.num_inflight, low.max_computed) == (0, 0, computed)
    run.run()
    run.check_end()


def test_no_slot_is_taken_from_an_equal_class(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=1)
    run.add(4, length=10, priority=1)
    run.step()
    for priority in (0, 1):
        run.add(4, length=2, priority=priority)
    for _ in range(3):
        assert ids(run.launch()) == [0]
        run.collect()
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions == 0


def test_a_higher_class_takes_the_blocks_of_a_paused_partial_prefill(engine):
    run = engine(blocks=12, block_size=4, budget=8)
    batch = run.add(40, length=2, priority=0)
    run.step()
    assert (batch.num_computed, len(batch.blocks)) == (8, 11)
    small = run.add(2, length=2, priority=1)
    plan = run.launch()
    assert ids(plan)[0] == small.seq_id
    assert batch.state is State.RUNNING, "one block is left: nobody has to go"
    run.collect()
    urgent = run.add(8, length=2, priority=1)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert batch.state is State.PREEMPTED
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions_for_blocks == 1


def test_nobody_is_evicted_when_that_would_not_make_enough_room(engine):
    run = engine(blocks=10, block_size=4, budget=100)
    high = run.add(18, length=10, priority=1)
    low = run.add(6, length=10, priority=0)
    run.step()
    large = run.add(24, length=2, priority=1)  # 7 blocks; the low one has 2, and 3 are free
    for _ in range(3):
        run.step()
    assert (high.state, low.state, large.state) == (State.RUNNING, State.RUNNING, State.WAITING)
    run.run()
    run.check_end()


@pytest.mark.parametrize(("prompt", "evicts"), [(27, True), (31, False)])
def test_blocks_that_a_newcomer_would_share_make_no_room_for_it(engine, prompt, evicts):
    run = engine(blocks=8, block_size=4, budget=100)
    run.add(3, length=12, priority=2)
    low = run.add([*range(8), 1], length=3, priority=0)
    run.step()
    assert run.scheduler.load().free_blocks == 4
    # The low one holds 3 blocks, of which the urgent one would share 2: evicting it makes room for 1 more than the 4
    # that are free.
    urgent = run.add([*range(8), *range(20, 12 + prompt)], max_tokens=1, priority=1)
    run.launch()
    assert (urgent.slot is not None) == evicts
    assert low.preemptions == evicts
    run.run()
    run.check_end()


def test_only_as_many_are_evicted_as_are_needed(engine):
    run = engine(blocks=13, block_size=4, budget=100)
    short, long = run.add(3, length=30, priority=0), run.add(28, length=30, priority=0)
    middle = run.add(7, length=30, priority=0)
    run.step()
    assert run.scheduler.load().free_blocks == 2
    # 7 blocks: the long one alone holds enough, the others together do not.
    urgent = run.add(24, length=2, priority=1)
    plan = run.launch()
    assert urgent.seq_id in ids(plan)
    assert (short.preemptions, middle.preemptions, long.preemptions) == (0, 0, 1)
    run.run()
    run.check_end()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_decode_without_a_block_evicts_the_lowest_class_then_the_least_sunk_never_the_oldest(engine, victim):
    priorities, prompts = {
        0: (
            [0, 1, 1],
            [11, 3, 3],
        ),  # the lowest class, though it has most to compute again and is the oldest of its class
        1: ([0, 0, 0], [3, 7, 11]),  # of one class the least sunk, though the oldest has less
        2: ([0, 0, 0], [3, 11, 7]),
    }[victim]
    run = engine(blocks=2 + sum(ceil((prompt + 1) / 4) for prompt in prompts), block_size=4, budget=100)
    sequences = [run.add(prompt, length=16, priority=own) for prompt, own in zip(prompts, priorities, strict=True)]
    while not run.scheduler.counters.preemptions:
        run.step()
    assert [seq.preemptions for seq in sequences] == [index == victim for index in range(3)]
    run.run()
    run.check_end()


def test_a_low_class_never_evicts_a_higher_one(engine):
    run = engine(blocks=8, block_size=4, budget=100)
    low = run.add(15, length=15, priority=0)
    high = run.add(3, length=15, priority=1)
    other = run.add(3, length=15, priority=1)
    run.run()
    run.check_end()
    assert low.preemptions > 0
    assert high.preemptions == 0
    assert other.preemptions == 0 or low.preemptions > 0


def test_one_that_is_spared_does_not_evict_a_higher_class_instead():
    def running(seq_id, priority, preemptions):
        return Sequence(seq_id, priority, float(seq_id), 10, preemptions=preemptions, num_computed=10)

    oldest, high, often, other = running(0, 1, 0), running(1, 1, 0), running(2, 0, 3), running(3, 0, 4)

    def victim(asking, *sequences):
        return victim_for_growth(asking, sequences, lambda seq: seq.priority)

    assert victim(often, oldest, high, often) is often
    assert victim(often, oldest, high, often, other) is other, "of the two the younger"
    assert victim(high, oldest, high, often, other) is high, "the only one that was not preempted so often"
    assert victim(oldest, oldest, often) is often
    assert victim(oldest, oldest) is None


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
    urgent = [run.add(6, length=3, priority=1) for _ in range(3)]
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
    urgent = run.add(6, length=2, priority=1)
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
        assert (often.slot is not None) == (spare == 2**preemptions)


def test_after_many_evictions_it_resumes_only_in_a_pool_that_is_otherwise_empty(engine):
    run = engine(blocks=20, block_size=4, budget=100, prefix_caching=False)
    other = run.add(3, length=5)
    run.step()
    often = run.add(6, length=20, preemptions=50)
    while other.seq_id not in run.finished:
        assert often.slot is None
        run.step()
    run.step()
    assert often.slot is not None
    run.run()
    run.check_end()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("promote_after", [None, 60.0])
def test_requests_that_each_nearly_fill_the_pool_all_finish_with_bounded_preemptions(engine, depth, promote_after):
    """Six prompts, two of them with four choices each, and small newcomers all the while."""
    run = engine(
        blocks=26,
        block_size=16,
        budget=32,
        depth=depth,
        max_num_seqs=8,
        policy=PriorityPreemptive(promote_after=promote_after),
    )
    large = [run.add(200, max_tokens=200) for _ in range(4)]
    for group in (1, 2):
        large += [run.add([(group + at) % 50 for at in range(200)], max_tokens=200, group=group) for _ in range(4)]
    drip, steps = [], 0
    while run.step():
        steps += 1
        if steps % 10 == 0 and len(drip) < 40:
            drip.append(run.add(5 + len(drip) % 20, max_tokens=10))
    run.check_end()
    serial = len(large) * (200 / 32 + 200) + 40 * (1 + 10)
    assert steps < 4 * serial
    bound = 1 + ceil(log2(26))
    assert max(seq.preemptions for seq in run.sequences.values()) <= bound
    assert sum(seq.num_outputs for seq in large) == 200 * len(large) == 2400


def test_growing_sequences_in_a_tiny_pool_are_preempted_often_and_within_the_bound(engine):
    run = engine(blocks=32, block_size=2, budget=8, max_num_seqs=16, policy=PriorityPreemptive(promote_after=None))
    for _ in range(60):
        run.add(2, max_tokens=40)
    run.run()
    run.check_end()
    assert run.scheduler.counters.preemptions_for_blocks >= 40
    assert run.scheduler.counters.recomputed_tokens > 200
    assert 3 <= max(seq.preemptions for seq in run.sequences.values()) <= 1 + log2(32)


def test_the_oldest_of_the_highest_class_is_never_evicted(engine):
    run = engine(blocks=16, block_size=2, budget=8, max_num_seqs=8)
    first = run.add(4, max_tokens=27, priority=1)
    for _ in range(30):
        run.add(4, max_tokens=24, priority=1)
        run.step()
    run.run()
    run.check_end()
    assert first.preemptions == 0
    assert run.scheduler.counters.preemptions > 10


def test_under_an_endless_stream_of_a_higher_class_a_low_one_ends_within_promote_after(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(promote_after=50.0))
    low = run.add(10, length=10)
    for _ in range(2000):
        for _ in range(3):
            if run.scheduler.load().waiting < 10:
                run.add(10, length=4, priority=1)
        run.step()
        if low.seq_id in run.finished:
            break
    assert low.seq_id in run.finished
    # Promoted after 50 s of waiting; then the next slot, one prefill and ten tokens, one a second.
    assert low.waited >= 50 or low.preemptions
    assert run.now < 50 + 4 + 10 + 10
    assert low.promoted


def test_without_promotion_it_would_wait_for_ever(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(promote_after=None))
    low = run.add(10, length=10)
    for _ in range(400):
        for _ in range(3):
            if run.scheduler.load().waiting < 10:
                run.add(10, length=4, priority=1)
        run.step()
    assert low.seq_id not in run.finished


def test_a_long_queue_of_one_class_promotes_nobody(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=2, policy=PriorityPreemptive(promote_after=5.0))
    for _ in range(20):
        run.add(10, length=6)
        run.now += 0.01
    run.run()
    run.check_end()
    assert run.now > 50
    assert not any(seq.promoted for seq in run.sequences.values())


def test_a_paused_partial_prefill_ages_too(engine):
    run = engine(blocks=400, block_size=4, budget=8, max_num_seqs=8, policy=PriorityPreemptive(promote_after=20.0))
    low = run.add(40, length=1)
    run.step()
    assert low.num_computed == 8
    for _ in range(100):
        if low.seq_id in run.finished:
            break
        run.add(8, length=1, priority=1)
        run.step()
    assert low.promoted
    assert run.now < 20 + 1 + 5 + 1
    assert low.preemptions == 0


def test_a_promoted_one_that_waits_for_a_slot_does_not_hold_up_an_exchange(engine):
    run = engine(blocks=100, block_size=4, budget=32, max_num_seqs=1)
    low = run.add(10, length=20)
    run.step()
    promoted = run.add(10, length=2, promoted=True)
    urgent = run.add(10, length=2, priority=1)
    assert ids(run.launch()) == [urgent.seq_id]
    assert low.preemptions == 1
    run.collect()
    run.run()
    run.check_end()
    starts = [item.seq_id for plan in run.plans for item in plan.items if item.new_blocks and item.start in (0, 8)]
    assert starts == [low.seq_id, urgent.seq_id, promoted.seq_id, low.seq_id]


def test_only_one_is_promoted_at_a_time(engine):
    run = engine(blocks=200, block_size=4, budget=32, max_num_seqs=4, policy=PriorityPreemptive(promote_after=20.0))
    for _ in range(20):
        run.add(10, length=6)
    for _ in range(300):
        while run.scheduler.load().waiting < 30:
            run.add(10, length=4, priority=1)
        run.step()
        assert sum(seq.promoted for seq in run.alive()) <= 1
    assert sum(seq.promoted and seq.seq_id in run.finished for seq in run.sequences.values()) > 5
