"""A client that goes away takes its request with it, in whichever phase it is, and gives everything back."""

import json
import socket
import struct

import pytest

LONG = 8000
"""Tokens of work that nobody could finish within the seconds that these tests wait."""


@pytest.fixture(scope="module")
def small_runtime(start_runtime, tiny_checkpoint):
    """Two slots and a budget of 4 prefill tokens: queues and prefills last."""
    flags = ["--max-num-seqs", 2, "--prefill-token-budget", 4, "--num-blocks", 2048, "--no-enable-prefix-caching"]
    return start_runtime(tiny_checkpoint("llama", max_position_embeddings=16384), *flags)


def abandon(sock, how):
    """FIN: the client closes in an orderly way. RST: it is gone at once."""
    if how == "RST":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def long_decode(stream):
    return {"prompt": "A", "max_tokens": LONG, "ignore_eos": True, "stream": stream}


def long_prefill(stream):
    return {"prompt": [5] * LONG, "max_tokens": 1, "stream": stream}


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_an_abandoned_request_is_given_up(small_runtime, eventual, phase, stream, how):
    runtime = small_runtime
    idle = runtime.assert_idle()
    blockers = [runtime.connect(long_decode(True)) for _ in range(2)] if phase == "queued" else []
    if blockers:
        eventual(lambda: runtime.load().running == 2, what="two running")
    sock = runtime.connect(long_prefill(stream) if phase == "prefilling" else long_decode(stream))
    if phase == "queued":
        eventual(lambda: runtime.load().waiting == 1, what="one waiting")
    elif phase == "prefilling":
        eventual(lambda: runtime.load().prompt_tokens > idle.prompt_tokens + 8, what="a prefill under way")
    else:
        eventual(lambda: runtime.load().output_tokens > idle.output_tokens + 3, what="a decode under way")
    before = runtime.load()
    abandon(sock, how)
    if phase == "queued":
        eventual(lambda: runtime.load().waiting == 0, 5, "the queue to be empty")
        assert runtime.load().running == 2, "the others go on"
        for blocker in blockers:
            abandon(blocker, how)
    after = runtime.assert_idle(5)
    assert after.finished == idle.finished
    assert after.output_tokens - before.output_tokens < LONG / 2
    if phase == "prefilling":
        assert after.prompt_tokens - idle.prompt_tokens < LONG / 2


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_several_requests_on_one_connection_stops_them_all(
    small_runtime, eventual, stream, how
):
    runtime = small_runtime
    idle = runtime.assert_idle()
    bodies = [json.dumps(long_decode(stream)).encode() for _ in range(3)]
    raw = b"".join(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        for body in bodies
    )
    sock = runtime.connect(raw=raw)
    eventual(lambda: runtime.load().output_tokens > idle.output_tokens + 3, what="a decode under way")
    assert runtime.load().running == 1, "requests of one connection are answered one after another"
    abandon(sock, how)
    after = runtime.assert_idle(5)
    assert after.finished == idle.finished
    assert after.output_tokens - idle.output_tokens < LONG / 2
    assert "Traceback" not in runtime.log


def test_twenty_live_requests_with_one_request_id_do_not_meet(shared_runtime, eventual):
    """The client's id is for tracing: half of them leave, the others finish with their own texts."""
    runtime = shared_runtime
    bodies = [{"prompt": [70 + at] * 5, "max_tokens": 300, "ignore_eos": True, "temperature": 0} for at in range(20)]
    expected = [runtime.completion(**body).json()["choices"][0]["text"] for body in bodies[:10]]
    socks = [runtime.connect(body, headers=("X-Request-Id: id", "Connection: close")) for body in bodies]
    for sock in socks[10:]:
        abandon(sock, "FIN")
    for sock, text in zip(socks[:10], expected, strict=True):
        sock.settimeout(60)
        data = b""
        while part := sock.recv(65536):
            data += part
        assert data.count(b"x-request-id: id\r\n") == 1
        assert json.loads(data.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] == text
        sock.close()
    runtime.assert_idle()
    assert all(float(line.split()[-1]) >= 0 for line in runtime.metrics().splitlines() if line.startswith("headway_"))


@pytest.mark.parametrize("value", ["x" * 65_000, "a b", "é", '"<script>'])
def test_a_request_id_that_is_long_or_odd_is_not_echoed(runtime, value):
    raw = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: {value}\r\n\r\n".encode()
    with runtime.connect(raw=raw.replace(b"GET /v1/models", b"POST /v1/nothing")) as sock:
        sock.settimeout(20)
        answer = sock.recv(65536)
    assert value.encode() not in answer and b"x-request-id: " in answer
    with runtime.connect(raw=b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n") as sock:
        sock.settimeout(20)
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")
