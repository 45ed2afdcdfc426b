"""Log-bucketed histograms: a quantile is off by at most the growth of one bucket, whatever the range of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GROWTH = 1.08
"""Upper bound of a bucket over its lower bound: a quantile read from the middle is within 4% of the value."""

SMALLEST = 1e-4
"""Values up to this (seconds) share bucket 0."""


def bucket(value: float) -> int:
    """Bucket of `value` seconds: 0 up to `SMALLEST`, else i with SMALLEST·GROWTH^(i-1) < value ≤ SMALLEST·GROWTH^i."""
    if value <= SMALLEST:
        return 0
    return math.ceil(math.log(value / SMALLEST) / math.log(GROWTH) - 1e-9)


def bucket_middle(index: int) -> float:
    """The geometric middle of bucket `index`, seconds."""
    return float(SMALLEST * GROWTH ** (index - 0.5)) if index else SMALLEST


@dataclass(slots=True)
class LogHistogram:
    """Counts per bucket. `counts` is sparse: bucket index → observations since boot."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value` (seconds, finite, not negative) `times` times."""
        if not value >= 0 or math.isinf(value):
            raise ValueError(f"a histogram takes finite values from 0, not {value}")
        index = bucket(value)
        self.counts[index] = self.counts.get(index, 0) + times

    @property
    def total(self) -> int:
        """Observations in all."""
        return sum(self.counts.values())

    def quantile(self, q: float) -> float | None:
        """The value at quantile `q` in (0, 1], within half a bucket; None (unknown, not 0) without observations."""
        total = self.total
        if total == 0:
            return None
        wanted = max(1, math.ceil(q * total - 1e-9))
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= wanted:
                return bucket_middle(index)
        raise AssertionError("the counts add up to the total")

    def merge(self, other: Mapping[int, int]) -> None:
        """Adds the counts of another histogram."""
        for index, count in other.items():
            self.counts[index] = self.counts.get(index, 0) + count

    def since(self, earlier: Mapping[int, int]) -> LogHistogram:
        """What was added after `earlier`, an older reading of the same histogram (never negative)."""
        return LogHistogram({i: n - earlier.get(i, 0) for i, n in self.counts.items() if n > earlier.get(i, 0)})
