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
    """No answer may wait for the reading of a body: the slowest are measured against the time that the body itself took."""
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
