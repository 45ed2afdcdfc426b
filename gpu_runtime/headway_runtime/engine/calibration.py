"""Measuring a model at start: a grid of iterations on the empty engine, for some seconds, before any request.

Uses the runner's rows and KV blocks, and leaves them free. `headway_core.latency` chooses the shapes and learns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from headway_core.batching.iteration_plan import IterationShape, PlanItem
from headway_core.latency import StepTimeModel, calibration_shapes

from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.model_runner import ModelRunner
from headway_runtime.pace import Pace

LONGEST_ITERATION = 0.5
"""Seconds: an iteration is the atom of cancelling and of fairness, so the default budget keeps it within this."""
LEAST_BUDGET = 64
SECONDS_ALLOWED = 12.0
"""After this long each remaining shape runs twice only."""

_RUNS = 3
_PROBE_TOKENS = 64
_SAMPLING = SamplingParams(seed=0)


class Calibration:
    """Runs shapes on an idle runner of `max_num_seqs` + 1 rows and `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
        pace: Pace | None = None,
    ) -> None:
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._clock = clock
        self._pace = pace

    def largest_budget(self, at_most: int) -> int:
        """A first guess at how many prefill tokens fit in `LONGEST_ITERATION`, from one short prefill."""
        tokens = min(_PROBE_TOKENS, self._max_model_len - 1, (self._num_blocks - 1) * self._block_size or 1)
        shape = IterationShape(prefill_tokens=tokens, prefill_pairs=tokens * tokens // 2, sampled_rows=1)
        seconds = min(self.seconds(shape) for _ in range(_RUNS))
        return max(LEAST_BUDGET, min(at_most, int(tokens * LONGEST_ITERATION / seconds) // 16 * 16))

    def run(self, model: StepTimeModel, budget: int, progress: Callable[[int, int], None]) -> None:
        """Measures the grid for this prefill budget and gives it to `model`; calls `progress(shapes done, of all)`."""
        shapes = calibration_shapes(
            max_num_seqs=self._max_num_seqs,
            prefill_token_budget=budget,
            max_model_len=self._max_model_len,
            pool_tokens=self._num_blocks * self._block_size,
        )
        model.calibrate(self._measure(shapes, progress))

    def _measure(
        self, shapes: tuple[IterationShape, ...], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[IterationShape, float]]:
        began = time.monotonic()
        for done, shape in enumerate(shapes):
            progress(done, len(shapes))
            for _ in range(_RUNS if time.monotonic() - began < SECONDS_ALLOWED else 2):
                yield shape, self.seconds(shape)
        progress(len(shapes), len(shapes))

    def seconds(self, shape: IterationShape) -> float:
        """How long one iteration of this shape takes; under a pace, as long as that says without waiting for it."""
        items = self._items(shape)
        for item in items:
            known = np.arange(item.start + item.count, dtype=np.int32) % self._runner.vocab_size
            self._runner.bind(item.slot, known, _SAMPLING, len(known))
        began = self._clock()
        self._runner.execute(items)
        elapsed = self._clock() - began
        for item in items:
            self._runner.free(item.slot)
        return elapsed if self._pace is None else max(elapsed, self._pace.seconds(shape))

    def _items(self, shape: IterationShape) -> list[PlanItem]:
        """Decodes in the first rows, the prefill chunk in the next one; each on blocks of its own."""
        items: list[PlanItem] = []
        next_block = 0

        def item(start: int, count: int) -> None:
            nonlocal next_block
            blocks = tuple(range(next_block, next_block + -(-(start + count) // self._block_size)))
            next_block += len(blocks)
            items.append(PlanItem(len(items), 0, len(items), start, count, True, blocks))

        for _ in range(shape.decode_rows):
            item(shape.context_tokens // shape.decode_rows - 1, 1)
        if shape.prefill_tokens:
            start = max(0, round(shape.prefill_pairs / shape.prefill_tokens - shape.prefill_tokens / 2))
            item(start, shape.prefill_tokens)
        return items
