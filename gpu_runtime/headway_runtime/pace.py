"""An emulated accelerator: iterations that take a known time, whatever this machine can do.

The forward pass stays real; what is left of the iteration's time is slept. So capacity is known in advance, and
decisions about it can be checked against arithmetic on a machine that is slow or shared. Wherever it shows (report,
metrics, log) it is called emulated.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from headway_core.batching.plan import IterationPlan, IterationShape


@dataclass(frozen=True, slots=True)
class Pace:
    """An iteration lasts at least base + per_prefill_token·p + per_decode_row·n + per_context_token·c seconds."""

    base: float
    per_prefill_token: float
    per_decode_row: float
    per_context_token: float

    @classmethod
    def parse(cls, text: str) -> Pace:
        """``a,b,d,e`` in seconds, none negative and a above 0. Raises ValueError."""
        parts = text.split(",")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != 4 or not all(math.isfinite(number) and number >= 0 for number in numbers) or numbers[0] <= 0:
            raise ValueError(
                f"{text!r} is not four numbers of seconds a,b,d,e, such as 0.03,0.0005,0.002,0.00001 (a above "
                "0, none negative)"
            )
        return cls(*numbers)

    def seconds(self, shape: IterationShape) -> float:
        """The least time of an iteration of this shape."""
        return (
            self.base
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_decode_row * shape.decode_rows
            + self.per_context_token * shape.context_tokens
        )

    def stretch(self, plan: IterationPlan, elapsed: float) -> None:
        """Sleeps what is left of an iteration that has taken `elapsed` seconds; nothing when that is longer already."""
        time.sleep(max(0.0, self.seconds(plan.shape) - elapsed))
