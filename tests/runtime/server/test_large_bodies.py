"""Large bodies are read aside, while the server goes on answering everybody else."""

import json
import threading
import time

import httpx
import pytest

LIMIT = 2 * 2**20
"""Of the shared runtime."""


def dense(item, **members):
    """A good request whose unused member holds as many items as the limit of the body allows."""
    head = json.dumps({"prompt": "A", "max_tokens": 1, **members, "unused": []}).removesuffix("]}")
    return (head + ",".join([item] * ((LIMIT - len(head) - 2) // (len(item) + 1))) + "]}").encode()


@pytest.mark.parametrize("item", ["1.5", "[]"])
def test_health_answers_while_a_large_body_is_read(runtime, item):
    """No answer may wait for the reading of a body: the slowest are measured against the time that the body itself
    took."""
    body, took, statuses = dense(item), [], []

    def send():
        for _ in range(3):
            began = time.perf_counter()
            statuses.append(httpx.post(f"{runtime.url}/v1/completions", content=body, timeout=120).status_code)
            took.append(time.perf_counter() - began)

    sender = threading.Thread(target=send)
    waits = []
    with httpx.Client(timeout=120) as client:
        client.get(f"{runtime.url}/health")
        sender.start()
        while sender.is_alive():
            began = time.perf_counter()
            assert client.get(f"{runtime.url}/health").status_code == 200
            waits.append(time.perf_counter() - began)
            time.sleep(0.002)
    assert statuses == [400 if item == "[]" else 200] * 3
    late = sum(wait > sorted(took)[1] / 3 for wait in waits)
    assert late <= 1, f"{late} of {len(waits)} answers were late; bodies took {took}"


def request_bytes(body):
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def test_large_bodies_whose_clients_have_left_are_not_read_and_never_reach_the_engine(runtime):
    """Bodies wait for each other to be read: those of clients that left keep no living one waiting, and none becomes
    work."""
    body, long = dense("1.5"), dense("1.5", max_tokens=2000, ignore_eos=True)

    def served():
        began = time.perf_counter()
        assert httpx.post(f"{runtime.url}/v1/completions", content=body, timeout=120).status_code == 200
        return time.perf_counter() - began

    alone = sorted(served() for _ in range(3))[1]
    before = runtime.assert_idle()
    for _ in range(20):
        with runtime.connect(raw=request_bytes(long)):
            pass
    behind_them = served()
    after = runtime.assert_idle(10)
    assert behind_them < 10 * alone, "it waited for twenty bodies that nobody wants"
    assert after.finished - before.finished == 1
    assert after.output_tokens - before.output_tokens < 200, "nobody is there for those tokens"


def test_a_client_that_leaves_while_its_body_is_read_leaves_no_work(runtime, eventual):
    """However late it is noticed, what was begun is given up within a second of it."""
    long = dense("1.5", max_tokens=2000, ignore_eos=True)
    for pause in (0.0, 0.05, 0.1, 0.2, 0.4):
        before = runtime.assert_idle()
        with runtime.connect(raw=request_bytes(long)):
            time.sleep(pause)
        after = runtime.assert_idle(5)
        assert after.finished == before.finished
        assert after.output_tokens - before.output_tokens < 1000


def test_a_prompt_of_many_kilobytes_that_fits_the_context_is_answered(start_runtime, tiny_checkpoint):
    """What is long is the text itself here: 65 KB of it, 13 thousand tokens."""
    model = tiny_checkpoint("llama", max_position_embeddings=16384)
    runtime = start_runtime(model, "--prefill-token-budget", 1024, "--num-blocks", 1024)
    prompt = "hello" * 13_108
    assert len(prompt) > 65_536
    answer = runtime.completion(prompt=prompt, max_tokens=2, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 1 + 13_108
    refused = runtime.completion(prompt="hello" * 20_000, max_tokens=2).json()["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded") and "20001" in refused[
        "message"
    ]
