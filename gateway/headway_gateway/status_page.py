"""The page at /: promises against what happened, over the last minute, per class and replica.

One HTML file without a build step or outside assets, and the document that it polls. Nothing in either is a secret: no
keys, no prompts.
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
EVERY = 2.0
WINDOW = 60.0
HISTORY = 120
"""Points of the small charts: four minutes."""

_Reading = dict[tuple[str, str], ClassReport]


@cache
def html() -> str:
    """The page."""
    return (files("headway_gateway") / "status.html").read_text(encoding="utf-8")


class RecentWindow:
    """Readings of the books over the last minutes, from which rates and quantiles of a window follow."""

    def __init__(self, pools: Pools, now: Callable[[], float]) -> None:
        self._pools = pools
        self._now = now
        self._readings: deque[tuple[float, _Reading]] = deque(maxlen=int(WINDOW / EVERY) + 1)
        self._history: dict[tuple[str, str], deque[dict[str, float | None]]] = {}

    async def run(self) -> None:
        """Takes a reading every two seconds until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(EVERY)

    def take(self) -> None:
        """Takes one reading."""
        now, read = self._now(), self._read()
        for pool in self._pools:
            for slo in pool.policy.classes:
                key = (pool.name, slo.name)
                seen = _window(slo, read.get(key), *self._first(key, now))
                points = self._history.setdefault(key, deque(maxlen=HISTORY))
                points.append({name: seen[name] for name in ("ttft", "tpot", "attainment", "rate")})
        self._readings.append((now, read))

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        now, read = self._now(), self._read()
        return {
            "state": self._pools.state.value,
            "window": WINDOW,
            "every": EVERY,
            "pools": [self._pool(pool, now, read) for pool in self._pools],
        }

    def _read(self) -> _Reading:
        return {(pool.name, name): counters.read() for pool in self._pools for name, counters in pool.counters.items()}

    def _first(self, key: tuple[str, str], now: float) -> tuple[ClassReport, float]:
        """The oldest reading within the window, and how long ago it was."""
        for at, reading in self._readings:
            if now - at <= WINDOW + EVERY and key in reading:
                return reading[key], now - at
        return ClassReport(), 0.0

    def _pool(self, pool: ServedPool, now: float, read: _Reading) -> dict[str, Any]:
        classes = []
        for slo in pool.policy.classes:
            key = (pool.name, slo.name)
            seen = _window(slo, read.get(key), *self._first(key, now))
            classes.append({"name": slo.name, **_promise(slo), **seen, "history": list(self._history.get(key, ()))})
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


def _promise(slo: PriorityClass) -> dict[str, Any]:
    ttft, tpot = slo.objectives.ttft, slo.objectives.tpot
    return {
        "ttftTarget": ttft.target if ttft else None,
        "ttftPercentile": ttft.percentile if ttft else None,
        "perThousand": ttft.per_thousand_prompt_tokens if ttft else None,
        "tpotTarget": tpot.target if tpot else None,
        "tpotPercentile": tpot.percentile if tpot else None,
    }


def _window(slo: PriorityClass, books: ClassReport | None, before: ClassReport, seconds: float) -> dict[str, Any]:
    """Rates, quantiles and attainment since the reading `before`; None where nothing was seen."""
    books = books or ClassReport()
    ttft, tpot = LogHistogram(books.ttft).since(before.ttft), LogHistogram(books.tpot).since(before.tpot)
    gone = {name: count - before.outcomes.get(name, 0) for name, count in books.outcomes.items()}
    missed = sum(gone.get(name, 0) for name in ("shed", "upstream_error", "timeout"))
    judged = books.judged.get("all", 0) - before.judged.get("all", 0) + missed
    attained = books.attained.get("all", 0) - before.attained.get("all", 0)
    objectives = slo.objectives

    def kept(objective: str) -> float | None:
        """Share of those judged against it."""
        asked = books.judged.get(objective, 0) - before.judged.get(objective, 0)
        return (books.attained.get(objective, 0) - before.attained.get(objective, 0)) / asked if asked else None

    return {
        "rate": (books.offered - before.offered) / seconds if seconds else None,
        "tokenRate": (books.output_tokens - before.output_tokens) / seconds if seconds else None,
        "ttft": ttft.quantile((objectives.ttft.percentile if objectives.ttft else 95.0) / 100),
        "tpot": tpot.quantile((objectives.tpot.percentile if objectives.tpot else 95.0) / 100),
        "ttftKept": kept("ttft"),
        "tpotKept": kept("tpot"),
        "attainment": attained / judged if judged else None,
        "shed": gone.get("shed", 0),
        "failed": gone.get("upstream_error", 0) + gone.get("timeout", 0),
        "offered": books.offered - before.offered,
        "queued": books.queued,
        "inFlight": books.in_flight,
    }


def _replica(report: RuntimeReport) -> dict[str, Any]:
    return {
        "name": report.replica,
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
