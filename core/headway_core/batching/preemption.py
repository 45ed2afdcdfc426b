"""Who is evicted when blocks or slots run short. Pure choices; the scheduler carries them out.

* The lowest class first; in it the least sunk, that is the fewest tokens to compute again; then the youngest.
* Never a class above the one that asks, never the promoted one.
* Never the oldest of the highest class that runs, so that somebody always gets to the end.
* Never one that was preempted `SHIELDED_AFTER` times while another can be found.
* A newcomer evicts only strictly lower classes, and nobody at all unless that frees enough blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing

from headway_core.batching.sequence import Sequence

SHIELDED_AFTER = 3

PriorityOf = Callable[[Sequence], int]


def oldest(running: Iterable[Sequence], priority_of: PriorityOf) -> Sequence:
    """The promoted one, else the oldest of the highest class: it must reach its end. `running` is not empty."""
    return min(running, key=lambda seq: (not seq.promoted, -priority_of(seq), seq.arrival, seq.seq_id))


def victim_for_growth(asking: Sequence, running: Listing[Sequence], priority_of: PriorityOf) -> Sequence | None:
    """Who gives way so that the running `asking` gets its next block, perhaps itself; None: nobody may be evicted."""
    kept = oldest(running, priority_of)
    own = priority_of(asking)
    candidates = [
        seq for seq in running if seq is not kept and (priority_of(seq) <= own or asking.promoted) and not seq.promoted
    ]
    return min(candidates, key=lambda seq: _reluctance(seq, priority_of), default=None)


def victims_for_start(
    asking: Sequence,
    running: Listing[Sequence],
    priority_of: PriorityOf,
    enough: Callable[[Listing[Sequence]], bool],
) -> list[Sequence]:
    """The fewest that must give way before `asking` can start, in order of reluctance; empty if none are enough."""
    if not running:
        return []
    kept = oldest(running, priority_of)
    lower = sorted(
        (seq for seq in running if priority_of(seq) < priority_of(asking) and not seq.promoted),
        key=lambda seq: (seq is kept, *_reluctance(seq, priority_of)),
    )
    chosen: list[Sequence] = []
    for seq in lower:
        chosen.append(seq)
        if enough(chosen):
            break
    else:
        return []
    # The last one may be enough without some that came before it.
    for seq in list(chosen):
        rest = [other for other in chosen if other is not seq]
        if rest and enough(rest):
            chosen = rest
    return chosen


def _reluctance(seq: Sequence, priority_of: PriorityOf) -> tuple[bool, int, int, float, int]:
    return (
        seq.preemptions >= SHIELDED_AFTER,
        priority_of(seq),
        seq.num_computed + seq.num_inflight,
        -seq.arrival,
        -seq.seq_id,
    )
