"""Who is in the next iteration. The rules:

1.  Every running decode is in every iteration; prefill gets what the budget leaves, in order: by default class, preempted first, arrival,
    a partial prefill or a new one alike. A partial prefill that gets nothing is paused and keeps its row and blocks.
2.  The budget is the smaller of the limit and what the policy says. At most `max_num_seqs` run. Lowering the limits ends nobody: above the
    new limit nobody starts, except in exchange for a lower class, one for one.
3.  A sequence starts or resumes only with blocks for all its known tokens and the next one, and takes them at once. So prefill never lacks
    blocks; only a decode that grows does. Whoever is first in order and does not fit holds up those behind it.
4.  A decode that lacks a block evicts (`headway_core.batching.preemption`): the lowest class, least sunk, perhaps itself; never the oldest.
    A waiting higher class evicts a lower one for a slot or for blocks. An evicted sequence computes its tokens again when it resumes.
5.  After its k-th eviction a sequence resumes only if 2^k blocks stay free besides its own (as far as the pool has them). Therefore its
    own class evicts it at most 1 + log2(blocks of the pool) times: after so many it starts in an otherwise empty pool, is the oldest
    of its class from then on, and the oldest is never evicted. Higher classes may evict it more often, until it has waited `patience`
    seconds in all: then it is promoted, goes before everybody, and is not evicted any more (`headway_core.batching.ageing`).
6.  `schedule` may be called again before `complete`: a decode then continues on the token that is still being sampled. What such a plan
    computes for a sequence that has ended or was evicted is dropped, and blocks given up are not used again before the plans that touch
    them are complete.

Counts, numbers and digests only. The clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

from headway_core.batching.books import Books, blocks_of
from headway_core.batching.load import Counters, Load
from headway_core.batching.plan import Event, EventKind, Item, IterationPlan, IterationResult, Limits, Shape
from headway_core.batching.policies import Policy, PriorityPreemptive, View
from headway_core.batching.preemption import victim_for_growth, victims_for_start
from headway_core.batching.sequence import Sequence, State
from headway_core.errors import Unschedulable


class Scheduler:
    """Plans iterations over a pool of `num_blocks` blocks of `block_size` tokens.

    Plans complete in the order in which they were made. Times are seconds of any steady clock, the same in all calls.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        policy: Policy | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.policy: Policy = PriorityPreemptive() if policy is None else policy
        self.limits = limits
        self._books = Books(num_blocks, block_size, self.policy, prefix_caching)
        self._in_flight: dict[int, IterationPlan] = {}
        self._plan_id = 0
        """Of the plan being drawn up."""
        self._decodes: dict[int, Item] = {}
        self._prefills: dict[int, Item] = {}

    # ------------------------------------------------------------ what the owner does

    def add(self, seq: Sequence, now: float) -> None:
        """Takes a newcomer.

        Raises:
            Unschedulable: the pool could never hold its prompt and one token more, or its explicit max_tokens.
            ValueError: a sequence of this number is here already, or it is not new.
        """
        if seq.seq_id in self._books.sequences or seq.state is not State.WAITING:
            raise ValueError(f"sequence {seq.seq_id} was added before")
        room = self.total_blocks * self._books.block_size
        least = seq.num_prompt + (1 if seq.max_tokens is None else seq.max_tokens)
        if least > room:
            raise Unschedulable(least, room)
        seq.most_tokens = room if seq.max_tokens is None else least
        self._books.enter(seq, now)

    def cancel(self, seq_id: int, now: float) -> bool:
        """Ends a sequence in whatever state it is; False when there is none of this number. No event follows."""
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return False
        self._books.leave(seq, now)
        self._books.counters.cancelled += 1
        return True

    def set_limits(self, limits: Limits) -> None:
        """The knobs from the next iteration on."""
        self.limits = limits

    def schedule(self, now: float) -> IterationPlan | None:
        """The next iteration, or None when there is nothing to compute (or nothing before a plan in flight is complete)."""
        self._plan_id += 1
        overdue = self._books.ageing.overdue(now)
        if overdue is not None:
            self._books.promote(overdue)
        self._draw_up_decodes(now)
        budget = self._draw_up_prefills(now) if self._books.prefilling or self._books.waiting else 0
        return self._commit(budget)

    def complete(self, result: IterationResult, now: float) -> tuple[Event, ...]:
        """Takes the result of the oldest plan in flight; returns what has happened to sequences since the last call, evictions included.

        Raises:
            ValueError: it is not the oldest plan in flight, or an item that sampled has no outcome. Nothing is changed then.
        """
        plan = next(iter(self._in_flight.values()), None)
        if plan is None or plan.plan_id != result.plan_id:
            raise ValueError(f"the next result must be that of plan {plan and plan.plan_id}, not of {result.plan_id}")
        finished = {(seq_id, epoch): ends for seq_id, epoch, ends in result.outcomes}
        for item in plan.items:
            if item.samples and (item.seq_id, item.epoch) not in finished:
                raise ValueError(f"plan {plan.plan_id} sampled for sequence {item.seq_id}, and the result has no outcome for it")
        del self._in_flight[plan.plan_id]
        books = self._books
        books.pool.complete(plan.plan_id)
        sequences = books.sequences
        events = books.events
        books.events = []
        for item in plan.items:
            seq = sequences.get(item.seq_id)
            if seq is None or seq.epoch != item.epoch:
                continue
            seq.num_inflight -= item.count
            if item.start < seq.prefill_end:
                self._count_prefill(seq, item)
            else:
                seq.num_computed += 1
            if seq.num_computed >= seq.publish_at:
                books.publish(seq)
            if not item.samples:
                continue
            if item.start < seq.prefill_end:
                books.deadlines.join(seq)
                if seq.first_token_at is None:
                    seq.first_token_at = now
                    books.prompt_computed(seq, now)
            seq.num_tokens += 1
            events.append(Event(EventKind.TOKEN, seq.seq_id))
            books.counters.output_tokens += 1
            if finished[item.seq_id, item.epoch] or seq.num_tokens >= seq.most_tokens:
                books.leave(seq, now)
                books.counters.finished += 1
                events.append(Event(EventKind.FINISHED, seq.seq_id))
        return tuple(events)

    # ------------------------------------------------------------ what it says about itself

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self._books.pool.num_blocks

    @property
    def counters(self) -> Counters:
        """Totals since the beginning."""
        return self._books.counters

    @property
    def released_blocks(self) -> int:
        """Blocks that became available again since the beginning."""
        return self._books.pool.released

    def __len__(self) -> int:
        return len(self._books.sequences)

    def load(self, now: float) -> Load:
        """How much it holds now."""
        running = self._books.running
        return Load(
            at=now,
            running=running,
            waiting=len(self._books.sequences) - running,
            free_slots=max(0, self.limits.max_num_seqs - running),
            free_blocks=self._books.pool.available,
            cached_blocks=self._books.pool.num_cached,
            classes=self._books.tally.classes(),
        )

    def check(self) -> None:
        """Proves that all books agree; for tests. Raises AssertionError."""
        self._books.check()

    # ------------------------------------------------------------ drawing up an iteration

    def _draw_up_decodes(self, now: float) -> None:
        plan_id, block_size = self._plan_id, self._books.block_size
        decodes = self._decodes
        for seq in list(self._books.decoding.values()):
            start = seq.num_computed + seq.num_inflight
            # Evicted since the loop began, or its last token is being sampled already.
            if seq.row is None or start >= seq.most_tokens - 1:
                continue
            new_blocks: tuple[int, ...] = ()
            if start >= len(seq.blocks) * block_size:
                if not self._make_room_for_one(seq, now):
                    continue
                new_blocks = self._books.grow(seq)
            seq.num_inflight += 1
            seq.previous_plan = seq.last_plan
            seq.last_plan = plan_id
            decodes[seq.seq_id] = Item(seq.seq_id, seq.epoch, seq.row, start, 1, True, new_blocks)

    def _make_room_for_one(self, seq: Sequence, now: float) -> bool:
        """Whether a block is available for this decode, after evictions if need be. False: it sits this iteration out, or was evicted."""
        pool = self._books.pool
        while not pool.available:
            if pool.coming:
                return False
            victim = victim_for_growth(seq, self._books.running_sequences(), self.policy.rank)
            if victim is None:
                return False
            self._evict(victim, now)
            self._books.counters.preemptions_for_blocks += 1
            if victim is seq:
                return False
        return True

    def _draw_up_prefills(self, now: float) -> int:
        """Hands out the budget, and returns it."""
        books, order = self._books, self.policy.order
        partials = sorted(books.prefilling.values(), key=order)
        budget = left = self._budget(partials, now)
        taken = at = 0
        may_start = True
        while left:
            partial = partials[taken] if taken < len(partials) else None
            waiting = books.waiting.at(at) if may_start else None
            if partial is not None and (waiting is None or order(partial) < waiting[0]):
                taken += 1
                if partial.row is not None:
                    left -= self._prefill(partial, left, (), now)
            elif waiting is not None:
                seq = waiting[1]
                if self._try_to_start(seq, now):
                    left -= self._prefill(seq, left, tuple(seq.blocks), now)
                elif seq.promoted and books.running >= self.limits.max_num_seqs:
                    at += 1  # It waits for a slot; those that exchange one do not take it from it.
                else:
                    may_start = False
            else:
                break
        for partial in partials[taken:]:
            if partial.row is not None:
                books.ageing.idle(partial, now)
        return budget

    def _budget(self, partials: list[Sequence], now: float) -> int:
        decodes = self._decodes.values()
        first = self._books.waiting.at(0)
        begins_new = first is not None and (not partials or first[0] < self.policy.order(partials[0]))
        view = View(
            limits=self.limits,
            decode_rows=len(decodes),
            context_tokens=sum(item.start for item in decodes) + len(decodes),
            prefill_start=0 if begins_new or not partials else partials[0].num_computed + partials[0].num_inflight,
            deadlines=self._books.deadlines,
        )
        return max(1, min(self.limits.prefill_token_budget, self.policy.budget(view, now)))

    def _prefill(self, seq: Sequence, most: int, new_blocks: tuple[int, ...], now: float) -> int:
        """Plans the next chunk of a running prefill, at most this many tokens; returns its length."""
        start = seq.num_computed + seq.num_inflight
        count = min(most, seq.prefill_end - start)
        samples = start + count == seq.prefill_end
        seq.num_inflight += count
        seq.previous_plan = seq.last_plan
        seq.last_plan = self._plan_id
        self._books.ageing.working(seq, now)
        if samples:
            self._books.decoding[seq.seq_id] = self._books.prefilling.pop(seq.seq_id)
        self._prefills[seq.seq_id] = Item(seq.seq_id, seq.epoch, seq.row or 0, start, count, samples, new_blocks)
        return count

    def _try_to_start(self, seq: Sequence, now: float) -> bool:
        """Starts a waiting sequence if there is, or can be made, room for it."""
        books, pool = self._books, self._books.pool
        if seq.evicted_in == self._plan_id:
            return False
        own_rank = self.policy.rank(seq)
        may_evict = self.policy.preempts and any(rank < own_rank for rank in books.running_ranks)
        lacks_slot = books.running >= self.limits.max_num_seqs
        if lacks_slot and not may_evict:
            return False
        hits = books.find(seq)
        blocks = self._blocks_to_start(seq)
        needed = blocks - len(hits) + self._headroom(seq, blocks)
        short = needed - (pool.available - pool.unheld(hits))
        if lacks_slot or short > 0:
            if may_evict:
                self._evict_for(seq, short, hits, lacks_slot, now)
            # What was given up may still be in use by a plan in flight.
            short = needed - (pool.available - pool.unheld(hits))
            if short > 0 or books.running >= self.limits.max_num_seqs:
                return False
        books.start(seq, hits, blocks, now)
        return True

    def _evict_for(self, seq: Sequence, short: int, hits: list[int], lacks_slot: bool, now: float) -> None:
        """Evicts lower classes until `seq` has a slot and the `short` blocks that it lacks, or nobody if that cannot be."""
        pool, kept = self._books.pool, frozenset(hits)

        def enough(victims: Listing[Sequence]) -> bool:
            return bool(victims or not lacks_slot) and pool.freed_by(blocks_of(victims), apart_from=kept) >= short

        if enough(()):
            return  # Blocks on their way: nobody has to go.
        for_blocks = short > pool.coming
        for victim in victims_for_start(seq, self._books.running_sequences(), self.policy.rank, enough):
            self._evict(victim, now)
            if for_blocks:
                self.counters.preemptions_for_blocks += 1
            else:
                self.counters.preemptions_for_slots += 1

    def _blocks_to_start(self, seq: Sequence) -> int:
        # The last token that is generated is never computed.
        tokens = min(seq.num_tokens + 1, seq.most_tokens - 1) if self.policy.preempts else seq.most_tokens - 1
        return self._books.blocks_for(max(tokens, seq.num_tokens))

    def _headroom(self, seq: Sequence, blocks: int) -> int:
        """Blocks that must stay free besides its own (rule 5)."""
        if not seq.preemptions:
            return 0
        return int(min(2**seq.preemptions, self.total_blocks - blocks))

    def _evict(self, seq: Sequence, now: float) -> None:
        if self._decodes.pop(seq.seq_id, None) or self._prefills.pop(seq.seq_id, None):
            seq.last_plan = seq.previous_plan
        seq.evicted_in = self._plan_id
        self._books.preempt(seq, now)

    def _commit(self, budget: int) -> IterationPlan | None:
        decodes, prefills = tuple(self._decodes.values()), tuple(self._prefills.values())
        self._decodes, self._prefills = {}, {}
        if not decodes and not prefills:
            return None
        plan = IterationPlan(
            plan_id=self._plan_id,
            items=decodes + prefills,
            freed_rows=tuple(self._books.freed_rows),
            shape=Shape(
                prefill_tokens=sum(item.count for item in prefills),
                prefill_pairs=sum(item.count * (2 * item.start + item.count) for item in prefills) // 2,
                decode_rows=len(decodes),
                context_tokens=sum(item.start for item in decodes) + len(decodes),
                sampled_rows=len(decodes) + sum(item.samples for item in prefills),
            ),
            prefill_budget=budget if prefills else 0,
        )
        self._books.freed_rows = []
        self._in_flight[plan.plan_id] = plan
        self.counters.iterations += 1
        return plan

    def _count_prefill(self, seq: Sequence, item: Item) -> None:
        again = max(0, min(item.start + item.count, seq.high_water) - item.start)
        self.counters.recomputed_tokens += again
        self.counters.prefill_tokens += item.count - again
        seq.num_computed += item.count
        self._books.tally.prefilled(seq, item.count)
