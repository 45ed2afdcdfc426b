"""The formulas against a simulation of the queue that they are about."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

import pytest
from headway_core.queueing import (
    CustomerStream,
    kingman_bound,
    kingman_wait,
    little_number,
    little_wait,
    mg1_priority_waits,
    mg1_wait,
)

Draw = Callable[[random.Random], float]


def simulate(streams: list[tuple[Draw, Draw]], customers: int, seed: int) -> tuple[list[float], float]:
    """One server, non-preemptive priorities (first stream highest): mean wait of each class, and the mean number that
    waits."""
    rng = random.Random(seed)
    arrivals: list[tuple[float, int]] = []
    for rank, (gap, _) in enumerate(streams):
        at = 0.0
        for _ in range(customers):
            at += gap(rng)
            arrivals.append((at, rank))
    arrivals.sort()
    horizon = min(max(at for at, rank in arrivals if rank == k) for k in range(len(streams)))
    arrivals = [entry for entry in arrivals if entry[0] <= horizon]
    waits: list[list[float]] = [[] for _ in streams]
    waiting: list[tuple[int, float]] = []
    free_at = 0.0
    index = 0
    while index < len(arrivals) or waiting:
        if not waiting:
            free_at = max(free_at, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= free_at:
            at, rank = arrivals[index]
            heapq.heappush(waiting, (rank, at))
            index += 1
        rank, at = heapq.heappop(waiting)
        waits[rank].append(free_at - at)
        free_at += streams[rank][1](rng)
    total = sum(sum(one) for one in waits)
    return [sum(one) / len(one) for one in waits], total / horizon


def exponential(mean: float) -> Draw:
    return lambda rng: rng.expovariate(1 / mean)


def test_cobham_matches_simulated_priorities() -> None:
    mean, deterministic = 0.2, 0.5
    streams = [CustomerStream(1.5, mean, 2 * mean**2), CustomerStream(1.0, deterministic, deterministic**2)]
    waits, waiting = simulate(
        [(exponential(1 / 1.5), exponential(mean)), (exponential(1.0), lambda _: deterministic)], 60_000, seed=1
    )
    expected = mg1_priority_waits(streams)
    assert waits[0] == pytest.approx(expected[0], rel=0.05)
    assert waits[1] == pytest.approx(expected[1], rel=0.08)
    assert waits[1] > 3 * waits[0]
    # Little's law ties the same run's queue length to its waits, whatever the discipline.
    assert waiting == pytest.approx(little_number(1.5, waits[0]) + little_number(1.0, waits[1]), rel=0.02)


def test_kingman_matches_mg1_and_bounds_a_bursty_queue() -> None:
    rate, mean = 1.6, 0.5
    assert kingman_wait(rate, mean, 1.0, 1.0) == pytest.approx(mg1_wait(CustomerStream(rate, mean, 2 * mean**2)))
    # Hyperexponential gaps: nine short ones to a long one.
    short, long = 0.2, 0.625 * 10 - 0.2 * 9

    def gap(rng: random.Random) -> float:
        return rng.expovariate(1 / (short if rng.random() < 0.9 else long))

    second = 0.9 * 2 * short**2 + 0.1 * 2 * long**2
    cv = math.sqrt(second - 0.625**2) / 0.625
    (wait,), _ = simulate([(gap, exponential(mean))], 200_000, seed=2)
    assert wait <= kingman_bound(rate, mean, cv, 1.0)
    assert wait == pytest.approx(kingman_wait(rate, mean, cv, 1.0), rel=0.25)
    assert wait > 1.5 * kingman_wait(rate, mean, 1.0, 1.0), "burstiness must matter in this run"


def test_an_overloaded_class_waits_for_ever_and_leaves_those_above_it_finite() -> None:
    high, low = CustomerStream(1.0, 0.4, 0.32), CustomerStream(2.0, 0.5, 0.25)
    first, second = mg1_priority_waits([high, low])
    assert second == math.inf
    # The server is always busy: 40% with the high class, the rest with the low one.
    assert first == pytest.approx((0.4 * 0.32 / 0.8 + 0.6 * 0.25 / 1.0) / 0.6)
    assert mg1_wait(CustomerStream(2.0, 0.5, 0.5)) == math.inf
    assert kingman_wait(2.0, 0.5, 1, 1) == math.inf == kingman_bound(2.0, 0.5, 1, 1)


def test_little_says_nothing_waits_where_nobody_is_and_for_ever_where_nobody_leaves() -> None:
    assert little_wait(0, 0) == 0.0
    assert little_wait(3, 0) == math.inf
    assert little_wait(little_number(4.0, 2.5), 4.0) == 2.5
    assert kingman_bound(0, 1.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize(
    "broken",
    [
        lambda: CustomerStream(-1, 1, 1),
        lambda: CustomerStream(1, 0, 1),
        lambda: CustomerStream(1, 2, 3),
        lambda: CustomerStream(1, 1, math.inf),
        lambda: little_wait(-1, 1),
        lambda: little_number(1, math.nan),
        lambda: kingman_wait(1, 0.5, -1, 1),
    ],
)
def test_meaningless_arguments_are_refused(broken: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"not"):
        broken()
