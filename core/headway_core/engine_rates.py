"""Rates of an engine, measured from its own iterations: what Little's law is applied to.

A rate is a capacity only when nothing else was the limit: prefill counts in iterations with a filled prefill budget,
completions while the slots were busy. Otherwise a quiet hour looks like a slow engine. Never measured is None, not 0.
"""

from __future__ import annotations

from collections import deque

from headway_core.batching.iteration_plan import IterationPlan
from headway_core.batching.scheduler_load import SchedulerLoad

_SMOOTHING = 0.1
"""Share of the newest iteration in the smoothed length."""


class RateWindow:
    """Amount per second over the last `window` seconds of a clock, counting only the seconds that were handed in."""

    def __init__(self, window: float, least_samples: int) -> None:
        self._window = window
        self._least = least_samples
        self._entries: deque[tuple[float, float, float]] = deque()
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        """`amount` came about in `seconds` seconds of work that ended at `now`."""
        self._entries.append((now, amount, seconds))
        self._amount += amount
        self._seconds += seconds
        self._forget(now)

    def rate(self, now: float) -> float | None:
        """Per second; None with too little to tell, or when nothing came about (a bound on the rate, no measure)."""
        self._forget(now)
        if len(self._entries) < self._least or self._amount <= 0 or self._seconds <= 0:
            return None
        return self._amount / self._seconds

    def _forget(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now - self._window:
            _, amount, seconds = self._entries.popleft()
            self._amount -= amount
            self._seconds -= seconds
        if not self._entries:
            self._amount = self._seconds = 0.0  # leaves no rounding behind


class EngineRates:
    """C, X and block releases of one engine. `window` in seconds."""

    def __init__(self, window: float = 60.0, least_samples: int = 3) -> None:
        self._prefill = RateWindow(window, least_samples)
        self._completions = RateWindow(window, least_samples)
        self._releases = RateWindow(window, least_samples)
        self._iteration: float | None = None

    def observe(
        self,
        plan: IterationPlan,
        load: SchedulerLoad,
        *,
        seconds: float,
        finished: int,
        released_blocks: int,
        now: float,
    ) -> None:
        """An iteration ended at `now`, `seconds` after the one before it (or after it began, if the engine was idle).

        `load` was taken while it ran, before `Scheduler.complete`, which brought `finished` and `released_blocks`.
        """
        self._iteration = (
            seconds if self._iteration is None else self._iteration + _SMOOTHING * (seconds - self._iteration)
        )
        if plan.prefill_budget and plan.shape.prefill_tokens >= plan.prefill_budget:
            self._prefill.add(plan.shape.prefill_tokens, seconds, now)
        if not load.free_slots:
            self._completions.add(finished, seconds, now)
        self._releases.add(released_blocks, seconds, now)

    def prefill(self, now: float) -> float | None:
        """C: prefill tokens per second of iterations that carried all they were allowed, decodes' time included."""
        return self._prefill.rate(now)

    def completions(self, now: float) -> float | None:
        """X: sequences finished per second while all slots were taken."""
        return self._completions.rate(now)

    def block_releases(self, now: float) -> float | None:
        """KV blocks that became available per second of work."""
        return self._releases.rate(now)

    @property
    def iteration_seconds(self) -> float | None:
        """Smoothed length of an iteration; None before the first."""
        return self._iteration
