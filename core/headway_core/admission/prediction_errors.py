"""How far predictions are off, learned from their own past, and the margin that follows from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MEMORY = 256
MIN_SAMPLES = 20
QUANTILE = 0.75
"""Share of comparisons that the margin covers. Each step above one half gives up some who would have made it."""
NEAR = 0.25
"""Of the target: comparisons predicted earlier than this say nothing about those that come close to it."""
WIDEST = 0.5
"""Of the target: a margin that takes all of it would refuse everybody and so never learn better."""


@dataclass(slots=True)
class PredictionErrors:
    """Signed errors, predicted - actual seconds, of one class's latest `MEMORY` comparisons, admitted and shed alike.

    Admitted requests alone would be biased: those predicted too early got in, those predicted too late did not.
    """

    _errors: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _margins: dict[float, float] = field(default_factory=dict)
    """Target → margin, until the next comparison that counts for it."""
    _least: float = math.inf
    """The smallest target in `_margins`."""

    def compare(self, predicted: float, actual: float) -> None:
        """One prediction against what happened, both in seconds."""
        pushed_out = self._errors[0][0] if len(self._errors) == MEMORY else 0.0
        self._errors.append((predicted, actual))
        if max(predicted, pushed_out) >= self._least * NEAR:
            self._margins.clear()
            self._least = math.inf

    def margin(self, target: float) -> float:
        """Seconds to keep free before `target`; 0 until `MIN_SAMPLES` comparisons were made.

        Taken over comparisons predicted at `NEAR` times the target or later: errors matter there, and grow with it.
        """
        known = self._margins.get(target)
        if known is None:
            if len(self._margins) >= MEMORY:
                self._margins.clear()
            known = self._margins[target] = self._learned(target)
            self._least = min(self._least, target)
        return known

    def _learned(self, target: float) -> float:
        late = sorted(actual - predicted for predicted, actual in self._errors if predicted >= target * NEAR)
        if len(late) < MIN_SAMPLES:
            return 0.0
        return min(max(0.0, late[int(QUANTILE * (len(late) - 1))]), WIDEST * target)
