"""How long an iteration takes: the step-time model that gateway, runtime, operator and simulator all predict from.

A line is the wrong shape: a matrix product costs ``max(reading the weights, rate · rows)``. So the features are

    1,  min(m, knee),  max(0, m - knee),  context tokens,  prefill pairs,  sampled rows

with m = prefill tokens + decode rows, and no coefficient is negative. The runtime measures a grid of shapes at start
(`calibration_shapes`), where rows, context and prefill vary independently; in traffic they do not, and a fit of traffic
alone misjudges what it has not seen. The grid stays as a prior worth `PRIOR` iterations; later iterations refine it and
are forgotten over `MEMORY` iterations. That is too slow for a machine that another load makes slower as a whole, so a
prediction is the fit times its drift: the median of actual over fitted time of the last `DRIFT` iterations.

The fit minimises relative errors. An error of more than `CLIP` median absolute deviations is clipped to that. The first
iteration of about a size is ignored: buffers grow and kernels are chosen in it, once. The published error is the median
over predictions that were made before the iteration ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median

from headway_core.batching.iteration_plan import IterationShape
from headway_core.contract.reports import StepTimeReport
from headway_core.least_squares import nonnegative_least_squares

PRIOR = 100.0
"""Iterations that the calibration is worth for ever."""
MEMORY = 1000.0
"""Iterations after which an observation counts 1/e of a new one."""
DRIFT = 64
"""Iterations of the drift: half of them show a change; chance moves their median by a sixth of one's noise."""
CLIP = 3.0
"""What an iteration says is clipped at so many median absolute deviations from the drift."""

_REFIT_EVERY = 8
_FEWEST = 16
"""Iterations from which on a median of them means something."""
_WINDOW = 256
"""Predictions that the published error is taken from."""
_LEAST_DEVIATION = 0.01
_LONGEST_CONTEXT = 2048
"""Tokens of context in the calibration: beyond it time grows in proportion, and measuring takes long."""
_COEFFICIENTS = ("base", "per_row", "per_row_above", "per_context_token", "per_prefill_pair", "per_sampled_row")
"""What the report calls them, in the order of the features."""
_SIZE = len(_COEFFICIENTS)


class StepTimeModel:
    """Knows nothing until `calibrate` or `from_report`: `predict` is None until then."""

    def __init__(self) -> None:
        self.samples = 0
        """Iterations observed, the calibration apart."""
        self.max_decode_rows = 0
        self.max_prefill_tokens = 0
        self.knee = 1
        self._coefficients: list[float] | None = None
        self._prior = _Statistics()
        self._recent = _Statistics()
        self._used: set[int] = set()
        self._ratios: deque[float] = deque(maxlen=DRIFT)
        self._drift = 1.0
        self._errors: deque[float] = deque(maxlen=_WINDOW)

    @classmethod
    def from_report(cls, report: StepTimeReport) -> StepTimeModel:
        """The model that a runtime published: it predicts what the report says, and may be refined by `observe`."""
        model = cls()
        model.knee = report.knee
        model.max_decode_rows, model.max_prefill_tokens = report.max_decode_rows, report.max_prefill_tokens
        model._coefficients = [getattr(report, name) for name in _COEFFICIENTS]
        shapes = calibration_shapes(
            max_num_seqs=max(1, report.max_decode_rows),
            prefill_token_budget=max(1, report.max_prefill_tokens),
            max_model_len=_LONGEST_CONTEXT,
            pool_tokens=_LONGEST_CONTEXT * (report.max_decode_rows + 2),
        )
        model._prior.add_all(((_features(shape, model.knee), model._fitted(shape)) for shape in shapes), PRIOR)
        return model

    def calibrate(self, measured: Iterable[tuple[IterationShape, float]]) -> None:
        """Learns from shapes that were run alone, in the order in which they ran: (shape, seconds).

        A shape's time is the median of its runs after the first, if there are any. The knee leaves the least error.
        Raises ValueError when nothing was measured, or a time is not positive.
        """
        runs: dict[IterationShape, list[float]] = {}
        for shape, seconds in measured:
            _require_positive(seconds)
            runs.setdefault(shape, []).append(seconds)
        if not runs:
            raise ValueError("a calibration needs at least one measured shape")
        points = [(shape, median(times[1:] or times)) for shape, times in runs.items()]
        for shape in runs:
            self._notice(shape)
        self.knee = min(_knees(points), key=lambda knee: _fit(points, knee)[1])
        self._prior = _Statistics()
        self._prior.add_all(((_features(shape, self.knee), seconds) for shape, seconds in points), PRIOR)
        self._recent = _Statistics()
        self._coefficients = _fit(points, self.knee)[0]
        self._ratios.clear()
        self._drift = 1.0

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """Learns from an iteration of traffic. Raises ValueError when the time is not positive."""
        _require_positive(seconds)
        self.samples += 1
        first_use = self._notice(shape)
        predicted = self.predict(shape)
        if predicted is None or first_use:
            return
        self._errors.append(abs(predicted - seconds) / seconds)
        fitted = self._fitted(shape)
        scale = max(fitted, seconds / 10)  # a shape may be fitted to take no time at all
        ratio = clipped = seconds / scale
        if len(self._ratios) >= _FEWEST:
            bound = CLIP * max(_LEAST_DEVIATION, median(abs(known - self._drift) for known in self._ratios))
            clipped = max(self._drift - bound, min(self._drift + bound, ratio))
        self._ratios.append(ratio)
        if len(self._ratios) >= _FEWEST:
            self._drift = median(self._ratios)
        self._recent.decay(1 - 1 / MEMORY)
        self._recent.add(_features(shape, self.knee), scale * clipped, scale**-2)
        if self.samples % _REFIT_EVERY == 0:
            self._coefficients = self._prior.plus(self._recent).solve()

    def predict(self, shape: IterationShape) -> float | None:
        """Seconds for an iteration of this shape; None before there is anything to predict from."""
        return None if self._coefficients is None else self._drift * self._fitted(shape)

    def decode_seconds(self, decode_rows: int, context_tokens: int) -> float | None:
        """Seconds for an iteration of so many decodes holding so much context in all, without prefill."""
        return self.predict(_shape(decode_rows, context_tokens, 0, 0))

    def largest_prefill(
        self, limit_seconds: float, decode_rows: int, context_tokens: int, *, start: int = 0, at_most: int = 1 << 20
    ) -> int | None:
        """Most prefill tokens ≤ `at_most` that follow `start` computed ones, with t ≤ limit beside these decodes.

        0 when even the decodes alone take longer; None before there is anything to predict from.
        """
        if self._coefficients is None:
            return None
        # t grows with p, because no coefficient is negative.
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self._drift * self._fitted(_shape(decode_rows, context_tokens, middle, start)) <= limit_seconds:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def relative_error(self) -> float | None:
        """Median |predicted - actual| / actual of recent iterations, predicted before they ran; None without any."""
        return median(self._errors) if self._errors else None

    def report(self) -> StepTimeReport | None:
        """What to publish; None before there is anything to predict from."""
        if self._coefficients is None:
            return None
        coefficients = {name: b * self._drift for name, b in zip(_COEFFICIENTS, self._coefficients, strict=True)}
        return StepTimeReport(
            **coefficients,
            knee=self.knee,
            samples=self.samples,
            max_decode_rows=self.max_decode_rows,
            max_prefill_tokens=self.max_prefill_tokens,
            relative_error=self.relative_error,
        )

    def _fitted(self, shape: IterationShape) -> float:
        features = _features(shape, self.knee)
        return sum(b * x for b, x in zip(self._coefficients or (), features, strict=True))

    def _notice(self, shape: IterationShape) -> bool:
        """Remembers what was seen; whether work of about this size is new."""
        self.max_decode_rows = max(self.max_decode_rows, shape.decode_rows)
        self.max_prefill_tokens = max(self.max_prefill_tokens, shape.prefill_tokens)
        rows = shape.prefill_tokens + shape.decode_rows
        # Buffers grow and kernels are chosen by size, not by the exact count: four sizes per doubling.
        size = rows >> max(0, rows.bit_length() - 3) << max(0, rows.bit_length() - 3)
        new = size not in self._used
        self._used.add(size)
        return new


def calibration_shapes(
    *, max_num_seqs: int, prefill_token_budget: int, max_model_len: int, pool_tokens: int
) -> tuple[IterationShape, ...]:
    """The shapes to run at start, in order, each at least twice: decodes, prefill and both, at short and long context.

    A shape stands for: one prefill chunk of p = `prefill_tokens`, that follows ``pairs / p - p / 2`` computed tokens of
    its sequence and samples; and n = `decode_rows` decodes that hold ``context_tokens / n`` tokens each. All fit in
    `pool_tokens` with a block of up to 32 tokens left over by each row, where the pool allows it.
    """
    longest = max(1, min(max_model_len - 1, _LONGEST_CONTEXT, pool_tokens // 2))
    most_rows = max(1, min(max_num_seqs, pool_tokens // 2))
    most_prefill = max(1, min(prefill_token_budget, longest))
    rows = sorted({1, round(most_rows**0.5), round(most_rows**0.75), most_rows})
    prefills = sorted({min(16, most_prefill), min(64, most_prefill), round((64 * most_prefill) ** 0.5), most_prefill})

    def long(n: int) -> int:
        return max(1, min(longest, pool_tokens // 2 // n - 32))

    def short(n: int) -> int:
        return min(16, long(n))

    shapes = [_shape(n, n * context(n), 0, 0) for n in rows for context in (short, long)]
    shapes += [_shape(0, 0, p, start) for p in prefills if p <= most_prefill for start in (0, longest - p)]
    shapes += [
        _shape(n, n * context(n), p, 0)
        for n in rows[1::2]
        for context, p in ((short, most_prefill), (long, prefills[0]))
    ]
    return tuple(dict.fromkeys(shapes))


def _shape(decode_rows: int, context_tokens: int, prefill_tokens: int, start: int) -> IterationShape:
    return IterationShape(
        prefill_tokens=prefill_tokens,
        prefill_pairs=prefill_tokens * (2 * start + prefill_tokens) // 2,
        decode_rows=decode_rows,
        context_tokens=context_tokens,
        sampled_rows=decode_rows + (prefill_tokens > 0),
    )


def _features(shape: IterationShape, knee: int) -> tuple[float, ...]:
    rows = shape.prefill_tokens + shape.decode_rows
    return (1, min(rows, knee), max(0, rows - knee), shape.context_tokens, shape.prefill_pairs, shape.sampled_rows)


def _knees(points: list[tuple[IterationShape, float]]) -> Iterator[int]:
    """Candidates, about 8 per doubling over the measured row counts."""
    rows = [shape.prefill_tokens + shape.decode_rows for shape, _ in points]
    knee = max(1, min(rows))
    while knee <= max(rows):
        yield knee
        knee = max(knee + 1, round(knee * 2 ** (1 / 8)))


def _fit(points: list[tuple[IterationShape, float]], knee: int) -> tuple[list[float], float]:
    """Coefficients for this knee, and the sum of squared relative errors that they leave."""
    statistics = _Statistics()
    statistics.add_all(((_features(shape, knee), seconds) for shape, seconds in points), 1.0)
    coefficients = statistics.solve()
    left = 0.0
    for shape, seconds in points:
        predicted = sum(b * x for b, x in zip(coefficients, _features(shape, knee), strict=True))
        left += ((predicted - seconds) / seconds) ** 2
    return coefficients, left


class _Statistics:
    """Σ w·x·xᵀ and Σ w·x·y of weighted observations: all that least squares needs to know of them."""

    def __init__(self) -> None:
        self.gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self.moment = [0.0] * _SIZE

    def add(self, features: tuple[float, ...], seconds: float, weight: float) -> None:
        for i, x in enumerate(features):
            if x:
                row, weighted = self.gram[i], weight * x
                for j, y in enumerate(features):
                    row[j] += weighted * y
                self.moment[i] += weighted * seconds

    def add_all(self, points: Iterable[tuple[tuple[float, ...], float]], worth: float) -> None:
        """Adds observations that together weigh as much as `worth` ones, each by its relative error."""
        listed = list(points)
        for features, seconds in listed:
            self.add(features, seconds, worth / len(listed) * seconds**-2)

    def decay(self, factor: float) -> None:
        self.gram = [[value * factor for value in row] for row in self.gram]
        self.moment = [value * factor for value in self.moment]

    def plus(self, other: _Statistics) -> _Statistics:
        both = _Statistics()
        both.gram = [
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self.gram, other.gram, strict=True)
        ]
        both.moment = [a + b for a, b in zip(self.moment, other.moment, strict=True)]
        return both

    def solve(self) -> list[float]:
        return nonnegative_least_squares(self.gram, self.moment)


def _require_positive(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ValueError(f"an iteration takes a positive time, not {seconds}")
