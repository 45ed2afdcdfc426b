"""How sequences come and go, alone and in groups, and what the scheduler reports of them."""

import pytest
from headway_core.batching.iteration_plan import EventKind
from headway_core.batching.sequence import State
from headway_core.contract.reports import ClassLoad
from headway_core.errors import Unschedulable


def ids(plan):
    return [item.seq_id for item in plan.items]


# ---------------------------------------------------------------- entering and leaving


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [(39, None, True), (40, None, False), (20, 20, True), (20, 21, False), (39, 1, True)],
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
    urgent = run.add(4, length=30, priority=1)
    run.step()
    preempted = next(seq for seq in (decoding, prefilling) if seq.state is State.PREEMPTED)
    running = next(seq for seq in (decoding, prefilling) if seq.state is State.RUNNING)
    run.launch()
    for seq in (waiting, preempted, running, urgent):
        run.cancel(seq)
        run.scheduler.check()
        assert seq.state is State.FINISHED
        assert not run.scheduler.cancel(seq.seq_id, run.now)
    assert run.scheduler.load().running == run.scheduler.load().waiting == 0
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
    run.add(20, length=5, priority=1)
    run.add(10, length=5, priority=0)
    run.add(6, length=5, priority=0)
    load = run.scheduler.load()
    assert (load.running, load.waiting, load.free_slots, load.free_blocks) == (0, 3, 2, 30)
    assert [(c.priority, c.waiting, c.running, c.remaining_prefill_tokens) for c in load.classes] == [
        (1, 1, 0, 20),
        (0, 2, 0, 16),
    ]
    run.step()
    load = run.scheduler.load()
    assert (load.running, load.waiting, load.free_slots, load.free_blocks) == (1, 2, 1, 24)
    assert [(c.priority, c.waiting, c.running, c.remaining_prefill_tokens) for c in load.classes] == [
        (1, 0, 1, 12),
        (0, 2, 0, 16),
    ]
    run.run()
    load = run.scheduler.load()
    assert load.classes == ()
    assert 0 < load.cached_blocks < load.free_blocks == 30


def test_the_counters_add_up(engine):
    run = engine(blocks=100, block_size=4, budget=16, max_num_seqs=2)
    low = run.add(10, length=10)
    run.step()
    run.step()
    run.add(10, length=2, priority=1)
    run.add(10, length=2, priority=1)
    run.step()
    assert run.scheduler.load().classes[1] == ClassLoad(0, waiting=1, running=0, remaining_prefill_tokens=12)
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
