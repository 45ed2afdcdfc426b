"""The emulated accelerator: iterations last as long as the pace says, are predicted so, and it says what it
is."""

import json
import re
import statistics
import threading
import time

import pytest
from headway_runtime.settings import SettingsError, from_arguments

PACE = "0.04,0.0005,0.002,0.00001"


@pytest.fixture(scope="module")
def paced(start_runtime, tiny_checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "iterations.jsonl"
    flags = [
        "--max-num-seqs",
        4,
        "--prefill-token-budget",
        32,
        "--num-blocks",
        128,
        "--threads",
        1,
        "--iteration-log",
        log,
        "--pace",
        PACE,
    ]
    runtime = start_runtime(tiny_checkpoint("llama", max_position_embeddings=1024), *flags, quick=False)
    runtime.iteration_log = log
    return runtime


def paced_seconds(shape):
    return 0.04 + 0.0005 * shape["prefill_tokens"] + 0.002 * shape["decode_rows"] + 0.00001 * shape["context_tokens"]


def test_iterations_last_as_long_as_the_pace_says_and_are_predicted_so(paced):
    threads = [
        threading.Thread(target=paced.completion, kwargs={"prompt": [5 + n] * 80, "max_tokens": 30, "ignore_eos": True})
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = [json.loads(line) for line in paced.iteration_log.read_text().splitlines()]
    assert len(steps) >= 60 and max(step["shape"]["decode_rows"] for step in steps) == 4
    assert all(step["seconds"] >= paced_seconds(step["shape"]) * 0.999 for step in steps)
    # A busy machine may only make it longer; half of the iterations are at the pace, within a fifth.
    assert statistics.median(step["seconds"] / paced_seconds(step["shape"]) for step in steps) < 1.2
    assert statistics.median(abs(step["predicted"] / paced_seconds(step["shape"]) - 1) for step in steps) < 0.2


def first_tokens(runtime):
    """(how many, seconds in all, {upper bound: how many up to it}) of the histogram of times to the first token."""
    name, labels = "headway_engine_ttft_seconds", {"class": "other"}
    found = re.findall(rf'^{name}_bucket{{class="other",le="(\S+)"}} (\S+)$', runtime.metrics(), re.MULTILINE)
    buckets = {float(bound): float(count) for bound, count in found}
    return runtime.metric(f"{name}_count", **labels), runtime.metric(f"{name}_sum", **labels), buckets


def test_the_time_to_the_first_token_ends_with_the_last_chunk_of_the_prompt(paced):
    """Three chunks take 0.16 s in all; two more tokens come after, which are none of it."""
    paced.completion(prompt="A", max_tokens=1)
    paced.assert_idle()
    count, seconds, buckets = first_tokens(paced)
    began = time.monotonic()
    with paced.client.stream(
        "POST", f"{paced.url}/v1/completions", json={"prompt": [90] * 80, "max_tokens": 3, "stream": True}
    ) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data: "))
        seen = time.monotonic() - began
    paced.assert_idle()
    later_count, later_seconds, later_buckets = first_tokens(paced)
    ours = later_seconds - seconds
    assert later_count - count == 1
    assert 3 * 0.04 + 80 * 0.0005 <= ours <= seen
    fullest = min(bound for bound in buckets if later_buckets[bound] > buckets[bound])
    assert fullest / 1.2 <= ours <= fullest, "known by its bucket to a fifth"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_left_before_its_first_token_has_no_time_to_it(paced, eventual, stream):
    paced.completion(prompt="A", max_tokens=1)
    paced.assert_idle()
    before = first_tokens(paced)
    with paced.connect({"prompt": [91] * 900, "max_tokens": 1, "stream": stream}):
        eventual(lambda: paced.load().running == 1, what="a prefill of 1.6 s under way")
    paced.assert_idle()
    assert first_tokens(paced) == before


def test_it_says_that_it_is_emulated(paced, shared_runtime):
    assert paced.load().emulated_pace == PACE and paced.metric("headway_engine_emulated_accelerator") == 1
    assert "emulated accelerator" in paced.log
    assert (
        shared_runtime.load().emulated_pace is None
        and shared_runtime.metric("headway_engine_emulated_accelerator") == 0
    )


@pytest.mark.parametrize("pace", ["1,2,3", "a,b,c,d", "0,0,0,0", "-1,0,0,0", "inf,0,0,0", "nan,0,0,0", ""])
def test_a_pace_that_is_none_is_refused(tiny_llama, pace):
    with pytest.raises(SettingsError, match=r"--pace: .*four numbers"):
        from_arguments(["--model", str(tiny_llama), f"--pace={pace}"])
