"""An emulated accelerator: iterations that take a known time, whatever the machine.

The forward pass runs; the rest of the iteration's time is slept. So the capacity is known in advance, and decisions
about it can be checked by arithmetic on a slow or shared machine. Report, metrics and log call it emulated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from headway_core.arguments import step_time_coefficients
from headway_core.batching.iteration_plan import IterationPlan, IterationShape


@dataclass(frozen=True, slots=True)
class Pace:
    """An iteration lasts at least base + per_prefill_token·p + per_decode_row·n + per_context_token·c seconds."""

    base: float
    per_prefill_token: float
    per_decode_row: float
    per_context_token: float

    @classmethod
    def parse(cls, text: str) -> Pace:
        """``a,b,d,e`` in seconds. Raises ArgumentTypeError."""
        return cls(*step_time_coefficients(text))

    def seconds(self, shape: IterationShape) -> float:
        """The least time of an iteration of this shape."""
        return (
            self.base
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_decode_row * shape.decode_rows
            + self.per_context_token * shape.context_tokens
        )

    def pad(self, plan: IterationPlan, elapsed: float) -> None:
        """Sleeps what is left of an iteration that has taken `elapsed` seconds; nothing when that is longer already."""
        time.sleep(max(0.0, self.seconds(plan.shape) - elapsed))
