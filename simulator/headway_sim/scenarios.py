"""Loads that objectives are tried with: saturation, alternating overload, answers that are long for their prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from headway_core.admission import QueueLimits
from headway_core.admission.rules import OpenAdmission
from headway_core.errors import InvalidInput

from headway_sim.attempt import Attempt
from headway_sim.simulation import SimulationConfig, SimulationRun, simulate
from headway_sim.traces import TraceRequest, at_rate

UNBOUNDED = QueueLimits(requests=1 << 30, bytes=1 << 50, seconds=1e9)
"""For open admission: whoever comes waits until served."""

_MOST_IN_A_FLOOD = 200_000
"""Requests; more are not tried."""


def capacity(lengths: Sequence[TraceRequest], config: SimulationConfig, seconds: float = 20.0) -> float:
    """Prompt tokens per second of these replicas when more waits than they can serve, beside the requests' decodes.

    The first third is left out: slots fill before answers start to end. `lengths` are repeated, without their shared
    heads, to more work than fits into `seconds`.

    Raises:
        InvalidInput: no request fits into the replicas' KV pools, or no flood is too much for them.
    """
    requests = list(lengths)
    while True:
        flood = at_rate(requests, 10 * len(requests) / seconds)
        whole = _flooded(flood, config, seconds)
        if any(attempt.first_token_at is None and not attempt.unschedulable for attempt in whole.attempts):
            break
        if all(attempt.unschedulable for attempt in whole.attempts):
            raise InvalidInput(
                "no request of this trace fits into a replica's KV pool: give it more blocks, or shorten the requests"
            )
        if len(requests) > _MOST_IN_A_FLOOD:
            raise InvalidInput(
                f"{len(requests)} requests in {seconds:.0f} s are no load for these replicas: check their step time"
            )
        requests += [replace(one, prefix=()) for one in requests]
    begun = _flooded(flood, config, seconds / 3)
    served = whole.prefilled_tokens + whole.cached_tokens - begun.prefilled_tokens - begun.cached_tokens
    return served / (whole.seconds - begun.seconds)


def _flooded(flood: Sequence[TraceRequest], config: SimulationConfig, until: float) -> SimulationRun:
    """The flood under open admission, to the instant `until`."""
    drain = until - flood[-1].at
    return simulate(flood, replace(config, rule=OpenAdmission(), queue=UNBOUNDED, retries=0, slowdowns=(), drain=drain))


def alternating(
    lengths: Sequence[TraceRequest], rates: tuple[float, ...], period: float, cycles: int, seed: int = 0
) -> list[TraceRequest]:
    """Poisson arrivals at each rate in turn for `period` seconds, over and over; `lengths` in order, repeated."""
    rng = random.Random(seed)
    trace: list[TraceRequest] = []
    end = period * len(rates) * cycles
    at = 0.0
    while True:
        # Memoryless: an arrival beyond the end of its period is drawn again from there.
        phase = int(at / period)
        at += rng.expovariate(rates[phase % len(rates)])
        if int(at / period) != phase:
            at = (phase + 1) * period
        elif at < end:
            trace.append(replace(lengths[len(trace) % len(lengths)], at=at))
        if at >= end:
            return trace


def output_bound(requests: int, rate: float, prompt: int, mean_output: float, seed: int = 0) -> list[TraceRequest]:
    """Poisson arrivals of short prompts with long answers, geometric in length: the wait is for a slot."""
    rng = random.Random(seed)
    at = 0.0
    trace = []
    for _ in range(requests):
        trace.append(TraceRequest(at, prompt, max(1, round(rng.expovariate(1 / mean_output)))))
        at += rng.expovariate(rate)
    return trace


@dataclass(frozen=True, slots=True)
class CycleFigures:
    """An overload that comes and goes, seen from both sides of admission."""

    admitted: int
    """During overload."""
    admitted_kept: float
    """Share of those whose first token came in time."""
    work: float
    """Prompt tokens of the first tokens given during overload, per second, over the capacity."""
    returns_after: int
    """Repetitions that arrived between two overloads."""
    returns_kept: float | None
    """Share of those whose first token came in time."""
    mean_retry_after: float | None

    @classmethod
    def of(cls, run: SimulationRun, period: float, cycles: int, capacity: float) -> CycleFigures:
        """Of a run over `alternating` with two rates, the first of which is the overload."""
        end = 2 * period * cycles

        def overloaded(at: float) -> bool:
            return at < end and int(at / period) % 2 == 0

        def between(at: float) -> bool:
            return at < end and int(at / period) % 2 == 1

        admitted = [attempt for attempt in run.attempts if attempt.admitted and overloaded(attempt.arrival)]
        served = [
            attempt
            for attempt in run.attempts
            if attempt.first_token_at is not None and overloaded(attempt.first_token_at)
        ]
        returns = [attempt for attempt in run.attempts if attempt.repeated and between(attempt.arrival)]
        told = [attempt.retry_after for attempt in run.attempts if attempt.retry_after is not None]
        return cls(
            admitted=len(admitted),
            admitted_kept=_kept(admitted) or 0.0,
            work=sum(attempt.request.prompt_tokens for attempt in served) / (period * cycles) / capacity,
            returns_after=len(returns),
            returns_kept=_kept(returns),
            mean_retry_after=fmean(told) if told else None,
        )


def _kept(attempts: Sequence[Attempt]) -> float | None:
    return sum(attempt.ttft_kept for attempt in attempts) / len(attempts) if attempts else None
