"""The channel between the processes: whole messages however the socket splits them, no waiting on output, a closed end
is noticed."""

import socket

import numpy as np
import pytest
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import ClassLoad, EngineLimits, Mix, StepTimeReport
from headway_runtime.ipc.channel import MAX_MESSAGE_BYTES, ChannelClosed, EngineChannel, FrameDecoder, frame
from headway_runtime.ipc.messages import (
    AddSequence,
    Commands,
    Ended,
    EndReason,
    EngineLoad,
    Ready,
    StepReport,
    TokenLogprobs,
    TokenOut,
)
from headway_runtime.ipc.sampling_params import SamplingParams


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_messages_arrive_whole_however_they_were_split(piece):
    messages = [{"a": list(range(n)), "b": b"x" * n} for n in (0, 1, 50, 300)]
    stream = b"".join(map(frame, messages))
    decoder, got = FrameDecoder(), []
    for at in range(0, len(stream), piece):
        got += decoder.feed(stream[at : at + piece])
    assert got == messages


def test_a_stream_that_cannot_be_ours_is_refused():
    with pytest.raises(ChannelClosed, match="broken"):
        FrameDecoder().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


def test_draining_takes_what_is_there_and_does_not_wait(ends):
    ours, theirs = ends
    end = EngineChannel(theirs)
    assert end.receive(wait=False) == []
    ours.sendall(frame({"n": 1}) + frame({"n": 2}) + frame({"n": 3})[:3])
    assert end.receive(wait=True) == [{"n": 1}, {"n": 2}]
    ours.sendall(frame({"n": 3})[3:])
    assert end.receive(wait=True) == [{"n": 3}]


def test_a_reader_that_reads_nothing_never_blocks_the_engine_and_ends_it_at_the_bound(ends):
    end = EngineChannel(ends[1], max_unsent=2_000_000)
    for _ in range(20):
        end.send({"data": b"x" * 100_000})
    with pytest.raises(ChannelClosed, match="unread"):
        end.send({"data": b"x" * 2_000_000})


def test_what_was_left_unsent_goes_out_in_order_once_it_is_read(ends):
    ours, theirs = ends
    end = EngineChannel(theirs)
    messages = [{"n": n, "data": b"x" * 50_000} for n in range(40)]
    for message in messages:
        end.send(message)
    ours.setblocking(False)
    decoder, got = FrameDecoder(), []
    while len(got) < len(messages):
        end.receive(wait=False)
        try:
            got += decoder.feed(ours.recv(1 << 20))
        except BlockingIOError:
            continue
    assert got == messages


@pytest.mark.parametrize("wait", [False, True])
def test_a_closed_server_is_noticed(ends, wait):
    ours, theirs = ends
    end = EngineChannel(theirs)
    ours.close()
    with pytest.raises(ChannelClosed):
        end.receive(wait=wait)
    with pytest.raises(ChannelClosed):
        end.send({"n": 1})


def over_the_wire(message):
    return FrameDecoder().feed(frame(message))[0]


def test_every_message_survives_the_wire():
    params = SamplingParams(
        temperature=0.5, seed=2**63 - 1, logit_bias=((5, -1.5),), stop_token_ids=(7,), logprobs=3, max_tokens=9
    )
    added = AddSequence(2**40, -5, 1.25, 3, b"salt", np.array([1, 2**31 - 1], dtype=np.int32), 9, params, 0.5, None)
    commands = Commands.unpack(over_the_wire(Commands(4, (added,), (8, 9), Knobs(3, 70)).pack()))
    assert commands.add[0].prompt.tolist() == [1, 2**31 - 1]
    assert (commands.add[0].params, commands.add[0].seq_id, commands.add[0].ttft_target) == (params, 2**40, 0.5)
    assert (commands.number, commands.cancel, commands.knobs) == (4, (8, 9), Knobs(3, 70))
    ready = Ready(EngineLimits(1, 2, 3, 4, 5), 300, (1, 3), 512)
    assert Ready.unpack(over_the_wire(ready.pack())) == ready
    step_time, mix = StepTimeReport(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5), Mix(1, 2.0, 3.0, 4.0, 5.0)
    load = EngineLoad(
        running=1,
        waiting=2,
        free_slots=3,
        free_blocks=4,
        cached_blocks=2,
        knobs=Knobs(5, 6),
        classes=(ClassLoad(-1, 2, 3, 4),),
        prefill_rate=None,
        completion_rate=1.0,
        block_release_rate=None,
        iteration_seconds=0.5,
        longest_step_seconds=2.0,
        step_time=step_time,
        mix=mix,
        iterations=7,
        prompt_tokens=8,
        output_tokens=9,
        finished=10,
        cached_prompt_tokens=11,
        recomputed_tokens=12,
        preemptions={"blocks": 3},
    )
    tokens = (TokenOut(5, 70, 0, TokenLogprobs(-0.5, ((70, -0.5), (71, -1.5)))), TokenOut(2**40, 71))
    report = StepReport(4, tokens, (Ended(5, EndReason.ERROR, "why"),), 0.25, None, load)
    assert StepReport.unpack(over_the_wire(report.pack())) == report
