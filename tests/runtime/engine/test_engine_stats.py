"""What a replica says of its own pace when the last minute was quiet: unknown only where nothing can be said."""

import pytest
from headway_core.batching.scheduler import Scheduler
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits, StepTimeReport
from headway_core.latency import StepTimeModel
from headway_runtime.engine.engine_stats import EngineStats, FinishedRequest

KNOBS = Knobs(max_num_seqs=8, prefill_token_budget=64)
# 20 ms, 1 ms a row, nothing else: an iteration with 64 prefill tokens takes 84 ms.
STEP = StepTimeReport(0.02, 0.001, 0.001, 0.0, 0.0, 0.0, 16, 500, 64, 512)


def stats_of(model):
    return EngineStats(Scheduler(num_blocks=64, block_size=16, knobs=KNOBS), model, EngineLimits(8, 64, 1024, 16, 64))


def test_before_calibration_nothing_is_known():
    snapshot = stats_of(StepTimeModel()).snapshot(0.0)
    assert (snapshot.prefill_rate, snapshot.completion_rate) == (None, None)


def test_a_quiet_engine_expects_what_its_step_time_says():
    made = stats_of(StepTimeModel.from_report(STEP))
    snapshot = made.snapshot(0.0)
    assert snapshot.prefill_rate == pytest.approx(64 / 0.084)
    assert snapshot.completion_rate is None, "without a mix nobody knows how long an answer is"
    made.record_finished(FinishedRequest(at=1.0, prompt=100, cached=20, output=40))
    # 8 sequences finish 8/40 requests an iteration and prefill 0.2 · 80 = 16 tokens in it: 20 + 16 + 8 ms.
    assert made.snapshot(2.0).completion_rate == pytest.approx(8 / (40 * 0.044))


def test_the_mix_is_that_of_the_last_minute():
    made = stats_of(StepTimeModel.from_report(STEP))
    made.record_finished(FinishedRequest(at=1.0, prompt=64, cached=0, output=40))
    made.record_finished(FinishedRequest(at=31.0, prompt=256, cached=0, output=10))
    assert made.snapshot(60.0).mix.prompt_tokens == (64 + 256) / 2
    shifted = made.snapshot(62.0).mix
    assert (shifted.requests, shifted.prompt_tokens, shifted.output_tokens) == (1, 256, 10)
    assert made.snapshot(92.0).mix is None
