"""The scheduler by itself: what a call costs, and what the reserve of free blocks saves when the KV cache is short.

    python benchmarks/batching.py

No engine runs: plans are completed at once, and time is the step-time formula of `seconds`, a 135M model on two CPU
threads. Costs are this process's CPU time; the comparisons are between runs of the same requests, so they do not depend
on the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from headway_core.batching import iteration_builder
from headway_core.batching.iteration_plan import ItemResult, IterationPlan, IterationResult, IterationShape
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.scheduling_policies import PriorityPreemptive
from headway_core.batching.sequence import Sequence
from headway_core.contract.policy import Knobs

Request = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, output tokens."""


def seconds(shape: IterationShape) -> float:
    """28 ms, 1.4 ms for a prefill token, 2.3 ms for a decode, 2 µs for a token of context."""
    return 0.028 + 0.0014 * shape.prefill_tokens + 0.0023 * shape.decode_rows + 2e-6 * shape.context_tokens


def result_of(plan: IterationPlan) -> IterationResult:
    """Everything sampled, nothing ended early."""
    return IterationResult(
        plan.plan_id, tuple(ItemResult(item.seq_id, item.epoch, False) for item in plan.items if item.samples), None
    )


def cost(running: int, waiting: int = 1000) -> tuple[float, float]:
    """Median CPU microseconds of `schedule` and of `complete` with so many decodes running and others waiting for a
    slot."""
    scheduler = Scheduler(num_blocks=100_000, block_size=16, knobs=Knobs(running, 1_000_000))
    for number in range(running + waiting):
        scheduler.add(Sequence(number, 0, 0.0, 100, max_tokens=2000), 0.0)
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(500):
        before = time.process_time_ns()
        plan = scheduler.schedule(0.0)
        between = time.process_time_ns()
        if plan is None:
            raise RuntimeError("there is work and no plan")
        result = result_of(plan)
        resumed = time.process_time_ns()
        scheduler.complete(result, 0.0)
        times[1].append(time.process_time_ns() - resumed)
        times[0].append(between - before)
    return median(times[0]) / 1000, median(times[1]) / 1000


def serve(requests: list[Request], num_blocks: int, knobs: Knobs) -> tuple[float, int, int]:
    """Simulated seconds, preemptions and recomputed tokens of serving these requests."""
    scheduler = Scheduler(
        num_blocks=num_blocks, block_size=16, knobs=knobs, policy=PriorityPreemptive(), prefix_caching=False
    )
    waiting = sorted(requests, reverse=True)
    now, number = 0.0, 0
    while waiting or len(scheduler):
        while waiting and waiting[-1][0] <= now:
            arrival, prompt, output = waiting.pop()
            scheduler.add(Sequence(number, 0, arrival, prompt, max_tokens=output), now)
            number += 1
        plan = scheduler.schedule(now)
        if plan is None:
            now = waiting[-1][0]
            continue
        now += seconds(plan.shape)
        scheduler.complete(result_of(plan), now)
    return now, scheduler.counters.preemptions, scheduler.counters.recomputed_tokens


SCENARIOS: dict[str, tuple[int, Callable[[random.Random], list[Request]]]] = {
    "48 at once, 64-512 in, 32-128 out, 300 blocks": (
        300,
        lambda rng: [(0.0, rng.randint(64, 512), rng.randint(32, 128)) for _ in range(48)],
    ),
    "96 at once, 20-100 in, 100-400 out, 300 blocks": (
        300,
        lambda rng: [(0.0, rng.randint(20, 100), rng.randint(100, 400)) for _ in range(96)],
    ),
    "150 over 200 s, 20-200 in, 50-300 out, 200 blocks": (
        200,
        lambda rng: [(rng.uniform(0, 200), rng.randint(20, 200), rng.randint(50, 300)) for _ in range(150)],
    ),
}


def main() -> None:
    """Prints both tables."""
    print("CPU microseconds per iteration, 1000 waiting")
    for running in (16, 64, 256):
        schedule, complete = cost(running)
        print(f"  {running:4} running: schedule {schedule:6.0f}   complete {complete:6.0f}")
    print(
        "with the reserve of free blocks / without any (simulated seconds, preemptions, recomputed tokens), "
        "median of 5 seeds"
    )
    kept = iteration_builder.IterationBuilder._headroom
    for name, (num_blocks, requests) in SCENARIOS.items():
        for reserve in (True, False):
            iteration_builder.IterationBuilder._headroom = kept if reserve else (lambda *_: 0)  # type: ignore[method-assign]
            runs = [serve(requests(random.Random(seed)), num_blocks, Knobs(64, 256)) for seed in range(5)]
            time_taken, preemptions, recomputed = (median(column) for column in zip(*runs, strict=True))
            print(
                f"  {name:50} {'with   ' if reserve else 'without'} {time_taken:7.1f} s {preemptions:5.0f} "
                f"{recomputed:7.0f}"
            )
    iteration_builder.IterationBuilder._headroom = kept  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
