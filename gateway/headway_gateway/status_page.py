"""The page at /: objectives against what happened, over the last minute, per class and replica.

One HTML file without a build step or outside assets, and the document that it polls. Neither holds a secret.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from headway_core.contract.reports import ClassReport, RuntimeReport
from headway_core.histogram import LogHistogram
from headway_core.slo import PriorityClass

from headway_gateway.pools import Pools, ServedPool

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
SAMPLE_SECONDS = 2.0
WINDOW_SECONDS = 60.0
HISTORY_POINTS = 120
"""Points of the small charts: four minutes."""

_Sample = dict[tuple[str, str], ClassReport]


@cache
def html() -> str:
    """The page."""
    return (files("headway_gateway") / "status.html").read_text(encoding="utf-8")


class RecentWindow:
    """Samples of the counters over the last minutes, from which rates and quantiles of a window follow."""

    def __init__(self, pools: Pools, now: Callable[[], float]) -> None:
        self._pools = pools
        self._now = now
        self._samples: deque[tuple[float, _Sample]] = deque(maxlen=int(WINDOW_SECONDS / SAMPLE_SECONDS) + 1)
        self._history: dict[tuple[str, str], deque[dict[str, float | None]]] = {}

    async def run(self) -> None:
        """Takes a sample every `SAMPLE_SECONDS` until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        """Takes one sample."""
        now, read = self._now(), self._read()
        for pool in self._pools:
            for slo in pool.policy.classes:
                key = (pool.name, slo.name)
                seen = _window(slo, read.get(key), *self._first(key, now))
                points = self._history.setdefault(key, deque(maxlen=HISTORY_POINTS))
                points.append({name: seen[name] for name in ("ttft", "tpot", "attainment", "rate")})
        self._samples.append((now, read))

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        now, read = self._now(), self._read()
        return {
            "state": self._pools.state.value,
            "windowSeconds": WINDOW_SECONDS,
            "sampleSeconds": SAMPLE_SECONDS,
            "pools": [self._pool(pool, now, read) for pool in self._pools],
        }

    def _read(self) -> _Sample:
        return {(pool.name, name): counters.read() for pool in self._pools for name, counters in pool.counters.items()}

    def _first(self, key: tuple[str, str], now: float) -> tuple[ClassReport, float]:
        """The oldest sample within the window, and how many seconds ago it was taken."""
        for at, sample in self._samples:
            if now - at <= WINDOW_SECONDS + SAMPLE_SECONDS and key in sample:
                return sample[key], now - at
        return ClassReport(), 0.0

    def _pool(self, pool: ServedPool, now: float, read: _Sample) -> dict[str, Any]:
        classes = []
        for slo in pool.policy.classes:
            key = (pool.name, slo.name)
            seen = _window(slo, read.get(key), *self._first(key, now))
            classes.append({"name": slo.name, **_targets(slo), **seen, "history": list(self._history.get(key, ()))})
        fleet = pool.admission.fleet
        reports = [(name, fleet.report(name)) for name in fleet]
        down = pool.replicas.down()
        return {
            "name": pool.name,
            "model": pool.model,
            "saturated": pool.admission.saturated(now),
            "ready": pool.ready(now),
            "known": len(reports),
            "classes": classes,
            "replicas": [
                {
                    **_replica(report),
                    "reachable": name not in down,
                    "inFlight": fleet.in_flight(name),
                    "age": fleet.age(name, now),
                }
                for name, report in reports
                if report is not None
            ],
        }


def _targets(slo: PriorityClass) -> dict[str, Any]:
    ttft, tpot = slo.objectives.ttft, slo.objectives.tpot
    return {
        "ttftTarget": ttft.target if ttft else None,
        "ttftPercentile": ttft.percentile if ttft else None,
        "ttftPerThousandPromptTokens": ttft.per_thousand_prompt_tokens if ttft else None,
        "tpotTarget": tpot.target if tpot else None,
        "tpotPercentile": tpot.percentile if tpot else None,
    }


def _window(slo: PriorityClass, counters: ClassReport | None, before: ClassReport, seconds: float) -> dict[str, Any]:
    """Rates, quantiles and attainment since the sample `before`; None where nothing was seen."""
    counters = counters or ClassReport()
    ttft, tpot = LogHistogram(counters.ttft).since(before.ttft), LogHistogram(counters.tpot).since(before.tpot)
    gone = {name: count - before.outcomes.get(name, 0) for name, count in counters.outcomes.items()}
    missed = sum(gone.get(name, 0) for name in ("shed", "upstream_error", "timeout"))
    objectives = slo.objectives

    def attainment(objective: str, missed: int = 0) -> float | None:
        """The share of the judged requests, and `missed` more, that met it."""
        judged = counters.judged.get(objective, 0) - before.judged.get(objective, 0) + missed
        met = counters.attained.get(objective, 0) - before.attained.get(objective, 0)
        return met / judged if judged else None

    return {
        "rate": (counters.offered - before.offered) / seconds if seconds else None,
        "tokenRate": (counters.output_tokens - before.output_tokens) / seconds if seconds else None,
        "ttft": ttft.quantile((objectives.ttft.percentile if objectives.ttft else 95.0) / 100),
        "tpot": tpot.quantile((objectives.tpot.percentile if objectives.tpot else 95.0) / 100),
        "ttftAttainment": attainment("ttft"),
        "tpotAttainment": attainment("tpot"),
        "attainment": attainment("all", missed),
        "shed": gone.get("shed", 0),
        "failed": gone.get("upstream_error", 0) + gone.get("timeout", 0),
        "offered": counters.offered - before.offered,
        "queued": counters.queued,
        "inFlight": counters.in_flight,
    }


def _replica(report: RuntimeReport) -> dict[str, Any]:
    return {
        "name": report.replica_id,
        "state": report.state.value,
        "cordoned": report.cordoned,
        "running": report.running,
        "waiting": report.waiting,
        "slots": report.effective.max_num_seqs or report.limits.max_num_seqs,
        "freeBlocks": report.free_blocks,
        "totalBlocks": report.limits.total_blocks,
        "prefillRate": report.prefill_rate,
        "completionRate": report.completion_rate,
        "emulated": report.emulated_pace,
        "message": report.message,
    }
