"""Everything the scheduler holds, and the moves that change it: each is one method that leaves all parts consistent.

No decisions here: who starts, who is evicted and how much is computed is `headway_core.batching.scheduler`'s.
"""

from __future__ import annotations

import heapq
from collections import Counter

from headway_core.batching.ageing import Ageing
from headway_core.batching.block_pool import BlockPool
from headway_core.batching.deadlines import TokenDeadlines
from headway_core.batching.groups import Groups
from headway_core.batching.iteration_plan import Event, EventKind
from headway_core.batching.scheduler_load import ClassTally, SchedulerCounters
from headway_core.batching.scheduling_policies import SchedulingPolicy
from headway_core.batching.sequence import Move, Sequence, State
from headway_core.batching.waiting_queue import WaitingQueue

NEVER = 1 << 62
"""A number of tokens that no sequence comes to."""


class SchedulerState:
    """Sequences, blocks, slots, queues and counts of one engine."""

    def __init__(self, num_blocks: int, block_size: int, policy: SchedulingPolicy, prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least 1 token, not {block_size}")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.sequences: dict[int, Sequence] = {}
        """All that are not finished."""
        self.waiting = WaitingQueue(policy.order)
        self.groups = Groups()
        self.prefilling: dict[int, Sequence] = {}
        """Running, and part of their prefill is in no plan yet."""
        self.decoding: dict[int, Sequence] = {}
        """Running, and all of their prefill is computed or in flight."""
        self.ageing = Ageing(policy.promote_after)
        self.deadlines = TokenDeadlines()
        self.tally = ClassTally()
        self.counters = SchedulerCounters()
        self.running_priorities: Counter[int] = Counter()
        """The policy's `preemption_priority` → how many run with it; only priorities that somebody has."""
        self.events: list[Event] = []
        self.freed_slots: list[int] = []
        self._free_slots: list[int] = []
        self._slots = 0
        self._epochs = 0

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.prefilling) + len(self.decoding)

    def running_sequences(self) -> list[Sequence]:
        """Those that hold a slot."""
        return [*self.prefilling.values(), *self.decoding.values()]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def find(self, seq: Sequence) -> list[int]:
        """The cached blocks that `seq` could begin with; never all of it: computing its last token gives the next."""
        if not self.prefix_caching:
            return []
        return self.pool.match(seq.digests[: (seq.num_tokens - 1) // self.block_size])

    def enter(self, seq: Sequence, now: float) -> None:
        """A newcomer."""
        seq.epoch = self._next_epoch()
        self.sequences[seq.seq_id] = seq
        self.tally.add(seq)
        reusable = self.prefix_caching and seq.digests and seq.num_prompt > self.block_size
        if not (reusable and self.groups.hold(seq)):
            self._wait(seq, now)

    def start(self, seq: Sequence, hits: list[int], blocks: int, now: float) -> int:
        """A waiting sequence gets a slot, which is returned, and `blocks` blocks, `hits` of them from the cache."""
        self.waiting.remove(seq)
        self.ageing.working(seq, now)
        self.tally.remove(seq)
        resumed = seq.state is State.PREEMPTED
        seq.move(Move.START)
        self.pool.hold(hits)
        seq.blocks = hits + self.pool.allocate(blocks - len(hits))
        seq.num_computed = len(hits) * self.block_size
        seq.prefill_end = seq.num_tokens
        seq.num_published = len(hits)
        seq.publish_at = seq.num_computed + self.block_size if self.prefix_caching else NEVER
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self._slots
            self._slots += 1
        seq.slot = slot
        if resumed:
            self.counters.resumed_hit_tokens += seq.num_computed
        else:
            self.counters.prefix_hit_tokens += seq.num_computed
            seq.cached_tokens = seq.num_computed
        self.prefilling[seq.seq_id] = seq
        self.running_priorities[self.policy.preemption_priority(seq)] += 1
        self.tally.add(seq)
        return slot

    def preempt(self, seq: Sequence, now: float) -> None:
        """A running sequence loses what it holds and waits again; what it has in flight is dropped."""
        self.tally.remove(seq)
        seq.max_computed = max(seq.max_computed, seq.num_computed)
        self._release(seq)
        seq.move(Move.PREEMPT)
        seq.preemptions += 1
        seq.epoch = self._next_epoch()
        seq.num_computed = seq.num_inflight = seq.prefill_end = 0
        self.tally.add(seq)
        self._wait(seq, now)
        self.events.append(Event(EventKind.PREEMPTED, seq.seq_id))

    def leave(self, seq: Sequence, now: float) -> None:
        """A sequence ends, in whatever state it is."""
        self.tally.remove(seq)
        del self.sequences[seq.seq_id]
        if seq.state is State.RUNNING:
            self._release(seq)
        elif seq.seq_id in self.waiting:
            self.waiting.remove(seq)
        seq.move(Move.FINISH)
        successor = self.groups.leave(seq)
        if successor is not None:
            self._wait(successor, now)

    def grow(self, seq: Sequence) -> tuple[int, ...]:
        """One more block, which must be available."""
        new = self.pool.allocate(1)
        seq.blocks += new
        return tuple(new)

    def publish(self, seq: Sequence) -> None:
        """Makes its full computed blocks findable, as far as their digests are known by now."""
        full = seq.num_computed // self.block_size
        while seq.num_published < min(full, len(seq.digests)):
            self.pool.publish(seq.blocks[seq.num_published], seq.digests[seq.num_published])
            seq.num_published += 1
        seq.publish_at = (full + 1) * self.block_size

    def prompt_computed(self, seq: Sequence, now: float) -> None:
        """Its prompt is in the cache: those that were held back for it may start."""
        for follower in self.groups.published(seq):
            self._wait(follower, now)

    def promote(self, seq: Sequence) -> None:
        """From now on it goes before everybody."""
        waits = seq.seq_id in self.waiting
        if waits:
            self.waiting.remove(seq)
        seq.promoted = True
        if waits:
            self.waiting.add(seq)

    def check(self) -> None:
        """Checks that all parts agree. Raises AssertionError; for tests, since it reads every sequence and block."""
        running = self.running_sequences()
        self.pool.check(seq.blocks for seq in running)
        self.tally.check(self.sequences.values())
        slots = {seq.slot for seq in running}
        if None in slots or len(slots) != len(running) or len(slots) + len(self._free_slots) != self._slots:
            raise AssertionError(f"{len(running)} run in slots {slots}, {len(self._free_slots)} of {self._slots} free")
        priorities = Counter(map(self.policy.preemption_priority, running))
        if priorities != self.running_priorities:
            raise AssertionError(f"{priorities} run, and the state says {self.running_priorities}")
        if len(running) + len(self.waiting) + len(self.groups) != len(self.sequences):
            raise AssertionError(f"{len(self.sequences)} sequences are not where they should be")
        for seq in self.sequences.values():
            runs = seq.state is State.RUNNING
            places = (seq.seq_id in self.prefilling) + (seq.seq_id in self.decoding)
            if places != runs or runs != (seq.slot is not None) or runs != bool(seq.blocks):
                raise AssertionError(f"sequence {seq.seq_id} is {seq.state.value} and does not hold what it should")
            if seq.num_computed + seq.num_inflight > len(seq.blocks) * self.block_size:
                raise AssertionError(f"sequence {seq.seq_id} has too few blocks for what it computed")

    def _wait(self, seq: Sequence, now: float) -> None:
        self.waiting.add(seq)
        self.ageing.idle(seq, now)

    def _release(self, seq: Sequence) -> None:
        if seq.slot is not None:
            heapq.heappush(self._free_slots, seq.slot)
            self.freed_slots.append(seq.slot)
            seq.slot = None
        priority = self.policy.preemption_priority(seq)
        self.running_priorities[priority] -= 1
        if not self.running_priorities[priority]:
            del self.running_priorities[priority]
        self.pool.release(seq.blocks, after=seq.last_plan)
        seq.blocks = []
        self.prefilling.pop(seq.seq_id, None)
        self.decoding.pop(seq.seq_id, None)
        self.deadlines.leave(seq)

    def _next_epoch(self) -> int:
        # One count for all: when an owner uses a number again, the new sequence is not taken for the old one.
        self._epochs += 1
        return self._epochs
