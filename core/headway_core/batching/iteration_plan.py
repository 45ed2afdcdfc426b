"""What the scheduler asks of an executor and gets back: integers only, so a plan can be sent to other processes.

`PlanItem`, `ItemResult` and `Event`, made once a token, are named tuples: a frozen dataclass takes 3 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The size of an iteration: the features that its time is predicted from (`headway_core.latency`)."""

    prefill_tokens: int = 0
    """Prompt (or recomputed) tokens computed, over all items."""
    prefill_pairs: int = 0
    """Query-key pairs of those tokens: Σ count·(start + count/2), rounded down."""
    decode_rows: int = 0
    """Items that compute one token beyond the first: the newest token of a running sequence."""
    context_tokens: int = 0
    """Tokens held in the KV cache by the decoding rows, the one being computed included."""
    sampled_rows: int = 0
    """Rows that go through the LM head and the sampler."""


class PlanItem(NamedTuple):
    """One sequence's part in an iteration: compute tokens [start, start + count) of it in `slot` of the batch."""

    seq_id: int
    epoch: int
    """Another number after each eviction, always a larger one: results of an older epoch are dropped."""
    slot: int
    """Its place in the running batch, which it keeps while it runs."""
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks an item for
    samples: bool
    """The last computed token's logits give a new token: only after the last known token of the sequence."""
    new_blocks: tuple[int, ...]
    """Blocks appended to the slot's block table now: in an epoch's first item all of it, shared blocks included."""


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One iteration. Free `freed_slots`, whose sequences left since the last plan, first: an item may use one again."""

    plan_id: int
    items: tuple[PlanItem, ...]
    freed_slots: tuple[int, ...]
    shape: IterationShape
    stable_for: int = 0
    """How many further iterations would be the same pure decode, if nobody arrived, was cancelled or ended before
    max_tokens: lets a simulator jump with `Scheduler.fast_forward`."""
    prefill_budget: int = 0
    """Prefill tokens that this iteration may carry; 0 when it carries none. Filled means that prefill was the limit."""


class ItemResult(NamedTuple):
    """What became of an item that sampled: whether its new token ends the sequence (end token, stop string, abort)."""

    seq_id: int
    epoch: int
    finished: bool


@dataclass(frozen=True, slots=True)
class IterationResult:
    """An executed plan: an `ItemResult` for each item with `samples`, and the seconds it took (None: not measured)."""

    plan_id: int
    outcomes: tuple[ItemResult, ...]
    elapsed: float | None


class EventKind(Enum):
    """What happened to a sequence, as its owner needs to know it."""

    TOKEN = "token"  # noqa: S105 -- a token of text, not a secret
    """A token of this epoch counts: hand it out."""
    FINISHED = "finished"
    PREEMPTED = "preempted"


class Event(NamedTuple):
    """One thing that happened to one sequence, in the order in which it happened."""

    kind: EventKind
    seq_id: int
