"""A measured step-time model as four numbers: what `--coefficients` and `headway-runtime --pace` take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from headway_core.contract.reports import EngineLimits, StepTimeReport
from headway_core.latency import StepTimeModel, calibration_shapes
from headway_core.least_squares import nonnegative_least_squares

_LEAST_BASE = 1e-6
"""Seconds: an iteration that takes none is refused by those who read the numbers."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """t = a + b·p + d·n + e·c seconds, for p prefill tokens and n decodes that hold c tokens of context."""

    coefficients: tuple[float, float, float, float]
    error: float
    """Median |line - model| / model over the shapes it was fitted to."""

    def __str__(self) -> str:
        return ",".join(f"{number:.4g}" for number in self.coefficients)


def fit_line(model: StepTimeReport, limits: EngineLimits) -> LinearFit:
    """The line that is least wrong, in proportion, over the shapes that a calibration within these limits runs."""
    shapes = calibration_shapes(
        max_num_seqs=limits.max_num_seqs,
        prefill_token_budget=limits.prefill_token_budget,
        max_model_len=limits.max_model_len,
        pool_tokens=limits.total_blocks * limits.block_size,
    )
    measured = StepTimeModel.from_report(model)
    points = [
        ((1.0, float(shape.prefill_tokens), float(shape.decode_rows), float(shape.context_tokens)), seconds)
        for shape in shapes
        if (seconds := measured.predict(shape)) is not None and seconds > 0
    ]
    gram = [[sum(x[i] * x[j] / seconds**2 for x, seconds in points) for j in range(4)] for i in range(4)]
    moment = [sum(x[i] / seconds for x, seconds in points) for i in range(4)]
    a, b, d, e = nonnegative_least_squares(gram, moment)
    line = (max(a, _LEAST_BASE), b, d, e)
    return LinearFit(line, median(abs(_at(line, x) - seconds) / seconds for x, seconds in points))


def _at(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(b * x for b, x in zip(coefficients, features, strict=True))
