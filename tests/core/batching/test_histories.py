"""Random histories against an engine that reads its cache: whatever happens, the tokens are right and everything comes
back."""

import random
from collections import Counter

import pytest
from headway_core.batching.scheduling_policies import Fcfs, PriorityPreemptive, ShortestJobFirst, SloAware
from headway_core.contract.policy import Knobs
from headway_core.errors import Unschedulable
from headway_core.latency import StepTimeModel, calibration_shapes

HISTORIES = {"priority": 350, "slo-aware": 250, "shortest": 200, "fcfs": 100}
"""At each depth."""


def step_times():
    model = StepTimeModel()
    shapes = calibration_shapes(max_num_seqs=8, prefill_token_budget=64, max_model_len=64, pool_tokens=512)
    model.calibrate(
        (shape, 0.3 + 0.02 * (shape.prefill_tokens + shape.decode_rows) + 1e-4 * shape.context_tokens)
        for shape in shapes
    )
    return model


STEP_TIMES = step_times()

POLICIES = {
    "priority": lambda promote_after: PriorityPreemptive(promote_after=promote_after),
    "slo-aware": lambda promote_after: SloAware(
        promote_after=promote_after, step_times=STEP_TIMES, least_budget=3, longest_iteration=1.0
    ),
    "shortest": lambda promote_after: ShortestJobFirst(promote_after=promote_after),
    "fcfs": lambda promote_after: Fcfs(),
}


def history(engine, rng, policy, depth):
    """One history, checked after every call; returns the engine when all is over."""
    block_size = rng.choice([1, 2, 4, 8])
    run = engine(
        blocks=rng.randint(3, 14) * max(1, 4 // block_size) + 2,
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        budget=rng.choice([1, 3, 7, 16, 64]),
        depth=depth,
        policy=POLICIES[policy](rng.choice([None, 5.0, 40.0])),
        prefix_caching=rng.random() < 0.8,
    )
    heads = [[rng.randrange(50) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    for _ in range(rng.randint(10, 45)):
        if rng.random() < 0.35:
            prompt = rng.choice(heads) + [rng.randrange(50) for _ in range(rng.randint(0, 8))]
            members = rng.choice([1, 1, 1, 1, 2, 3])
            group = rng.randrange(10**9) if members > 1 else None
            priority, length = rng.choice([0, 0, 1, 2]), rng.randint(1, 20)
            options = rng.choice(
                [{"length": length}, {"max_tokens": length}, {"length": length, "max_tokens": length + 3}]
            )
            for _ in range(members):
                try:
                    run.add(prompt, priority=priority, group=group, tpot_target=rng.choice([None, 0.5, 2.0]), **options)
                except Unschedulable:
                    run.seen["unschedulable"] += 1
        if rng.random() < 0.06 and run.alive():
            victim = rng.choice(run.alive())
            run.seen[f"cancelled {victim.state.value}"] += 1
            run.cancel(victim)
        if rng.random() < 0.05:
            run.scheduler.set_knobs(Knobs(rng.randint(1, 6), rng.choice([1, 5, 32])))
            run.seen["limits changed"] += 1
        run.step()
    run.run()
    run.check_end()
    return run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_history_ends_with_the_right_tokens_and_nothing_lost(engine, policy, depth):
    seen: Counter[str] = Counter()
    histories = HISTORIES[policy]
    for seed in range(histories):
        try:
            run = history(engine, random.Random(seed * 8 + depth), policy, depth)
        except Exception as error:
            error.add_note(f"history {seed} of {policy} at depth {depth}")
            raise
        counters = run.scheduler.counters
        seen += run.seen
        seen["finished"] += counters.finished
        seen["preempted for blocks"] += counters.preemptions_for_blocks
        seen["preempted for slots"] += counters.preemptions_for_slots
        seen["recomputed tokens"] += counters.recomputed_tokens
        seen["tokens hit from others"] += counters.prefix_hit_tokens
        seen["promoted"] += sum(seq.promoted for seq in run.sequences.values())
        assert counters.preemptions == sum(seq.preemptions for seq in run.sequences.values())
        assert counters.finished + counters.cancelled == len(run.sequences)
    # The histories contain what they are there for.
    assert seen["finished"] > 5 * histories
    assert seen["tokens hit from others"] > 10 * histories
    for kind in ("unschedulable", "cancelled waiting", "cancelled running", "limits changed"):
        assert seen[kind] > histories / 10, kind
    if policy == "fcfs":
        assert seen["preempted events"] == seen["recomputed tokens"] == 0
        return
    assert seen["preempted for blocks"] > histories / 2
    assert seen["recomputed tokens"] > 2 * histories
    assert seen["mid-prefill"] > histories / 50
    assert seen["after the first token"] > histories / 50
    assert seen["on a block boundary"] > histories / 4
    assert seen["cancelled preempted"] > 0
    assert seen["promoted"] > histories
    assert (seen["with work in flight"] > histories / 2) == (depth == 2)
    assert (seen["preempted for slots"] > histories / 10) == (policy in ("priority", "slo-aware"))
