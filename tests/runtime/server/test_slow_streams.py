"""Streams that are slow on either side: a first token that takes long, and a client that takes nothing."""

import importlib.metadata
import json
import socket

import pytest

PREFILL = [5] * 2000
"""At 4 tokens an iteration: seconds before the first token."""


@pytest.fixture(scope="module")
def slow(start_runtime, tiny_checkpoint):
    flags = [
        "--quiet-stream-seconds",
        0.03,
        "--stalled-client-seconds",
        1,
        "--prefill-token-budget",
        4,
        "--num-blocks",
        2048,
    ]
    return start_runtime(tiny_checkpoint("llama", max_position_embeddings=16384), *flags, "--no-enable-prefix-caching")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_waits_for_its_first_token_is_kept_alive_by_whole_records(slow, path):
    body = (
        {"prompt": PREFILL}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hello" * 2000}]}
    )
    with slow.client.stream(
        "POST", f"{slow.url}{path}", json={**body, "max_tokens": 2, "stream": True, "ignore_eos": True}
    ) as response:
        raw = response.read().decode()
    records = raw.split("\n\n")
    assert records[-1] == "" and records[-2] == "data: [DONE]"
    documents = [json.loads(record.removeprefix("data: ")) for record in records[:-2]]
    empty = [
        one
        for one in documents
        if not (one["choices"][0].get("text") or one["choices"][0].get("delta", {}).get("content"))
    ]
    assert len(empty) >= 4
    if "chat" in path:
        assert [one["choices"][0]["delta"].get("role") for one in documents].count("assistant") == 1
        assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    slow.assert_idle()


def test_both_official_clients_read_such_a_stream(slow, run_client, older_client):
    folder, older = older_client
    assert run_client(slow.url, program="slow_stream_client.py") == importlib.metadata.version("openai")
    assert run_client(slow.url, folder, program="slow_stream_client.py") == older
    slow.assert_idle()


def test_a_client_that_takes_nothing_is_dropped_and_its_work_with_it(slow, eventual):
    """Megabytes of records for a client that reads none: it is given up, by the server if its buffers are full, else by
    the kernel."""
    before = slow.load()
    body = json.dumps(
        {"prompt": "A", "n": 8, "logprobs": 5, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    ).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(slow.address)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        eventual(lambda: slow.load().running == 8, what="all choices running")
        slow.assert_idle(60)
    report = slow.load()
    assert report.finished == before.finished
    assert 0 < report.output_tokens - before.output_tokens < 8 * 8000
