"""A run in figures: targets met over all offered, per class and per prompt-length quartile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headway_core.admission import PredictionSample
from headway_core.histogram import LogHistogram

from headway_sim.attempt import Attempt
from headway_sim.simulation import SimulationRun


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One group of requests. Shares are over all offered: shed and failed ones are misses. None: nothing to count."""

    offered: int
    admitted: int
    shed: dict[str, int]
    unschedulable: int
    """Requests that no KV pool of these replicas can ever hold."""
    ttft_attainment: float | None
    """Share whose first token came in time."""
    tpot_attainment: float | None
    """Share that kept TPOT, of those whose class has one, answers of a single token apart."""
    good_share: float | None
    """Share for which every token came by arrival + TTFT + i·TPOT + grace."""
    goodput: float
    """Those, per second."""
    slo_met: float | None
    """Share of the admitted whose first token came in time."""
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    """Mean over requests of (last - first token) / (n - 1)."""
    tpot_p50: float | None
    tpot_p95: float | None
    tpot_p99: float | None
    itl_p99: float | None

    @classmethod
    def of(cls, attempts: Sequence[Attempt], seconds: float) -> RunFigures:
        """Figures of these attempts, from a run of so many seconds."""
        admitted = [attempt for attempt in attempts if attempt.admitted]
        shed: dict[str, int] = {}
        for attempt in attempts:
            if attempt.shed is not None:
                shed[attempt.shed.value] = shed.get(attempt.shed.value, 0) + 1
        good = sum(attempt.good for attempt in attempts)
        tpots = [tpot for attempt in attempts if (tpot := attempt.tpot) is not None]
        gaps = LogHistogram()
        for attempt in attempts:
            gaps.merge(attempt.gaps.counts)
        ttfts = [ttft for attempt in attempts if (ttft := attempt.ttft) is not None]
        return cls(
            offered=len(attempts),
            admitted=len(admitted),
            shed=shed,
            unschedulable=sum(attempt.unschedulable for attempt in attempts),
            ttft_attainment=_share(attempt.ttft_kept for attempt in attempts),
            tpot_attainment=_share(kept for attempt in attempts if (kept := attempt.tpot_kept) is not None),
            good_share=_share(attempt.good for attempt in attempts),
            goodput=good / seconds if seconds else 0.0,
            slo_met=_share(attempt.ttft_kept for attempt in admitted),
            ttft_p50=_quantile(ttfts, 0.5),
            ttft_p95=_quantile(ttfts, 0.95),
            ttft_p99=_quantile(ttfts, 0.99),
            tpot_mean=fmean(tpots) if tpots else None,
            tpot_p50=_quantile(tpots, 0.5),
            tpot_p95=_quantile(tpots, 0.95),
            tpot_p99=_quantile(tpots, 0.99),
            itl_p99=gaps.quantile(0.99),
        )


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Signed error of predicted TTFT, predicted - actual seconds."""

    compared: int
    mean: float | None
    median: float | None
    p05: float | None
    p95: float | None

    @classmethod
    def of(cls, comparisons: Iterable[PredictionSample]) -> ErrorFigures:
        """Of these comparisons."""
        errors = [comparison.error for comparison in comparisons]
        return cls(
            len(errors),
            fmean(errors) if errors else None,
            _quantile(errors, 0.5),
            _quantile(errors, 0.05),
            _quantile(errors, 0.95),
        )


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Everything that a run is judged by."""

    seconds: float
    total: RunFigures
    classes: dict[str, RunFigures]
    quartiles: tuple[RunFigures, ...]
    """By prompt length, the shortest first."""
    error_admitted: ErrorFigures
    error_shed: ErrorFigures
    prefill_tokens_per_second: float
    cached_share: float
    """Of the prompt tokens that were served, how many came from prefix caches."""
    preemptions: int
    busy: tuple[float, ...]

    @classmethod
    def of(cls, run: SimulationRun) -> SimulationReport:
        """The figures of a run."""
        names = dict.fromkeys(attempt.priority_class.name for attempt in run.attempts)
        served = run.prefilled_tokens + run.cached_tokens
        return cls(
            seconds=run.seconds,
            total=RunFigures.of(run.attempts, run.seconds),
            classes={
                name: RunFigures.of([a for a in run.attempts if a.priority_class.name == name], run.seconds)
                for name in names
            },
            quartiles=tuple(
                RunFigures.of([a for a in run.attempts if a.quartile == quartile], run.seconds) for quartile in range(4)
            ),
            error_admitted=ErrorFigures.of(comparison for comparison in run.comparisons if not comparison.shed),
            error_shed=ErrorFigures.of(comparison for comparison in run.comparisons if comparison.shed),
            prefill_tokens_per_second=run.prefilled_tokens / run.seconds if run.seconds else 0.0,
            cached_share=run.cached_tokens / served if served else 0.0,
            preemptions=run.preemptions,
            busy=run.busy,
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``json.dump``."""
        return dataclasses.asdict(self)


def _share(kept: Iterable[bool]) -> float | None:
    values = list(kept)
    return sum(values) / len(values) if values else None


def _quantile(values: list[float], q: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else None
