"""Builds one iteration: decodes first, then prefill in order, with the evictions that the rules allow.

The rules are stated on top of `headway_core.batching.scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing

from headway_core.batching.iteration_plan import IterationPlan, IterationShape, PlanItem
from headway_core.batching.preemption import victim_for_growth, victims_for_start
from headway_core.batching.scheduler_state import NEVER, SchedulerState
from headway_core.batching.scheduling_policies import IterationView, SchedulingPolicy
from headway_core.batching.sequence import Sequence


class IterationBuilder:
    """Changes the scheduler's state while it builds, so every builder is carried through to `plan`."""

    def __init__(
        self,
        state: SchedulerState,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        prefill_token_budget: int,
        plan_id: int,
        now: float,
    ) -> None:
        self._state = state
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._prefill_token_budget = prefill_token_budget
        self._plan_id = plan_id
        self._now = now
        self._decodes: dict[int, PlanItem] = {}
        self._prefills: dict[int, PlanItem] = {}
        self._budget = 0
        self._evicted = 0
        self._stable_for = 0
        """Further iterations in which nobody who decodes ends or lacks a block."""

    # ------------------------------------------------------------ decodes

    def add_decodes(self) -> None:
        """Every running decode, one token each; evicts where a block is missing."""
        state, decodes, plan_id, block_size = self._state, self._decodes, self._plan_id, self._state.block_size
        least_left = least_slack = NEVER
        for seq in list(state.decoding.values()):
            start = seq.num_computed + seq.num_inflight
            left = seq.most_tokens - 1 - start
            # Evicted since the loop began, or its last token is being sampled already.
            if seq.slot is None or left <= 0:
                continue
            new_blocks: tuple[int, ...] = ()
            slack = len(seq.blocks) * block_size - start
            if slack <= 0:
                if not self._free_a_block_for(seq):
                    continue
                new_blocks = state.grow(seq)
                slack += block_size
            seq.num_inflight += 1
            seq.previous_plan = seq.last_plan
            seq.last_plan = plan_id
            decodes[seq.seq_id] = PlanItem(seq.seq_id, seq.epoch, seq.slot, start, 1, True, new_blocks)
            least_left = left if left < least_left else least_left
            least_slack = slack if slack < least_slack else least_slack
        if decodes:
            # Each decode that runs out of its last block takes one more for every `block_size` iterations.
            blocks_each = state.pool.available // len(decodes)
            self._stable_for = max(0, min(least_left - 2, least_slack - 1 + blocks_each * block_size))

    def _free_a_block_for(self, seq: Sequence) -> bool:
        """Whether this decode gets a block, perhaps by evictions. False: it is evicted, or not in this iteration."""
        pool = self._state.pool
        while not pool.available:
            if pool.coming:
                return False
            victim = victim_for_growth(seq, self._state.running_sequences(), self._policy.preemption_priority)
            if victim is None:
                return False
            self._evict(victim)
            self._state.counters.preemptions_for_blocks += 1
            if victim is seq:
                return False
        return True

    # ------------------------------------------------------------ prefill

    def add_prefills(self) -> None:
        """Hands out the budget to partial prefills and to those that wait, in one order."""
        state, order = self._state, self._policy.order
        if not state.prefilling and not state.waiting:
            return
        partials = sorted(state.prefilling.values(), key=order)
        left = self._budget = self._choose_budget(partials)
        taken = at = 0
        may_start = True
        while left:
            partial = partials[taken] if taken < len(partials) else None
            waiting = state.waiting.at(at) if may_start else None
            if partial is not None and (waiting is None or order(partial) < waiting[0]):
                taken += 1
                if partial.slot is not None:
                    left -= self._add_chunk(partial, partial.slot, left, ())
            elif waiting is not None:
                seq = waiting[1]
                slot = self._try_to_start(seq)
                if slot is not None:
                    left -= self._add_chunk(seq, slot, left, tuple(seq.blocks))
                elif seq.promoted and state.running >= self._max_num_seqs:
                    at += 1  # It waits for a slot. Those behind it may still start in exchange for one that they evict.
                else:
                    may_start = False
            else:
                break
        for partial in partials[taken:]:
            if partial.slot is not None:
                state.ageing.idle(partial, self._now)

    def _choose_budget(self, partials: list[Sequence]) -> int:
        first = self._state.waiting.at(0)
        begins_new = not partials or (first is not None and first[0] < self._policy.order(partials[0]))
        view = IterationView(
            prefill_token_budget=self._prefill_token_budget,
            decode_rows=len(self._decodes),
            context_tokens=_context(self._decodes.values()),
            prefill_start=0 if begins_new else partials[0].num_computed + partials[0].num_inflight,
            deadlines=self._state.deadlines,
        )
        return max(1, min(self._prefill_token_budget, self._policy.budget(view, self._now)))

    def _add_chunk(self, seq: Sequence, slot: int, most: int, new_blocks: tuple[int, ...]) -> int:
        """The next chunk of a running prefill, at most this many tokens; returns its length."""
        state = self._state
        start = seq.num_computed + seq.num_inflight
        count = min(most, seq.prefill_end - start)
        samples = start + count == seq.prefill_end
        seq.num_inflight += count
        seq.previous_plan = seq.last_plan
        seq.last_plan = self._plan_id
        state.ageing.working(seq, self._now)
        if samples:
            state.decoding[seq.seq_id] = state.prefilling.pop(seq.seq_id)
        self._prefills[seq.seq_id] = PlanItem(seq.seq_id, seq.epoch, slot, start, count, samples, new_blocks)
        return count

    def _try_to_start(self, seq: Sequence) -> int | None:
        """Starts a waiting sequence if it gets a slot and blocks, after evictions if need be; its slot, or None."""
        state, pool = self._state, self._state.pool
        own_priority = self._policy.preemption_priority(seq)
        may_evict = self._policy.preempts and any(priority < own_priority for priority in state.running_priorities)
        lacks_slot = state.running >= self._max_num_seqs
        if lacks_slot and not may_evict:
            return None
        hits = state.find(seq)
        blocks = self._blocks_to_start(seq)
        needed = blocks - len(hits) + self._headroom(seq, blocks, may_evict)
        short = needed - (pool.available - pool.unheld(hits))
        if lacks_slot or short > 0:
            # Above a lowered `max_num_seqs` too, one goes for one that comes: the number of those that run never grows.
            gone = self._evict_for(seq, short, hits, lacks_slot) if may_evict else 0
            # What was given up may still be in use by a plan in flight.
            short = needed - (pool.available - pool.unheld(hits))
            if short > 0 or (lacks_slot and not gone):
                return None
        return state.start(seq, hits, blocks, self._now)

    def _blocks_to_start(self, seq: Sequence) -> int:
        # The last token that is generated is never computed.
        tokens = min(seq.num_tokens + 1, seq.most_tokens - 1) if self._policy.preempts else seq.most_tokens - 1
        return self._state.blocks_for(max(tokens, seq.num_tokens))

    def _headroom(self, seq: Sequence, blocks: int, may_evict: bool) -> int:
        """Blocks that must stay free besides its own, lest it is evicted again at once (rule 5)."""
        if not self._policy.preempts:
            return 0
        for_others = 0 if may_evict else self._state.running
        for_itself = 2**seq.preemptions if seq.preemptions else 0
        return int(min(for_others + for_itself, self._state.pool.num_blocks - blocks))

    # ------------------------------------------------------------ evictions

    def _evict_for(self, seq: Sequence, short: int, hits: list[int], lacks_slot: bool) -> int:
        """Evicts lower classes until `seq` has a slot and the `short` blocks it lacks, or nobody; returns how many."""
        pool, kept = self._state.pool, frozenset(hits)

        def enough(victims: Listing[Sequence]) -> bool:
            freed = pool.freed_by((victim.blocks for victim in victims), apart_from=kept)
            return bool(victims or not lacks_slot) and freed >= short

        if enough(()):
            return 0  # Blocks are on their way: nobody has to go.
        for_blocks = short > pool.coming
        victims = victims_for_start(seq, self._state.running_sequences(), self._policy.preemption_priority, enough)
        for victim in victims:
            self._evict(victim)
        if for_blocks:
            self._state.counters.preemptions_for_blocks += len(victims)
        else:
            self._state.counters.preemptions_for_slots += len(victims)
        return len(victims)

    def _evict(self, seq: Sequence) -> None:
        if self._decodes.pop(seq.seq_id, None) or self._prefills.pop(seq.seq_id, None):
            seq.last_plan = seq.previous_plan
        self._evicted += 1
        self._state.preempt(seq, self._now)

    # ------------------------------------------------------------ the plan

    def plan(self, alone: bool) -> IterationPlan | None:
        """The iteration as it is now; None when nothing is in it. `alone`: no other plan is in flight."""
        if not self._decodes and not self._prefills:
            return None
        state, prefills = self._state, self._prefills.values()
        undisturbed = alone and not prefills and not self._evicted and len(self._decodes) == state.running
        plan = IterationPlan(
            plan_id=self._plan_id,
            items=(*self._decodes.values(), *prefills),
            freed_slots=tuple(state.freed_slots),
            shape=IterationShape(
                prefill_tokens=sum(item.count for item in prefills),
                prefill_pairs=sum(item.count * (2 * item.start + item.count) for item in prefills) // 2,
                decode_rows=len(self._decodes),
                context_tokens=_context(self._decodes.values()),
                sampled_rows=len(self._decodes) + sum(item.samples for item in prefills),
            ),
            stable_for=self._stable_for if undisturbed else 0,
            prefill_budget=self._budget if prefills else 0,
        )
        state.freed_slots = []
        state.counters.iterations += 1
        return plan


def _context(decodes: Iterable[PlanItem]) -> int:
    """Tokens held by these decodes, the ones being computed included."""
    total = 0
    for item in decodes:
        total += item.start + 1
    return total
