"""Objectives against what happened: what is judged, by which target, and what the histograms say of scripted delays."""

import asyncio
import dataclasses
import random

import pytest
from headway_core.admission import Request
from headway_core.contract import documents
from headway_core.contract.header_names import ShedReason
from headway_core.contract.metric_names import OUTCOMES
from headway_core.contract.policy import Policy, Pool
from headway_core.histogram import GROWTH, SMALLEST, LogHistogram, bucket
from headway_core.slo import Objectives, PriorityClass, TpotObjective, TtftObjective
from headway_gateway.accounting import ClassCounters, DurationHistogram, RequestRecord
from headway_gateway.client_request import RequestStopped, StopCause
from headway_gateway.error_responses import ErrorResponse, RequestFailed
from headway_gateway.metrics import cumulative

SLO = PriorityClass("c", 0, Objectives(TtftObjective(1.0, per_thousand_prompt_tokens=0.5), TpotObjective(0.05)))


def new_record(counters, slo=SLO, choices=1, tokens=100, retry=False):
    return RequestRecord(counters, Request(1, slo, 10.0, tokens, retry=retry), choices)


def streamed(first, gaps, *, slo=SLO, prompt=100, choices=1):
    counters = ClassCounters()
    with new_record(counters, slo, choices) as record:
        record.admitted()
        now = 10.0 + first
        record.content(now, 1)
        for gap in gaps:
            now += gap
            record.content(now, 1)
        record.finished(now + 5.0, True, prompt, len(gaps) + 1)
    return counters


@pytest.mark.parametrize(
    ("first", "gaps", "prompt", "good"),
    [
        (0.9, [0.04] * 9, 100, {"ttft": 1, "tpot": 1, "all": 1}),
        (1.04, [0.04] * 9, 100, {"ttft": 1, "tpot": 1, "all": 1}),  # 0.1 thousand tokens add 0.05 s
        (1.06, [0.04] * 9, 100, {"ttft": 0, "tpot": 1, "all": 0}),
        (1.4, [0.04] * 9, 1000, {"ttft": 1, "tpot": 1, "all": 1}),
        (0.9, [0.06] * 9, 100, {"ttft": 1, "tpot": 0, "all": 0}),
        (0.9, [0.3, *[0.01] * 9], 100, {"ttft": 1, "tpot": 1, "all": 1}),  # the mean counts, not one gap
        (0.9, [], 100, {"ttft": 1, "all": 1}),  # a single token has no time per token
    ],
)
def test_a_stream_is_judged_by_its_first_token_and_its_mean_gap(first, gaps, prompt, good):
    counters = streamed(first, gaps, prompt=prompt)
    assert counters.attained == good and counters.judged == dict.fromkeys(good, 1)
    assert counters.ttft.sum == pytest.approx(first) and counters.tpot.sum == pytest.approx(
        sum(gaps) / len(gaps) if gaps else 0
    )
    assert counters.outcomes["ok"] == 1 and counters.itl.histogram.total == len(gaps)


@pytest.mark.parametrize(
    ("seconds", "tokens", "kept"),
    [(1.0, 1, True), (1.4, 9, True), (1.5, 9, False), (5.9, 100, True), (6.2, 100, False)],
)
def test_an_answer_that_does_not_stream_is_judged_by_the_deadline_of_its_last_token(seconds, tokens, kept):
    counters = ClassCounters()
    with new_record(counters) as record:
        record.finished(10.0 + seconds, False, 100, tokens)
    assert counters.judged == {"all": 1} and counters.attained == {"all": kept}
    assert counters.ttft.histogram.total == counters.tpot.histogram.total == 0


def test_what_is_not_known_is_not_judged():
    counters = ClassCounters()
    with new_record(counters) as record:
        record.content(10.5, 1)
        record.content(11.0, 3)
        record.finished(11.0, True, None, None)
    assert counters.judged == {"ttft": 1, "all": 1} and counters.output_tokens == 0
    with new_record(counters, dataclasses.replace(SLO, objectives=Objectives(tpot=TpotObjective(0.1)))) as record:
        record.finished(11.0, False, 100, 10)
    assert counters.judged == {"ttft": 1, "all": 1} and counters.outcomes["ok"] == 2


def test_several_answers_in_one_request_count_once_and_their_gaps_not_at_all():
    counters = ClassCounters()
    with new_record(counters, choices=4) as record:
        for step in range(10):
            record.content(10.5 + step * 0.04, 4)
        record.finished(11.0, True, 100, 40)
    assert counters.ttft.histogram.total == counters.tpot.histogram.total == 1 and counters.itl.histogram.total == 0
    assert counters.tpot.sum == pytest.approx(0.04) and counters.output_tokens == 40 and counters.offered == 1


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (RequestFailed(ErrorResponse(429, "x"), "shed", ShedReason.SLOT_WAIT), "shed", "slot_wait"),
        (RequestFailed(ErrorResponse(502, "x"), "upstream_error"), "upstream_error", None),
        (RequestStopped(StopCause.CLIENT_GONE), "client_closed", None),
        (RequestStopped(StopCause.CLIENT_STALLED), "client_closed", None),
        (RequestStopped(StopCause.TIMEOUT), "timeout", None),
        (RequestStopped(StopCause.DRAIN), "shed", "draining"),
        (RuntimeError("a fault of our own"), "upstream_error", None),
        (asyncio.CancelledError(), "upstream_error", None),
    ],
)
def test_whatever_ends_a_request_it_has_exactly_one_outcome(error, outcome, reason):
    counters = ClassCounters()
    with pytest.raises(type(error)), new_record(counters, retry=True) as record:  # noqa: PT012 - what the context does on the way is the test
        record.set_queued(True)
        assert (counters.queued, counters.in_flight) == (1, 1)
        raise error
    assert (counters.queued, counters.in_flight, counters.offered, counters.retries) == (0, 0, 1, 1)
    assert counters.outcomes == {**dict.fromkeys(OUTCOMES, 0), outcome: 1}
    assert counters.shed == ({reason: 1} if reason else {})
    assert counters.ttft.histogram.total == 0 and counters.judged == {}


def test_a_drain_after_admission_is_a_failure_and_a_second_try_the_same_admission():
    counters = ClassCounters()
    with pytest.raises(RequestStopped), new_record(counters) as record:  # noqa: PT012 - likewise
        record.admitted()
        record.admitted()
        raise RequestStopped(StopCause.DRAIN)
    assert counters.admitted == 1 and counters.outcomes["upstream_error"] == 1


@pytest.mark.parametrize("truth", [0.05, 0.5, 2.0, 70.0, 400.0, 3000.0])
def test_quantiles_of_exported_buckets_are_within_one_bucket_of_the_truth(truth):
    counters = ClassCounters()
    for _ in range(20):
        counters.ttft.add(truth)
    buckets = [(float(edge), count) for edge, count in cumulative(counters.ttft)]
    upper = next(edge for edge, count in buckets if count >= 10)
    below = [edge for edge, count in buckets if count == 0]
    assert max(below) < truth <= upper * 1.0001 and upper / max(below) == pytest.approx(GROWTH**4, rel=1e-3)
    # The load report has the finer ones: ten percent around every target.
    assert LogHistogram(counters.read().ttft).quantile(0.5) == pytest.approx(truth, rel=0.1)


def test_durations_land_in_the_core_s_buckets():
    rng = random.Random(3)
    edges = [SMALLEST * GROWTH**index for index in range(0, 250, 7)]
    values = [0.0, SMALLEST, 1.0, 86_400.0, *edges, *(10 ** rng.uniform(-6, 5) for _ in range(2_000))]
    for value in values:
        durations = DurationHistogram()
        durations.add(value)
        assert durations.histogram.counts == {bucket(value): 1}, value


def test_durations_are_all_counted_whenever_somebody_looks():
    rng = random.Random(4)
    durations, alone = DurationHistogram(), LogHistogram()
    values = [rng.choice([0.0, 0.02, 0.021, rng.uniform(0, 3)]) for _ in range(3_000)]
    for count, value in enumerate(values, start=1):
        durations.add(value)
        alone.add(value)
        if count % 700 == 1:
            assert durations.histogram == alone and durations.sum == pytest.approx(sum(values[:count]))
    durations.add(0.5, 2_000)
    alone.add(0.5, 2_000)
    assert durations.histogram == alone and durations.sum == pytest.approx(sum(values) + 1_000)


async def test_the_wait_in_the_queue_is_part_of_time_to_first_token(start_gateway, stub_runtime, until):
    stub = stub_runtime(slots=1, completion_rate=1.0)
    gateway = await start_gateway(stub, admission_rule="open")
    first = asyncio.ensure_future(gateway.ask(stream=True, stub={"first": 1.0, "tokens": 1}))
    await until(lambda: stub.running == 1)
    seq = stub.seq
    await until(lambda: stub.seq > seq + 1)
    begun = asyncio.get_running_loop().time()
    second = await gateway.ask(stream=True, stub={"first": 0.1, "tokens": 1})
    waited = asyncio.get_running_loop().time() - begun
    assert (await first).status == second.status == 200
    await gateway.settled()
    seen = sorted(gateway.counters().ttft.histogram.counts)
    assert gateway.counters().ttft.sum == pytest.approx(1.0 + waited, abs=0.3) and len(seen) >= 1 and waited > 0.5


async def test_scripted_delays_show_in_the_histograms(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    for stream in (True, False):
        assert (await gateway.ask(stream=stream, stub={"first": 0.3, "tokens": 5, "gap": 0.1})).status == 200
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True, "stub": {"first": 60.0}})
        await asyncio.sleep(0.2)
    await gateway.settled()
    counters = gateway.counters()
    # One stream counted; the answer that did not stream and the one that was abandoned before its first token were not.
    assert counters.ttft.histogram.total == counters.tpot.histogram.total == 1 and counters.itl.histogram.total == 4 + 1
    assert LogHistogram(counters.ttft.histogram.counts).quantile(0.5) == pytest.approx(0.3, rel=0.3)
    assert LogHistogram(counters.tpot.histogram.counts).quantile(0.5) == pytest.approx(0.1, rel=0.3)


async def test_a_request_is_judged_by_the_target_in_force_when_it_arrived(start_gateway, stub_runtime, tmp_path, until):
    stub = await stub_runtime().start()
    file = tmp_path / "p.json"

    def write(revision, target):
        classes = (PriorityClass("default", 0, Objectives(TtftObjective(target))),)
        file.write_text(documents.dump(Policy(revision, "u", 1, Pool("p", (stub.endpoint,)), classes, "default")))

    write(1, 30.0)
    gateway = await start_gateway(stub, pools=(), policy=file, admission_rule="open")
    asked = asyncio.ensure_future(gateway.ask(stream=True, stub={"first": 2.5, "tokens": 2}))
    await until(lambda: stub.running == 1)
    write(2, 0.001)
    await until(lambda: gateway.pool.policy.revision == 2)
    await asked
    await gateway.settled()
    assert gateway.counters().attained == {"ttft": 1, "all": 1}
    await gateway.ask(stream=True, stub={"first": 0.1, "tokens": 2})
    await gateway.settled()
    assert gateway.counters().judged["ttft"] == 2 and gateway.counters().attained["ttft"] == 1
    await stub.kill()


async def test_predictions_are_compared_with_what_happened(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    for _ in range(5):
        await gateway.ask(stream=True, stub={"first": 0.1, "tokens": 1})
    errors = gateway.pool.ttft_errors["admitted"]
    assert sum(errors.counts) == 5
    # It was predicted to be immediate, so the signed error is negative.
    assert errors.sum == pytest.approx(-0.5, abs=0.3)
    text = (await gateway.control("/metrics")).body.decode()
    assert 'headway_ttft_prediction_error_seconds_count{decision="admitted",pool="p"} 5.0' in text
