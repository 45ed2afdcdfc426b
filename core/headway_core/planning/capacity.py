"""What one replica can carry: from its measured step time and the mix of requests to knobs and requests per second.

In steady state `n` decoding sequences finish n/ō requests an iteration, and as many must be prefilled: s̄·n/ō tokens,
of which the budget keeps the share ρ busy. An iteration must end within the TPOT target T. With the straight line t = a
+ b·p + d·n + e·n·c̄ this gives::

    n* = (T - a) / (b·s̄/(ρ·ō) + d + e·c̄)        sequences
    p* = n*·s̄/(ρ·ō)                              prefill tokens an iteration, no less than TTFT or a KV block needs
    λ* = n*/(ō·T)                                requests per second

The measured model has a knee, prefill pairs and sampled rows besides (`reports.StepTimeReport`), so n* is found by
bisection on that model; on a straight line the answer is the formula's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headway_core.contract.reports import EngineLimits, Mix, StepTimeReport
from headway_core.formatting import format_seconds
from headway_core.slo import Bounds, Objectives, Range

RHO = 0.8
"""ρ: the share of the prefill budget that the mix uses on average; the rest is left for arrivals that come together."""

ITERATION_LIMIT = 0.5
"""Seconds that an iteration may last when no class has a TPOT objective: an iteration is the atom of cancellation."""

PREFILL_SHARE_OF_TTFT = 0.5
"""A mean prompt's own prefill may use this share of its TTFT target; the rest is for waiting."""


class Binding(Enum):
    """What holds a replica's sequences down: the first thing to change for whoever wants more."""

    TPOT = "TPOT"
    ITERATION = "iteration length"
    PREFILL = "prefill token budget"
    KV = "KV blocks"
    CAPACITY = "start-up capacity"
    BOUNDS = "spec.bounds"
    EXPERIENCE = "experience"
    """Nothing far beyond what was ever seen: a fit at low load says nothing about many sequences."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The mean request, in tokens. `cached` are of the prompt; `context` is held by a decoding sequence."""

    prompt: float
    cached: float
    output: float
    context: float

    @classmethod
    def of(cls, mixes: list[Mix]) -> Workload | None:
        """The mean over replicas, weighted by requests; None when no request has finished anywhere."""
        requests = sum(mix.requests for mix in mixes)
        if requests == 0:
            return None

        def mean(value: Callable[[Mix], float]) -> float:
            return sum(value(mix) * mix.requests for mix in mixes) / requests

        output = max(1.0, mean(lambda mix: mix.output_tokens))
        prompt = max(1.0, mean(lambda mix: mix.prompt_tokens))
        cached = min(mean(lambda mix: mix.cached_tokens), prompt - 1)
        return cls(prompt, max(0.0, cached), output, max(1.0, mean(lambda mix: mix.context_tokens)))

    @property
    def prefill(self) -> float:
        """Prompt tokens that must be computed."""
        return self.prompt - self.cached


@dataclass(frozen=True, slots=True)
class Targets:
    """The tightest of all classes. `tpot` seconds or None; `ttft` seconds for the mean prompt or None."""

    tpot: float | None
    ttft: float | None

    @classmethod
    def tightest(cls, objectives: list[Objectives], prompt_tokens: float) -> Targets:
        """One iteration serves every class, so the tightest target of each kind rules."""
        tpot = [known.tpot.target for known in objectives if known.tpot]
        ttft = [known.ttft.limit(round(prompt_tokens)) for known in objectives if known.ttft]
        return cls(min(tpot, default=None), min(ttft, default=None))


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    """How far the model is believed: sequences and prefill tokens of one iteration, each at least 1."""

    sequences: float
    prefill_tokens: float


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """A replica's best knobs and what it carries with them."""

    sequences: float
    """n*, before rounding down."""
    budget: float
    """p*, before rounding up; never less than one KV block."""
    rate: float
    """λ*: requests per second with every target kept."""
    iteration: float
    """Seconds that a full iteration takes by the model."""
    binding: Binding
    message: str
    """The binding term in words, with its numbers."""
    out_of_bounds: str | None = None
    """Set when `spec.bounds` force more than the targets allow."""

    @property
    def max_num_seqs(self) -> int:
        """n* as a knob."""
        return max(1, math.floor(self.sequences + 1e-6))

    @property
    def prefill_token_budget(self) -> int:
        """p* as a knob."""
        return max(1, math.ceil(self.budget - 1e-6))


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No setting keeps the targets. `reason` is a CamelCase word, `message` says by how much."""

    reason: str
    message: str


def step_seconds(model: StepTimeReport, load: Workload, prefill: float, sequences: float) -> float:
    """Seconds of an iteration with `prefill` prompt tokens beside `sequences` decoding ones; both may be fractions.

    A prompt token sees (cached + prompt)/2 tokens before it on average. Each prompt that completes samples one row.
    """
    rows = prefill + sequences
    return (
        model.base
        + model.per_row * min(rows, model.knee)
        + model.per_row_above * max(0.0, rows - model.knee)
        + model.per_context_token * sequences * load.context
        + model.per_prefill_pair * prefill * (load.cached + load.prompt) / 2
        + model.per_sampled_row * (sequences + prefill / load.prefill)
    )


def solve(
    model: StepTimeReport,
    load: Workload,
    targets: Targets,
    capacity: EngineLimits,
    *,
    bounds: Bounds = Bounds(),
    measured: MeasuredRange | None = None,
    rho: float = RHO,
) -> ReplicaCapacity | Unreachable:
    """The most sequences whose iterations keep TPOT while prefill keeps up with the mix, and what goes with them.

    `measured` None: the model is believed at any size.
    """
    limit = targets.tpot or ITERATION_LIMIT
    alone = step_seconds(model, load, 0.0, 1.0)
    if targets.tpot is not None and alone > targets.tpot:
        return Unreachable(
            "TPOTUnreachable",
            f"TPOT {format_seconds(targets.tpot)} unreachable: one sequence already takes {format_seconds(alone)}",
        )
    smallest, most = _budget_range(bounds.prefill_token_budget, capacity, measured)
    fits_beside_one = _largest(lambda p: step_seconds(model, load, p, 1.0) - limit, most)
    floor = 1.0
    if targets.ttft is not None:
        quickest = load.prefill / max(fits_beside_one, 1e-9) * limit
        if quickest > targets.ttft:
            return Unreachable(
                "TTFTUnreachable",
                f"TTFT {format_seconds(targets.ttft)} unreachable: the {load.prefill:.0f} prefill tokens of a mean "
                f"prompt take {format_seconds(quickest)} in iterations of {format_seconds(limit)}",
            )
        floor = load.prefill * limit / (targets.ttft * PREFILL_SHARE_OF_TTFT)
    floor = min(max(floor, float(bounds.prefill_token_budget.min or 1)), max(1.0, fits_beside_one))
    per_sequence = load.prefill / (rho * load.output)

    def budget(sequences: float) -> float:
        return min(max(sequences * per_sequence, floor), most)

    held = math.ceil((load.prompt + load.output) / capacity.block_size)
    blocks, started = capacity.total_blocks, capacity.max_num_seqs
    caps = [
        (blocks / held, Binding.KV, f"{blocks} KV blocks hold sequences of {held} blocks each"),
        (float(started), Binding.CAPACITY, f"the replicas were started with max_num_seqs {started}"),
        (most / per_sequence, Binding.PREFILL, f"{most:.0f} prefill tokens an iteration feed no more"),
    ]
    if bounds.max_num_seqs.max is not None:
        highest = bounds.max_num_seqs.max
        caps.append((float(highest), Binding.BOUNDS, f"spec.bounds.maxNumSeqs.max is {highest}"))
    if measured is not None:
        tried = measured.sequences
        caps.append((tried, Binding.EXPERIENCE, f"no more than {tried:.0f} sequences were tried so far"))
    cap, binding, message = min(caps, key=lambda entry: entry[0])
    keeps = _largest(lambda n: step_seconds(model, load, budget(n), n) - limit, cap)
    if keeps < cap * (1 - 1e-9):
        binding, what = Binding.TPOT, f"TPOT {format_seconds(limit)}"
        if targets.tpot is None:
            binding, what = Binding.ITERATION, f"an iteration of at most {format_seconds(limit)} (no TPOT objective)"
        message = f"{what} is reached with {keeps:.3g} sequences and {budget(keeps):.0f} prefill tokens an iteration"
    sequences, p = keeps, budget(keeps)
    out_of_bounds = None
    least = bounds.max_num_seqs.min
    if least is not None and least > max(1.0, keeps):
        out_of_bounds = (
            f"spec.bounds.maxNumSeqs.min {least} is more than the {keeps:.3g} that {binding.value} allows: "
            f"an iteration takes {format_seconds(step_seconds(model, load, p, least))} of {format_seconds(limit)}"
        )
        sequences, binding, message = float(least), Binding.BOUNDS, f"spec.bounds.maxNumSeqs.min is {least}"
    taken = step_seconds(model, load, p, sequences)
    rate = min(sequences / load.output, rho * p / load.prefill) / taken
    return ReplicaCapacity(sequences, max(p, smallest), rate, taken, binding, message, out_of_bounds)


def _budget_range(bounds: Range, capacity: EngineLimits, measured: MeasuredRange | None) -> tuple[float, float]:
    """(least, most) prefill tokens of an iteration that the knob may ask for.

    The least is a KV block, or `bounds.min`: a mix of short or cached prompts needs next to none on average, and a
    prompt that is neither must still get through. Sequences are not sized for it, since the knob is a ceiling: the
    engine gives less where TPOT leaves less.
    """
    most = float(
        capacity.prefill_token_budget if bounds.max is None else min(capacity.prefill_token_budget, bounds.max)
    )
    least = min(most, float(max(capacity.block_size, bounds.min or 1)))
    return least, most if measured is None else max(least, min(most, measured.prefill_tokens))


def _largest(excess: Callable[[float], float], high: float) -> float:
    """The largest x in [0, high] with excess(x) <= 0, to one part in a million; 0 when there is none.

    `excess` grows with x in a few straight pieces, so regula falsi with the Illinois correction needs few steps.
    """
    over = excess(high)
    if over <= 0:
        return high
    low, under = 0.0, excess(0.0)
    if under > 0:
        return 0.0
    side = 0
    while high - low > 1e-6 * high:
        x = (low * over - high * under) / (over - under)
        value = excess(x)
        if abs(value) <= 1e-9:
            return x
        if value > 0:
            high, over = x, value
            under, side = (under / 2, 1) if side == 1 else (under, 1)
        else:
            low, under = x, value
            over, side = (over / 2, -1) if side == -1 else (over, -1)
    return low
