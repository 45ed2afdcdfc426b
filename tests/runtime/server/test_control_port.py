"""What a replica says about itself: report, readiness, closed labels, true histograms; and it says so while a step
computes."""

import itertools
import json
import random
import re
import statistics
import threading
import time

import httpx
import pytest
from headway_core.contract import documents
from headway_core.contract.reports import ReplicaState


def test_the_report_says_what_the_replica_is(runtime):
    report = runtime.load()
    assert (report.model, report.pool, report.state) == ("tiny", "default", ReplicaState.READY)
    assert (report.limits.max_num_seqs, report.limits.prefill_token_budget) == (8, 64)
    assert (report.limits.max_model_len, report.limits.total_blocks, report.limits.block_size) == (4096, 1024, 32)
    assert runtime.client.get(f"{runtime.url}/v1/models").json()["data"][0]["max_model_len"] == 4096
    assert report.policy is None and report.free_slots == 8
    assert runtime.load().seq > report.seq and runtime.load().boot_id == report.boot_id
    assert runtime.client.get(f"{runtime.control}/policy").status_code == 404
    assert runtime.client.get(f"{runtime.control}/ready").json() == {"status": "ready"}


def test_every_answer_carries_the_load_hint_and_dispatch_numbers_come_back(runtime):
    others = set(runtime.load().dispatched)
    headers = {"x-headway-dispatch": "gw-1:41"}
    answer = runtime.client.post(
        f"{runtime.url}/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers=headers
    )
    assert documents.load_hint(answer.headers["x-headway-load"]).dispatched["gw-1"] == 41
    refused = runtime.client.post(f"{runtime.url}/v1/completions", json={}, headers={"x-headway-dispatch": "gw-1:43"})
    assert refused.status_code == 400 and "x-headway-load" in refused.headers
    runtime.client.post(
        f"{runtime.url}/v1/completions",
        json={"prompt": "A", "max_tokens": 1},
        headers={"x-headway-dispatch": "gw-1:42"},
    )
    assert runtime.load().dispatched["gw-1"] == 43
    for odd in ("x", ":", "gw:", "gw:-1", "gw:1.5", "é:1"):
        runtime.client.post(
            f"{runtime.url}/v1/completions",
            json={"prompt": "A", "max_tokens": 1},
            headers={"x-headway-dispatch": odd.encode()},
        )
    assert set(runtime.load().dispatched) <= others | {"gw-1"}


def test_a_prefix_of_another_request_is_reused_but_never_across_tenants(runtime):
    prompt = [random.Random(11).randrange(5, 260) for _ in range(100)]

    def cached(tenant):
        headers = {"x-headway-tenant": tenant} if tenant else {}
        answer = runtime.client.post(
            f"{runtime.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}, headers=headers
        )
        assert answer.headers["x-headway-prompt-tokens"] == "100"
        assert (
            int(answer.headers["x-headway-cached-tokens"])
            == answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        )
        return int(answer.headers["x-headway-cached-tokens"])

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b"), cached(None)] == [0, 96, 0, 0, 96, 96]


def test_several_choices_share_one_prefill(runtime):
    prompt = [random.Random(12).randrange(5, 260) for _ in range(160)]
    before = runtime.metric("headway_engine_prompt_tokens_total", source="computed")
    usage = runtime.completion(prompt=prompt, n=4, max_tokens=3, ignore_eos=True).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (
        160,
        12,
        0,
    )
    runtime.assert_idle()
    assert runtime.metric("headway_engine_prompt_tokens_total", source="computed") - before <= 160 + 3 * 32


def test_histograms_count_requests_and_gaps_as_they_say(runtime):
    def counts():
        names = ("headway_engine_ttft_seconds_count", "headway_engine_itl_seconds_count")
        return [runtime.metric(name, **{"class": "other"}) for name in names] + [
            runtime.metric("headway_engine_output_tokens_total")
        ]

    before = counts()
    runtime.completion(prompt="hello", n=4, max_tokens=5, ignore_eos=True)
    runtime.assert_idle()
    assert [b - a for a, b in zip(before, counts(), strict=True)] == [1, 16, 20], (
        "one request, four gaps for each of four choices"
    )
    bounds = [
        float(bound)
        for bound in re.findall(
            r'headway_engine_ttft_seconds_bucket\{class="other",le="([0-9.e+]+)"', runtime.metrics()
        )
    ]
    assert bounds[0] <= 0.001 and bounds[-1] >= 3600
    assert all(b / a < 1.2 for a, b in itertools.pairwise(bounds))


def test_the_documentation_lists_every_route(runtime):
    paths = runtime.client.get(f"{runtime.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= set(paths)
    assert all(
        set(methods) <= {"get"}
        for path, methods in runtime.client.get(f"{runtime.control}/openapi.json").json()["paths"].items()
    )
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = runtime.client.options(f"{runtime.url}/v1/completions", headers=preflight)
    assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]


@pytest.fixture(scope="module")
def heavy(start_runtime, tiny_checkpoint, tmp_path_factory):
    """A model whose prefill chunks take about half a second each."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    model = tiny_checkpoint("llama", max_position_embeddings=16384, **shape)
    log = tmp_path_factory.mktemp("log") / "iterations.jsonl"
    runtime = start_runtime(
        model, "--prefill-token-budget", 512, "--num-blocks", 512, "--iteration-log", log, "--no-enable-prefix-caching"
    )
    runtime.iteration_log = log
    return runtime


def test_health_answers_while_half_second_steps_compute(heavy):
    """The promise is that no answer waits for a step: the slowest of a hundred is measured against the steps of the
    same seconds."""
    threads = [threading.Thread(target=lambda: heavy.completion(prompt=[5] * 2500, max_tokens=1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    while heavy.load().running == 0:
        time.sleep(0.01)
    waits = []
    with httpx.Client(timeout=60) as client:
        while any(thread.is_alive() for thread in threads):
            began = time.perf_counter()
            assert client.get(f"{heavy.control}/health").status_code == 200
            waits.append(time.perf_counter() - began)
            time.sleep(0.02)
    steps = [json.loads(line) for line in heavy.iteration_log.read_text().splitlines()]
    step = statistics.median(one["seconds"] for one in steps if one["shape"]["prefill_tokens"] == 512)
    assert step > 0.05 and len(waits) >= 40
    late = sum(wait > step / 2 for wait in waits)
    assert late <= max(1, len(waits) // 100), (
        f"{late} of {len(waits)} answers took more than half a step of {step:.2f} s"
    )
