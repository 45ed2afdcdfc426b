"""Rates of events, from the events themselves: exponentially weighted, corrected for a short past."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class RateMeter:
    """Amount per second, over about the last `span` seconds; unknown until a tenth of `span` has passed."""

    span: float = 30.0
    _sum: float = 0.0
    _at: float = 0.0
    _since: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Counts `amount` at the instant `now`; instants do not go back."""
        if self._since is None:
            self._since = self._at = now
        self._sum = self._sum * self._decay(now) + amount
        self._at = max(self._at, now)

    def rate(self, now: float) -> float | None:
        """Per second; None while the past is too short to say."""
        if self._since is None or now - self._since < self.span / 10:
            return None
        weight = 1.0 - math.exp(-(now - self._since) / self.span)
        return self._sum * self._decay(now) / (self.span * weight)

    def _decay(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at) / self.span)
