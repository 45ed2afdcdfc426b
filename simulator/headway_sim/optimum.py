"""The clairvoyant bound: the most requests that one server can finish on time, all arrivals known beforehand.

With one slack for all (deadline = arrival + slack), Moore's rule with release times is exact (Kise, Ibaraki, Mine: "A
solvable case of the one-machine scheduling problem with ready and due times", Operations Research 26, 1978): take
requests in order of arrival; when one would be late, drop from the current busy period the one whose removal brings the
end forward most. Removing k brings it forward by min(work of k, least wait among those after k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def most_on_time(arrivals: Sequence[float], works: Sequence[float], slack: float) -> list[int]:
    """Indices of a largest set of requests that can all end within `slack` of their arrival, in order of arrival.

    `arrivals` in rising order, `works` in seconds of the server, no preemption.
    """
    if any(later < earlier for earlier, later in pairwise(arrivals)):
        raise ValueError("arrivals must be in rising order")
    kept: list[int] = []
    starts: list[float] = []
    begin = 0
    """Position in `kept` at which the current busy period begins."""
    end = -math.inf
    for index, (arrival, work) in enumerate(zip(arrivals, works, strict=True)):
        if arrival >= end:
            begin = len(kept)
        kept.append(index)
        starts.append(max(arrival, end))
        end = starts[-1] + work
        if end <= arrival + slack:
            continue
        drop = _best_drop(kept, starts, begin, arrivals, works)
        shift = works[kept[drop]]
        del kept[drop], starts[drop]
        for position in range(drop, len(kept)):
            shift = min(shift, starts[position] - arrivals[kept[position]])
            starts[position] -= shift
            if starts[position] <= arrivals[kept[position]]:
                begin = max(begin, position)
        end = starts[-1] + works[kept[-1]] if kept else -math.inf
    return kept


def _best_drop(
    kept: list[int], starts: list[float], begin: int, arrivals: Sequence[float], works: Sequence[float]
) -> int:
    best, gain = len(kept) - 1, works[kept[-1]]
    least_wait = starts[-1] - arrivals[kept[-1]]
    for position in range(len(kept) - 2, begin - 1, -1):
        if least_wait <= gain:
            break
        here = min(works[kept[position]], least_wait)
        if here > gain:
            best, gain = position, here
        least_wait = min(least_wait, starts[position] - arrivals[kept[position]])
    return best
