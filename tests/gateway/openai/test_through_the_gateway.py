"""The official `openai` client, in two versions, and the counters after it: real runtimes behind a real gateway
process."""

import importlib.metadata
import json

import httpx
import pytest

pytestmark = pytest.mark.slow


def test_the_newest_client_is_served(run_client, gateway_url):
    assert run_client(gateway_url) == importlib.metadata.version("openai")


def test_a_client_of_a_year_ago_is_served(run_client, gateway_url, older_client):
    folder, version = older_client
    assert run_client(gateway_url, folder) == version


def test_the_answer_is_the_runtime_s_own(two_runtimes, gateway_url):
    body = {
        "model": "tiny",
        "prompt": "hello world",
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }

    def answer(url):
        records = [
            record for record in httpx.post(f"{url}/v1/completions", json=body, timeout=60).text.split("\n\n") if record
        ]
        # No comment of the runtime's reaches a client.
        assert all(record.startswith("data: ") for record in records) and records[-1] == "data: [DONE]"
        events = [json.loads(record.removeprefix("data: ")) for record in records[:-1]]
        # Ids and instants are each answer's own, and a busy engine may put two tokens into one record.
        return "".join(event["choices"][0]["text"] for event in events), {frozenset(event) for event in events}

    assert answer(gateway_url) == answer(two_runtimes[0].url)


def test_the_books_know_what_was_served(two_runtimes, gateway_url):
    before = httpx.get(f"{gateway_url}/status.json").json()["pools"][0]["classes"][0]["offered"]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "stream": True,
        "ignore_eos": True,
    }
    assert httpx.post(f"{gateway_url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    seen = httpx.get(f"{gateway_url}/status.json").json()["pools"][0]["classes"][0]
    assert seen["offered"] == before + 1 and seen["ttft"] > 0 and seen["tpot"] > 0
    assert seen["inFlight"] == seen["queued"] == 0
