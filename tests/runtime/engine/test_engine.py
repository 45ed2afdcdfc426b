"""The engine alone: errors stay with their sequence, knobs never exceed the start-up limits, endings are told
apart."""

import numpy as np
import pytest
from headway_core.batching.scheduler import Scheduler
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits
from headway_core.latency import StepTimeModel
from headway_runtime.engine.engine import Engine
from headway_runtime.ipc.messages import AddSequence, Commands, EndReason
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner

LIMITS = EngineLimits(4, 32, 512, 16, 32)


class Clock:
    """Moves by a second each time it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def engine(tiny_llama):
    runner = ModelRunner(
        open_checkpoint(tiny_llama, "float32"),
        max_num_seqs=4,
        num_blocks=32,
        block_size=16,
        max_model_len=512,
        threads=1,
    )
    scheduler = Scheduler(num_blocks=32, block_size=16, knobs=Knobs(4, 32))
    padded = []
    engine = Engine(
        runner,
        scheduler,
        StepTimeModel(),
        limits=LIMITS,
        clock=Clock(),
        pad=lambda plan, seconds: padded.append((plan.plan_id, seconds)),
    )
    engine.padded = padded
    return engine


def asked(seq_id, prompt=(70, 71, 72), max_tokens=5, **params):
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return AddSequence(
        seq_id, 0, 0.0, None, b"", np.array(prompt, dtype=np.int32), max_tokens, SamplingParams(**params)
    )


def run(engine, *sequences):
    """Everything that comes out until the engine is idle: tokens by sequence, endings by sequence."""
    engine.apply(Commands(1, sequences))
    tokens, ended = {}, {one.seq_id: one for one in engine.take_ended()}
    while not engine.idle:
        step = engine.step()
        for out in step.tokens:
            tokens.setdefault(out.seq_id, []).append(out.token)
        ended.update({one.seq_id: one for one in step.ended})
    engine.scheduler.check()
    return tokens, ended


def test_a_sequence_that_cannot_be_is_reported_and_its_neighbours_go_on(engine):
    too_long = asked(1, prompt=range(5, 205), max_tokens=400)
    bad_token = asked(2, logit_bias=((10_000, 1.0),))
    tokens, ended = run(engine, asked(0), too_long, bad_token, asked(3))
    assert tokens[0] == tokens[3] and len(tokens[0]) == 5 and set(tokens) == {0, 3}
    assert [ended[n].reason for n in range(4)] == [EndReason.LENGTH, EndReason.ERROR, EndReason.ERROR, EndReason.LENGTH]
    assert "600 tokens" in ended[1].message and "512" in ended[1].message and "logit_bias" in ended[2].message


def test_an_end_token_is_the_last_one_reported(engine):
    tokens, ended = run(
        engine,
        asked(0, ignore_eos=False, logit_bias=((1, 100.0),)),
        asked(1, stop_token_ids=(80,), logit_bias=((80, 100.0),)),
    )
    assert tokens == {0: [1], 1: [80]}
    assert {one.reason for one in ended.values()} == {EndReason.STOP}


def test_knobs_never_exceed_what_it_was_started_with(engine):
    engine.apply(Commands(1, knobs=Knobs(1000, 1000)))
    assert engine.scheduler.knobs == Knobs(4, 32)
    engine.apply(Commands(2, knobs=Knobs(2, 1000)))
    assert engine.scheduler.knobs == Knobs(2, 32)


def test_a_cancelled_sequence_is_not_reported_and_counts_only_if_it_had_tokens(engine):
    engine.apply(Commands(1, (asked(0, max_tokens=50), asked(1, prompt=range(5, 105)))))
    engine.step()
    (finished,) = engine.apply(Commands(2, cancel=(0, 1, 99)))
    assert (finished.prompt, finished.output) == (3, 1)
    assert engine.idle and engine.take_ended() == ()
    assert engine.scheduler.load().free_blocks == 32


def test_pad_is_called_with_each_plan_and_its_seconds(engine):
    run(engine, asked(0))
    assert [plan for plan, _ in engine.padded] == sorted({plan for plan, _ in engine.padded}) and len(
        engine.padded
    ) == 5
    assert all(seconds > 0 for _, seconds in engine.padded)


def test_an_iteration_lasts_since_the_end_of_the_one_before_and_never_through_a_pause(engine):
    engine.apply(Commands(1, (asked(0, max_tokens=3),)))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert engine.idle
    assert (second.began, third.began) == (first.began + first.elapsed, second.began + second.elapsed)
    assert first.elapsed < second.elapsed == third.elapsed, "the first follows nothing"
    engine.apply(Commands(2, (asked(1),)))
    after_a_pause = engine.step()
    assert after_a_pause.began > third.began + third.elapsed and after_a_pause.elapsed == first.elapsed
    engine.apply(Commands(3, cancel=(1,)))
    engine.apply(Commands(4, (asked(2),)))
    assert engine.step().elapsed == first.elapsed
