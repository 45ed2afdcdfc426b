"""What is known about the replicas at one instant: the snapshot that decisions are taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway_core.admission.request import Request


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica that may be chosen: its last report, less what it has done since, plus what it has not seen yet.

    Mappings go from priority to tokens or requests. Rates are per second; None is unknown.
    """

    replica_id: str
    backlog: Mapping[int, float]
    """Prefill tokens not computed yet."""
    waiting: Mapping[int, int]
    """Requests without a slot."""
    running: Mapping[int, int]
    free_slots: float
    """Negative when more was sent than fits."""
    free_blocks: int
    block_size: int
    budget: int
    """Prefill tokens per iteration, the knob in force."""
    prefill_rate: float | None
    completion_rate: float | None
    block_release_rate: float | None
    iteration: float | None
    in_flight: int = 0
    """Requests that this gateway has open there."""
    slack: float = 0.0
    """Seconds in which nothing new can be learnt from the replica: the round trip, plus one iteration."""

    def backlog_at(self, priority: int) -> float:
        """Prefill tokens that stand before a newcomer of this priority."""
        return sum(tokens for level, tokens in self.backlog.items() if level >= priority)

    def waiting_at(self, priority: int) -> int:
        """Requests that get a slot before a newcomer of this priority."""
        return sum(count for level, count in self.waiting.items() if level >= priority)

    def slots_at(self, priority: int) -> float:
        """Free slots for this priority: a waiting higher class may take the slot of a running lower one."""
        return self.free_slots + sum(count for level, count in self.running.items() if level < priority)

    def accepts(self, request: Request) -> bool:
        """The dispatch window: whether sending it now keeps the engine fed without building a queue there.

        Tokens: backlog ≤ budget + C·slack. Slots and blocks: what is free, plus what will be by the time it arrives.
        Requests that the engine holds can be neither given up nor sent elsewhere, so no more than this goes in. While C
        is unknown the window is one iteration's budget: enough to measure C, too little to build a queue.
        """
        priority = request.priority
        if self.backlog_at(priority) > self.budget + (self.prefill_rate or 0.0) * self.slack:
            return False
        if self.slots_at(priority) + (self.completion_rate or 0.0) * self.slack - self.waiting_at(priority) < 1:
            return False
        release = (self.block_release_rate or 0.0) * self.slack
        return self.idle or self.free_blocks + release >= self.blocks(request)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits: whatever fits the pool at all can go now."""
        return not any(self.running.values()) and not any(self.waiting.values())

    def blocks(self, request: Request) -> int:
        """Blocks that it needs for its prompt and its first token."""
        return -(-(request.uncached_tokens + 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The pool at one instant.

    `waiting` is in service order, the newcomer not in it. `higher_work` says, for each priority, the prefill tokens per
    second that higher classes are still expected to send.
    """

    replicas: tuple[ReplicaLoad, ...]
    waiting: Sequence[Request] = ()
    higher_work: Mapping[int, float] = field(default_factory=dict)
    draining: bool = False
    """This gateway is going away: nothing new is taken."""

    @property
    def prefill_rate(self) -> float | None:
        """C of the pool: the sum over the replicas that know theirs; None when none does."""
        known = [replica.prefill_rate for replica in self.replicas if replica.prefill_rate is not None]
        return sum(known) if known else None

    @property
    def completion_rate(self) -> float | None:
        """X of the pool, likewise."""
        known = [replica.completion_rate for replica in self.replicas if replica.completion_rate is not None]
        return sum(known) if known else None
