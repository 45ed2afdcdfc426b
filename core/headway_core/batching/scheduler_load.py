"""What the scheduler says about itself: how much it holds now, and what it has done since the beginning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway_core.batching.sequence import Sequence, State
from headway_core.contract.reports import ClassLoad


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """The present: the part of `headway_core.contract.reports.RuntimeReport` that the scheduler knows."""

    running: int
    waiting: int
    """Waiting, preempted and held back: all that hold nothing."""
    free_slots: int
    free_blocks: int
    """Free and evictable (cached, held by nobody)."""
    cached_blocks: int
    """The evictable part of `free_blocks`."""
    classes: tuple[ClassLoad, ...]
    """By class, the highest first; only those that have somebody here."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the beginning; they only grow."""

    iterations: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed for the first time."""
    recomputed_tokens: int = 0
    """Tokens computed again after an eviction."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that a newcomer found in the cache."""
    resumed_hit_tokens: int = 0
    """Tokens that a preempted sequence found in the cache when it came back."""
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions_for_blocks: int = 0
    preemptions_for_slots: int = 0

    @property
    def preemptions(self) -> int:
        """Evictions of either kind."""
        return self.preemptions_for_blocks + self.preemptions_for_slots


class ClassTally:
    """Waiting, running and remaining prefill by class, kept up to date, so that a load report costs nothing.

    Whoever changes a sequence in one of these takes it out before and puts it in after.
    """

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}

    def add(self, seq: Sequence) -> None:
        """Counts it as it is now."""
        self._count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        """No longer counts it; it must be as it was when it was put in."""
        self._count(seq, -1)

    def count_prefilled(self, seq: Sequence, tokens: int) -> None:
        """So many fewer of its tokens remain."""
        self._counts[seq.priority][2] -= tokens

    def classes(self) -> tuple[ClassLoad, ...]:
        """The classes that have somebody here, the highest first."""
        return tuple(ClassLoad(priority, *self._counts[priority]) for priority in sorted(self._counts, reverse=True))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares the tally with all sequences. Raises AssertionError."""
        fresh = ClassTally()
        for seq in sequences:
            fresh.add(seq)
        if fresh.classes() != self.classes():
            raise AssertionError(f"the tally says {self.classes()}, the sequences {fresh.classes()}")

    def _count(self, seq: Sequence, sign: int) -> None:
        counts = self._counts.setdefault(seq.priority, [0, 0, 0])
        counts[seq.state is State.RUNNING] += sign
        counts[2] += sign * seq.remaining_prefill
        if not counts[0] and not counts[1]:
            del self._counts[seq.priority]
