"""What ways of serving differ in: the order, who may be evicted, and how much prefill an iteration carries.

The scheduler keeps the state and the rules common to all; a policy keeps no state of its own about sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headway_core.batching.deadlines import TokenDeadlines
from headway_core.batching.sequence import Sequence
from headway_core.batching.waiting_queue import Key


@dataclass(frozen=True, slots=True)
class IterationView:
    """The iteration being built, when its decodes are in and its prefill is not."""

    prefill_token_budget: int
    """The knob: most prefill tokens of an iteration."""
    decode_rows: int
    context_tokens: int
    prefill_start: int
    """Tokens already computed of the sequence whose prefill is first in order."""
    deadlines: TokenDeadlines = field(repr=False, compare=False)


class SchedulingPolicy(Protocol):
    """How to serve. `order` must not change while a sequence waits, and ends with its number."""

    @property
    def preempts(self) -> bool:
        """Whether sequences are evicted for blocks, and for slots where `preemption_priority` differs.

        False: a sequence starts only with blocks for its whole length, which it then holds to its end.
        """

    @property
    def promote_after(self) -> float | None:
        """Seconds of waiting after which a sequence goes before all others (see `batching.ageing`); None: never."""

    def order(self, seq: Sequence, /) -> Key:
        """Smaller goes first."""

    def preemption_priority(self, seq: Sequence, /) -> int:
        """Its class for evictions: only a lower priority gives way to a newcomer, and the lowest gives way first."""

    def budget(self, view: IterationView, now: float, /) -> int:
        """Most prefill tokens for this iteration, at least 1; the scheduler also keeps to the knob."""


class StepTimes(Protocol):
    """What a policy wants to know of `headway_core.latency.StepTimeModel`."""

    def largest_prefill(
        self, limit_seconds: float, decode_rows: int, context_tokens: int, *, start: int, at_most: int
    ) -> int | None:
        """Most prefill tokens that fit beside these decodes within the limit; None when nothing is known yet."""

    def decode_seconds(self, decode_rows: int, context_tokens: int) -> float | None:
        """Seconds of an iteration that carries no prefill; None when nothing is known yet."""


@dataclass(frozen=True, slots=True)
class _OneClass:
    """What most policies have in common."""

    def preemption_priority(self, _seq: Sequence) -> int:
        """One class for all."""
        return 0

    def budget(self, view: IterationView, _now: float) -> int:
        """All that the knob allows."""
        return view.prefill_token_budget


@dataclass(frozen=True, slots=True)
class Fcfs(_OneClass):
    """First come, first served, no preemption: the first that lacks blocks for its whole length holds up the others."""

    preempts: bool = False
    promote_after: float | None = None

    def order(self, seq: Sequence) -> Key:
        """By arrival alone."""
        return (seq.arrival, seq.seq_id)


@dataclass(frozen=True, slots=True)
class ShortestJobFirst(_OneClass):
    """The least remaining work (prefill and most possible output) first, in all classes. Long jobs rely on ageing."""

    preempts: bool = True
    promote_after: float | None = 30.0

    def order(self, seq: Sequence) -> Key:
        """The promoted one, then by remaining tokens."""
        return (not seq.promoted, seq.remaining_prefill + seq.remaining_outputs, seq.arrival, seq.seq_id)


@dataclass(frozen=True, slots=True)
class PriorityPreemptive(_OneClass):
    """The default: by class, preempted first, then arrival. A higher class takes slots and blocks from a lower one."""

    preempts: bool = True
    promote_after: float | None = 60.0

    def order(self, seq: Sequence) -> Key:
        """The promoted one, then class, preempted first, arrival."""
        return (not seq.promoted, -seq.priority, seq.preemptions == 0, seq.arrival, seq.seq_id)

    def preemption_priority(self, seq: Sequence) -> int:
        """The class's priority."""
        return seq.priority


@dataclass(frozen=True, slots=True)
class SloAware(PriorityPreemptive):
    """Priority with preemption, and as much prefill as the decodes' TPOT targets allow.

    The budget is the largest p with t(p, n, c) within the tightest TPOT target that can still be kept, whatever slack
    there is, and within `longest_iteration`, since none is cancelled halfway; at least `least_budget`.
    """

    step_times: StepTimes = field(kw_only=True)
    least_budget: int = 16
    longest_iteration: float = 0.5

    def budget(self, view: IterationView, now: float) -> int:
        """Prefill tokens; all that the knob allows while the step time is unknown."""
        most = view.prefill_token_budget
        fastest = self.step_times.decode_seconds(view.decode_rows, view.context_tokens)
        if fastest is None:
            return most
        target = view.deadlines.tightest(fastest, now)
        seconds = self.longest_iteration if target is None else min(target, self.longest_iteration)
        fitting = self.step_times.largest_prefill(
            seconds, view.decode_rows, view.context_tokens, start=view.prefill_start, at_most=most
        )
        return most if fitting is None else max(self.least_budget, fitting)


_BY_NAME: dict[str, Callable[[StepTimes], SchedulingPolicy]] = {
    "priority": lambda _: PriorityPreemptive(),
    "fcfs": lambda _: Fcfs(),
    "sjf": lambda _: ShortestJobFirst(),
    "slo-aware": lambda step_times: SloAware(step_times=step_times),
}

SCHEDULING_POLICIES = tuple(_BY_NAME)
"""Their names, as flags have them; the first is the default."""


def by_name(name: str, step_times: StepTimes) -> SchedulingPolicy:
    """The policy of that name; `step_times` is for those that predict. Raises KeyError."""
    return _BY_NAME[name](step_times)
