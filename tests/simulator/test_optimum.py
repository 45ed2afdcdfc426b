"""The clairvoyant bound against brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from headway_sim.optimum import most_on_time


def feasible(chosen: tuple[int, ...], arrivals: list[float], works: list[float], slack: float) -> bool:
    """With one slack for all, first come first served is the best order for a given set."""
    end = 0.0
    for index in chosen:
        end = max(end, arrivals[index]) + works[index]
        if end > arrivals[index] + slack + 1e-12:
            return False
    return True


def best(arrivals: list[float], works: list[float], slack: float) -> int:
    everybody = range(len(arrivals))
    for size in range(len(arrivals), 0, -1):
        if any(feasible(chosen, arrivals, works, slack) for chosen in itertools.combinations(everybody, size)):
            return size
    return 0


def test_it_equals_brute_force_on_random_instances() -> None:
    rng = random.Random(2)
    partly = 0
    for _ in range(500):
        count = rng.randint(1, 11)
        # Multiples of a quarter: ties, and no rounding.
        arrivals = sorted(rng.randint(0, 6 * count) / 4 for _ in range(count))
        works = [rng.choice([1, 2, 3, 5, 8, 13, 20]) / 4 for _ in range(count)]
        slack = rng.choice([1.0, 2.0, 4.0, 6.5])
        kept = most_on_time(arrivals, works, slack)
        assert feasible(tuple(kept), arrivals, works, slack)
        assert len(kept) == best(arrivals, works, slack)
        partly += 0 < len(kept) < count
    assert partly > 250, "instances where everything or nothing fits prove nothing"


def test_arrivals_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="rising"):
        most_on_time([1.0, 0.5], [1.0, 1.0], 2.0)
    assert most_on_time([], [], 1.0) == []
