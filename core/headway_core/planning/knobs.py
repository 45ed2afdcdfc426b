"""Which `max_num_seqs` and prefill token budget a pool should have, by the mix and the targets, never the load.

`plan_knobs` is all that `headway up` needs. `plan` uses its halves: replicas and knobs never move in the same window.

1. `estimate`: what one replica of the pool can carry, from fresh reports; a lower median, so that one odd replica has
   no veto.
2. `settle`: the knobs to have. Moves only when the median of the estimates of one window left the dead band around the
   knobs decided last, and at most once a window; a new generation of the object clears both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway_core.contract.policy import Knobs
from headway_core.planning.capacity import MeasuredRange, ReplicaCapacity, Targets, Unreachable, Workload, solve
from headway_core.planning.snapshot import ObservedReplica
from headway_core.slo import ServingSLO

SEQUENCES_BAND = 0.03
"""Relative dead band of max_num_seqs, at least one sequence."""
BUDGET_BAND = 0.05
"""Relative dead band of the prefill token budget, at least one token."""
GROWTH = 2.0
"""Raising goes no further than this factor beyond what was ever seen in one iteration."""


@dataclass(frozen=True, slots=True)
class KnobMemory:
    """What `settle` carries from one call to the next. A fresh one is always right; it only knows less."""

    generation: int = -1
    estimates: tuple[tuple[float, float, float], ...] = ()
    """(at, n*, p*) of the last window."""
    decided: Knobs | None = None
    moved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one replica carries. Exactly one of `capacity`, `unreachable` and `unknown` is set."""

    capacity: ReplicaCapacity | None = None
    cautious_rate: float | None = None
    """λ* when nothing beyond `GROWTH` times the largest iteration seen is believed: for taking replicas away."""
    unreachable: Unreachable | None = None
    unknown: str = ""
    """Why neither is known, in words."""


@dataclass(frozen=True, slots=True)
class KnobPlan:
    """The knobs to have (the ones in force when nothing is to change), why, and the memory for the next call."""

    knobs: Knobs
    message: str
    estimate: Estimate
    memory: KnobMemory


def plan_knobs(
    replicas: Sequence[ObservedReplica],
    slo: ServingSLO,
    current: Knobs,
    *,
    memory: KnobMemory,
    now: float,
    stale_after: float = 15.0,
) -> KnobPlan:
    """Estimate and settle, for a caller that only sets knobs. `current`: the knobs of the policy written last."""
    found = estimate(replicas, slo, memory.decided or current, stale_after)
    return settle(found, replicas, slo, current, memory=memory, now=now)


def estimate(replicas: Sequence[ObservedReplica], slo: ServingSLO, current: Knobs, stale_after: float) -> Estimate:
    """The lower median of what the fresh replicas say, for the mix of all of them together."""
    serving = [replica for replica in replicas if replica.serves]
    reports = [replica.report for replica in serving if replica.fresh(stale_after) and replica.report is not None]
    if not reports or 2 * len(reports) < len(serving):
        return Estimate(unknown=f"{len(reports)} of {len(serving)} serving replicas report")
    mixes = [report.mix for report in reports if report.mix is not None]
    finished = sum(mix.requests for mix in mixes)
    load = Workload.of(mixes)
    if load is None or finished < slo.min_samples:
        return Estimate(unknown=f"{finished} requests finished lately, {slo.min_samples} are needed to know the mix")
    measured = [(report, report.step_time) for report in reports if report.step_time is not None]
    if not measured:
        return Estimate(unknown="no replica has measured its step time yet")
    seen = MeasuredRange(
        max(1.0, GROWTH * max(model.max_decode_rows for _, model in measured)),
        max(1.0, GROWTH * max(model.max_prefill_tokens for _, model in measured)),
    )
    targets = Targets.tightest([known.objectives for known in slo.classes], load.prompt)
    found: list[ReplicaCapacity] = []
    cautious: list[float] = []
    refused: list[Unreachable] = []
    for report, model in measured:
        limits, known = report.limits, report.effective
        sequences = current.max_num_seqs or known.max_num_seqs or limits.max_num_seqs
        budget = current.prefill_token_budget or known.prefill_token_budget or limits.prefill_token_budget
        tried = MeasuredRange(max(seen.sequences, float(sequences)), max(seen.prefill_tokens, float(budget)))
        answer = solve(model, load, targets, limits, bounds=slo.bounds, measured=tried)
        if isinstance(answer, Unreachable):
            refused.append(answer)
            continue
        found.append(answer)
        if answer.sequences <= seen.sequences and answer.budget <= seen.prefill_tokens:
            cautious.append(answer.rate)
            continue
        careful = solve(model, load, targets, limits, bounds=slo.bounds, measured=seen)
        if isinstance(careful, ReplicaCapacity):
            cautious.append(careful.rate)
    if len(refused) >= len(found):
        return Estimate(unreachable=refused[0])
    median = sorted(found, key=lambda known: known.sequences)[(len(found) - 1) // 2]
    return Estimate(capacity=median, cautious_rate=statistics.median_low(cautious) if cautious else None)


def settle(
    found: Estimate,
    replicas: Sequence[ObservedReplica],
    slo: ServingSLO,
    current: Knobs,
    *,
    memory: KnobMemory,
    now: float,
    may_move: bool = True,
) -> KnobPlan:
    """The knobs to have. `may_move` False: replicas moved lately, so the estimate is only remembered."""
    if memory.generation != slo.generation:
        memory = replace(memory, generation=slo.generation, estimates=(), moved_at=None)
    base = memory.decided or current
    if found.capacity is None:
        why = found.unreachable.message if found.unreachable else found.unknown
        return KnobPlan(base, f"knobs stay: {why}", found, memory)
    capacity = found.capacity
    kept = tuple(entry for entry in memory.estimates if entry[0] > now - slo.window)
    memory = replace(memory, estimates=(*kept, (now, capacity.sequences, capacity.budget)))
    smooth = replace(
        capacity,
        sequences=statistics.median(entry[1] for entry in memory.estimates),
        budget=statistics.median(entry[2] for entry in memory.estimates),
    )
    found = replace(found, capacity=smooth)
    wanted = Knobs(
        slo.bounds.max_num_seqs.clip(smooth.max_num_seqs),
        slo.bounds.prefill_token_budget.clip(smooth.prefill_token_budget),
    )
    in_force = _in_force(base, replicas)
    message = f"max_num_seqs {wanted.max_num_seqs} is bound by {capacity.binding.value}: {capacity.message}"
    if _within(in_force.max_num_seqs, smooth.sequences, SEQUENCES_BAND) and _within(
        in_force.prefill_token_budget, smooth.budget, BUDGET_BAND
    ):
        return KnobPlan(base, message, found, memory)
    if not may_move or (memory.moved_at is not None and now - memory.moved_at < slo.window):
        message = f"{message}; knobs move at most once in {slo.window:.0f}s, and not in a window of replicas"
        return KnobPlan(base, message, found, memory)
    return KnobPlan(wanted, message, found, replace(memory, decided=wanted, moved_at=now))


def _in_force(decided: Knobs, replicas: Sequence[ObservedReplica]) -> Knobs:
    """Knobs as decided; where nothing was decided, what most replicas run with."""
    effective = [replica.report.effective for replica in replicas if replica.serves and replica.report is not None]
    sequences = decided.max_num_seqs or _most_common([known.max_num_seqs for known in effective])
    budget = decided.prefill_token_budget or _most_common([known.prefill_token_budget for known in effective])
    return Knobs(sequences, budget)


def _most_common(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return statistics.mode(known) if known else None


def _within(knob: int | None, wanted: float, band: float) -> bool:
    """Whether the knob is close enough to the estimate; a knob never seen is not."""
    return knob is not None and abs(knob - max(1.0, wanted)) <= max(1.0, band * knob)
