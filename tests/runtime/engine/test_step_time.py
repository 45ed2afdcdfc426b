"""The engine predicts its own iterations: real model, real scheduler, mixed load, each prediction made before its
iteration ran."""

import random
import statistics
import time
from itertools import count

import numpy as np
import pytest
from headway_core.batching.scheduler import Scheduler
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits
from headway_core.latency import StepTimeModel
from headway_runtime.engine.calibration import Calibration
from headway_runtime.engine.engine import Engine
from headway_runtime.ipc.messages import AddSequence
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner
from headway_runtime.settings import find_model

SLOTS, BUDGET, BLOCKS, BLOCK = 8, 64, 400, 16


def calibrated_engine(clock):
    runner = ModelRunner(
        open_checkpoint(find_model(None), "float32"),
        max_num_seqs=SLOTS + 1,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        max_model_len=2048,
        threads=1,
    )
    model = StepTimeModel()
    calibration = Calibration(
        runner, max_num_seqs=SLOTS, num_blocks=BLOCKS, block_size=BLOCK, max_model_len=2048, clock=clock
    )
    calibration.run(model, BUDGET, lambda done, shapes: None)
    scheduler = Scheduler(num_blocks=BLOCKS, block_size=BLOCK, knobs=Knobs(SLOTS, BUDGET))
    limits = EngineLimits(SLOTS, BUDGET, 2048, BLOCK, BLOCKS)
    return Engine(runner, scheduler, model, limits=limits, clock=clock), model


def run_mixed_load(engine, numbers, draw, iterations):
    """Users who ask again when they are answered; greedy and sampled, short and long, some arriving late."""
    errors = []
    for iteration in range(iterations):
        while len(engine.scheduler) < (3 if iteration % 40 < 20 else SLOTS + 2):
            prompt = np.array([draw.randrange(100, 40_000) for _ in range(draw.randrange(8, 300))], dtype=np.int32)
            params = SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=1, ignore_eos=True)
            number = next(numbers)
            engine.add(
                AddSequence(number, 0, float(number), None, b"", prompt, draw.randrange(8, 60), params), float(number)
            )
        step = engine.step()
        errors.append(abs(step.predicted - step.elapsed) / step.elapsed)
    return statistics.median(errors)


@pytest.mark.slow
def test_the_median_error_one_step_ahead_is_within_a_tenth(record_property):
    """Time is this process's own CPU time: on a machine that others use too, seconds of the wall measure the others.

    They still compete for caches and memory, which only makes it worse, so the best of three windows counts.
    """
    engine, model = calibrated_engine(time.process_time)
    draw, numbers, medians = random.Random(1), count(), []
    for _ in range(3):
        medians.append(run_mixed_load(engine, numbers, draw, 120))
        if medians[-1] <= 0.1:
            break
    print(f"one-step-ahead median relative error: {[round(error, 3) for error in medians]}")
    record_property("median_relative_errors", medians)
    assert min(medians) <= 0.1, medians
    assert model.samples >= 120 and model.relative_error is not None
    engine.scheduler.check()
