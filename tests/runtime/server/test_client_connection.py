"""What clients send that is no request, and requests without end: they leave nothing behind and stop nobody else."""

import json
import socket
import time

import pytest

BODY = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (
    len(BODY),
    BODY,
)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def test_trailers_without_end_are_cut_off(runtime):
    with runtime.connect(raw=CHUNKED + b"x: ") as sock, pytest.raises(OSError):
        sock.sendall(b"a" * 50_000_000)
    assert runtime.completion(prompt="hello", max_tokens=1).status_code == 200
    runtime.assert_idle()


def test_a_client_that_pipelines_without_reading_stops_nobody_else(runtime):
    with runtime.connect(raw=b"") as sock:
        sock.settimeout(0.2)
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 3.0:
                sock.send(HEALTH * 2_000)
        except (OSError, TimeoutError):
            pass
        with socket.create_connection(runtime.address, timeout=10) as other:
            other.sendall(HEALTH)
            assert b" 200 " in other.recv(10_000)


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no HTTP", "chunk size"],
)
def test_what_is_no_http_is_refused_like_everything_else(runtime, raw):
    with runtime.connect(raw=raw) as sock, sock.makefile("rb") as answer:
        head, _, body = answer.read().partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 400 ")
        and b"\r\nconnection: close" in head
        and b"\r\ncontent-type: application/json" in head
    )
    error = json.loads(body)["error"]
    assert (
        error["type"] == "invalid_request_error"
        and error["code"] == "invalid_http_request"
        and "plain HTTP" in error["message"]
    )
    assert runtime.completion(prompt="hello", max_tokens=1).status_code == 200
    runtime.assert_idle()
