"""One request's life in the engine: states, legal moves, and the counts that an iteration is planned from.

No token values and no text: a sequence is lengths, block numbers and digests. Who decides its moves is the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """Where a sequence is. Prefill and decode are one state: `num_computed` of its `num_tokens` are in the cache."""

    WAITING = "waiting"
    """Never ran: holds neither slot nor blocks."""
    RUNNING = "running"
    """Holds a slot and blocks. A partial prefill that gets no budget for a while is paused here and keeps both."""
    PREEMPTED = "preempted"
    """Was evicted: holds nothing, and computes all its tokens again when it resumes."""
    FINISHED = "finished"


class Move(Enum):
    """What can happen to a sequence."""

    START = "start"
    PREEMPT = "preempt"
    FINISH = "finish"


MOVES: dict[tuple[State, Move], State] = {
    (State.WAITING, Move.START): State.RUNNING,
    (State.WAITING, Move.FINISH): State.FINISHED,
    (State.RUNNING, Move.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Move.FINISH): State.FINISHED,
    (State.PREEMPTED, Move.START): State.RUNNING,
    (State.PREEMPTED, Move.FINISH): State.FINISHED,
}
"""Every legal move. What is not here is refused and changes nothing."""


class IllegalMove(ValueError):
    """A move that the table does not have: a fault of the caller, never of a request."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The first block of fields is the owner's to set; the rest is the scheduler's, to be read only."""

    seq_id: int
    """Unique among the sequences that the scheduler knows."""
    priority: int
    """Its class's priority: higher goes first."""
    arrival: float
    """Seconds, on the clock that is passed as `now`."""
    num_prompt: int
    """Prompt tokens, at least 1."""
    max_tokens: int | None = None
    """Most tokens to generate, at least 1. None: as many as the pool can hold, so it is never refused for that."""
    digests: list[bytes] = field(default_factory=list)
    """Prefix digests of its full blocks (see `batching.digests`). The owner may append as tokens become known."""
    group: int | None = None
    """Sequences of one group have one prompt: the first added leads, the others wait until its prompt can be reused."""
    tpot_target: float | None = None
    """Target in seconds per output token, for policies that keep it."""
    ttft_target: float | None = None
    """Target in seconds to the first token, for policies that keep it."""

    state: State = State.WAITING
    epoch: int = 0
    """A larger number after each eviction: results that carry an older one are dropped."""
    most_tokens: int = 0
    """What it can come to: the prompt and max_tokens, capped by the pool when max_tokens was left open."""
    num_tokens: int = 0
    """Known tokens: the prompt and what was sampled and counted since."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache, by plans that are complete."""
    num_inflight: int = 0
    """Tokens being computed by plans that are not complete."""
    prefill_end: int = 0
    """This epoch's prefill covers tokens [0, prefill_end), those known when it started; what comes after is decode."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    """Its first blocks that can be found by others, or need not be since their content was known already."""
    publish_at: int = 0
    """The number of computed tokens at which another block is full."""
    slot: int | None = None
    last_plan: int | None = None
    """The newest plan that reads or writes its blocks."""
    previous_plan: int | None = None
    """The one before that: `last_plan` again if the sequence is evicted while the newest is being built."""
    first_token_at: float | None = None
    preemptions: int = 0
    max_computed: int = 0
    """Most tokens that were ever computed before an eviction: computing below this is recomputing."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when it first started."""
    idle_since: float | None = None
    """Since when it has been waiting or paused; None while it is in iterations."""
    waited: float = 0.0
    """Seconds that it waited or was paused before `idle_since`."""
    promoted: bool = False
    """It waited longer than `promote_after` and goes before all others now (`headway_core.batching.ageing`)."""

    def __post_init__(self) -> None:
        if self.num_prompt < 1:
            raise ValueError(f"a prompt has at least 1 token, not {self.num_prompt}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        self.num_tokens = self.num_prompt

    def move(self, move: Move) -> None:
        """Makes a legal move. Raises IllegalMove, and changes nothing, when the table does not have it."""
        target = MOVES.get((self.state, move))
        if target is None:
            raise IllegalMove(f"sequence {self.seq_id} is {self.state.value}: it cannot {move.value}")
        self.state = target

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def remaining_outputs(self) -> int:
        """Most tokens that it may still generate; known once it was added to a scheduler."""
        return self.most_tokens - self.num_tokens

    @property
    def remaining_prefill(self) -> int:
        """Tokens to compute before its next token: all of them while it holds nothing."""
        if self.state is State.RUNNING:
            return max(0, self.prefill_end - self.num_computed)
        return 0 if self.state is State.FINISHED else self.num_tokens
