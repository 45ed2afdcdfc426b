"""Who is in the next iteration. The rules:

1.  Every running decode is in every iteration. Prefill, partial or new alike, gets the prefill budget in order: by
    default class, preempted first, arrival. A partial prefill that gets nothing is paused and keeps slot and blocks.
2.  The prefill budget is the smaller of `prefill_token_budget` and what the policy says. At most `max_num_seqs` run.
    Lowering the knobs ends nobody: above the new value one starts only in exchange for one of a lower class.
3.  A sequence starts or resumes only with blocks for all its known tokens and the next one, and takes them at once:
    prefill never lacks blocks, only a decode that grows does. The first in order that does not fit holds up the others.
4.  A decode that lacks a block evicts (`headway_core.batching.preemption`): the lowest class, least sunk, perhaps
    itself; never the oldest. A waiting higher class evicts a lower one for a slot or for blocks. An evicted sequence
    computes its tokens again when it resumes.
5.  A sequence starts only if a block stays free for each that runs, unless a lower class runs; after its k-th eviction
    it resumes only if 2^k more do (as far as the pool has them). Therefore its own class evicts it at most 1 +
    log2(blocks of the pool) times: after so many it starts in an otherwise empty pool, is the oldest of its class from
    then on, and the oldest is never evicted. Higher classes may evict it more often, until it has waited
    `promote_after` seconds in all: then it is promoted, goes before all others, and is not evicted any more
    (`headway_core.batching.ageing`).
6.  `schedule` may be called again before `complete`: a decode then continues on the token that is still being sampled.
    What such a plan computes for a sequence that has ended or was evicted is dropped, and blocks given up are not used
    again before the plans that touch them are complete.

Counts, numbers and digests only. The clock is the caller's.
"""

from __future__ import annotations

from headway_core.batching.iteration_builder import IterationBuilder
from headway_core.batching.iteration_plan import Event, EventKind, IterationPlan, IterationResult
from headway_core.batching.scheduler_load import SchedulerCounters, SchedulerLoad
from headway_core.batching.scheduler_state import SchedulerState
from headway_core.batching.scheduling_policies import PriorityPreemptive, SchedulingPolicy
from headway_core.batching.sequence import Sequence, State
from headway_core.contract.policy import Knobs
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
        knobs: Knobs,
        policy: SchedulingPolicy | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.policy: SchedulingPolicy = PriorityPreemptive() if policy is None else policy
        self.set_knobs(knobs)
        self._state = SchedulerState(num_blocks, block_size, self.policy, prefix_caching)
        self._in_flight: dict[int, IterationPlan] = {}
        self._plan_id = 0
        self._stable_for = 0
        """What is left of the last plan's `stable_for`; 0 as soon as anything happens."""

    # ------------------------------------------------------------ what the owner does

    def add(self, seq: Sequence, now: float) -> None:
        """Takes a newcomer.

        Raises:
            Unschedulable: the pool could never hold its prompt and one token more, or its explicit max_tokens.
            ValueError: a sequence of this number is here already, or it is not new.
        """
        if seq.seq_id in self._state.sequences or seq.state is not State.WAITING:
            raise ValueError(f"sequence {seq.seq_id} was added before")
        pool_tokens = self.total_blocks * self._state.block_size
        least = seq.num_prompt + (1 if seq.max_tokens is None else seq.max_tokens)
        if least > pool_tokens:
            raise Unschedulable(least, pool_tokens)
        seq.most_tokens = pool_tokens if seq.max_tokens is None else least
        self._stable_for = 0
        self._state.enter(seq, now)

    def cancel(self, seq_id: int, now: float) -> bool:
        """Ends a sequence in whatever state it is; False when there is none of this number. No event follows."""
        seq = self._state.sequences.get(seq_id)
        if seq is None:
            return False
        self._stable_for = 0
        self._state.leave(seq, now)
        self._state.counters.cancelled += 1
        return True

    def set_knobs(self, knobs: Knobs) -> None:
        """The knobs from the next iteration on; lowering them ends nobody (rule 2). Raises ValueError for a None."""
        if knobs.max_num_seqs is None or knobs.prefill_token_budget is None:
            raise ValueError(f"the scheduler needs both knobs, not {knobs}")
        self._stable_for = 0
        self.knobs = knobs
        self.max_num_seqs = knobs.max_num_seqs
        self.prefill_token_budget = knobs.prefill_token_budget

    def schedule(self, now: float) -> IterationPlan | None:
        """The next iteration; None when there is nothing to compute, or nothing before a plan in flight is complete."""
        self._plan_id += 1
        self._stable_for = 0
        overdue = self._state.ageing.overdue(now)
        if overdue is not None:
            self._state.promote(overdue)
        builder = IterationBuilder(
            self._state, self.policy, self.max_num_seqs, self.prefill_token_budget, self._plan_id, now
        )
        builder.add_decodes()
        builder.add_prefills()
        plan = builder.plan(alone=not self._in_flight)
        if plan is not None:
            self._in_flight[plan.plan_id] = plan
        return plan

    def complete(self, result: IterationResult, now: float) -> tuple[Event, ...]:
        """Takes the result of the oldest plan in flight; returns the events since the last call, evictions included.

        Raises ValueError, and changes nothing, for another plan or when an item that sampled has no outcome.
        """
        plan = next(iter(self._in_flight.values()), None)
        if plan is None or plan.plan_id != result.plan_id:
            raise ValueError(f"the next result must be that of plan {plan and plan.plan_id}, not of {result.plan_id}")
        outcomes = {(seq_id, epoch): finished for seq_id, epoch, finished in result.outcomes}
        for seq_id, epoch, _, _, _, samples, _ in plan.items:
            if samples and (seq_id, epoch) not in outcomes:
                raise ValueError(f"plan {plan.plan_id} sampled for sequence {seq_id}: the result has no outcome for it")
        del self._in_flight[plan.plan_id]
        state = self._state
        state.pool.complete(plan.plan_id)
        events, state.events = state.events, []
        sequences, token = state.sequences, EventKind.TOKEN
        sampled = ended = 0
        for seq_id, epoch, _, start, count, samples, _ in plan.items:
            seq = sequences.get(seq_id)
            if seq is None or seq.epoch != epoch:
                continue
            seq.num_inflight -= count
            prefill = start < seq.prefill_end
            if prefill:
                self._count_prefill(seq, start, count)
            seq.num_computed += count
            if seq.num_computed >= seq.publish_at:
                state.publish(seq)
            if not samples:
                continue
            if prefill:
                self._first_token(seq, now)
            seq.num_tokens += 1
            sampled += 1
            events.append(Event(token, seq_id))
            if outcomes[seq_id, epoch] or seq.num_tokens >= seq.most_tokens:
                state.leave(seq, now)
                ended += 1
                events.append(Event(EventKind.FINISHED, seq_id))
        state.counters.output_tokens += sampled
        state.counters.finished += ended
        self._stable_for = 0 if ended else plan.stable_for
        return tuple(events)

    def fast_forward(self, iterations: int) -> None:
        """Does as if the last completed plan had run so many times more and nobody had ended: a simulator's jump.

        Returns no events, and no plan holds the blocks that sequences grew by: not for executors with block tables.
        Raises ValueError for more than what is left of the plan's `stable_for`, or if something happened since.
        """
        if not 0 <= iterations <= self._stable_for:
            raise ValueError(f"{iterations} iterations asked for, and {self._stable_for} are known to be alike")
        self._stable_for -= iterations
        state = self._state
        for seq in state.decoding.values():
            seq.num_computed += iterations
            seq.num_tokens += iterations
            while len(seq.blocks) * state.block_size < seq.num_computed:
                state.grow(seq)
            if seq.num_computed >= seq.publish_at:
                state.publish(seq)
        state.counters.iterations += iterations
        state.counters.output_tokens += iterations * len(state.decoding)

    # ------------------------------------------------------------ what it says about itself

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self._state.pool.num_blocks

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since the beginning."""
        return self._state.counters

    @property
    def released_blocks(self) -> int:
        """Blocks that became available again since the beginning."""
        return self._state.pool.released

    def __len__(self) -> int:
        return len(self._state.sequences)

    def load(self) -> SchedulerLoad:
        """How much it holds now."""
        running = self._state.running
        return SchedulerLoad(
            running=running,
            waiting=len(self._state.sequences) - running,
            free_slots=max(0, self.max_num_seqs - running),
            free_blocks=self._state.pool.available,
            cached_blocks=self._state.pool.num_cached,
            classes=self._state.tally.classes(),
        )

    def check(self) -> None:
        """Checks that all parts of the state agree; for tests. Raises AssertionError."""
        self._state.check()

    def _count_prefill(self, seq: Sequence, start: int, count: int) -> None:
        again = max(0, min(start + count, seq.max_computed) - start)
        self.counters.recomputed_tokens += again
        self.counters.prefill_tokens += count - again
        self._state.tally.count_prefilled(seq, count)

    def _first_token(self, seq: Sequence, now: float) -> None:
        """Its prefill is complete, for the first time or again."""
        self._state.deadlines.join(seq)
        if seq.first_token_at is None:
            seq.first_token_at = now
            self._state.prompt_computed(seq, now)
