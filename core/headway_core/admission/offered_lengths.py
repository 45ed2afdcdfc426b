"""Which prompt lengths a pool can carry, from the lengths that were offered lately."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

WINDOW = 1000
"""Arrivals remembered; fewer would follow each burst and refuse what fits when it ends (`docs/decisions/0016`)."""
LEAST = 100
"""Arrivals before which nothing is said."""


class OfferedLengths:
    """The uncached tokens of the last `WINDOW` requests of one class, and when they came."""

    def __init__(self, window: int = WINDOW, least: int = LEAST) -> None:
        if not 1 <= least <= window:
            raise ValueError(f"least lies in [1, window], not {least} with a window of {window}")
        self._window, self._least = window, least
        self._seen: deque[tuple[float, int]] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def add(self, tokens: int, now: float) -> None:
        """A request arrived; instants do not go back."""
        self._seen.append((now, tokens))
        insort(self._sorted, tokens)
        self._total += tokens
        if len(self._seen) > self._window:
            _, gone = self._seen.popleft()
            del self._sorted[bisect_right(self._sorted, gone) - 1]
            self._total -= gone

    def carried(self, rate: float, now: float) -> int | None:
        """The length up to which a pool of `rate` tokens per second carries what was offered, the shortest first.

        None: all of it fits, or too little was seen to say.
        """
        if len(self._seen) < self._least:
            return None
        capacity = rate * (now - self._seen[0][0])
        if self._total <= capacity:
            return None
        return self._sorted[bisect_right(list(accumulate(self._sorted)), capacity)]
