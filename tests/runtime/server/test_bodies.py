"""Bodies of every size and transfer coding: what fits the model works, what exceeds the limit is refused without being
read."""

import contextlib
import json
import socket
import time

import pytest

LIMIT = 2 * 2**20


def padded(size):
    """A good request of exactly `size` bytes; the padding is in a member that means nothing."""
    body = json.dumps({"prompt": "A", "max_tokens": 1, "padding": ""})
    return body.replace('""}', '"' + "x" * (size - len(body)) + '"}').encode()


def chunked(body, piece):
    parts = [body[at : at + piece] for at in range(0, len(body), piece)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def head(*lines):
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines]).encode() + b"\r\n\r\n"


def read_answer(sock):
    """Status, headers and body of the next answer; reads until the peer closes or the body is complete."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return None, data
        data += part
    headers, body = data.split(b"\r\n\r\n", 1)
    length = next(
        int(line.split(b":")[1]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += sock.recv(65536)
    return int(headers.split()[1]), headers.lower() + b"\r\n\r\n" + body


@pytest.mark.parametrize("piece", [None, 64, 8192])
@pytest.mark.parametrize("size", [60_000, 65_536, 130_000, 10**6, LIMIT])
def test_a_body_up_to_the_limit_works_with_any_transfer_coding(runtime, size, piece):
    body = padded(size)
    raw = (
        head(f"Content-Length: {len(body)}") + body
        if piece is None
        else head("Transfer-Encoding: chunked") + chunked(body, piece)
    )
    with runtime.connect(raw=raw) as sock:
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize("pieces", [None, 100])
@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_the_offer_of_another_protocol_is_passed_over_and_the_body_is_read(runtime, protocol, coding, pieces):
    """Some clients offer HTTP/2 in each request; they go on in HTTP/1.1 when the answer does."""
    body = padded(300)
    offer = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    framing, sent = (
        (f"Content-Length: {len(body)}", body)
        if coding == "length"
        else ("Transfer-Encoding: chunked", chunked(body, 64))
    )
    raw = head(*offer, framing) + sent
    with runtime.connect(raw=b"") as sock:
        sock.settimeout(20)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for at in range(0, len(raw), pieces or len(raw)):
                sock.sendall(raw[at : at + (pieces or len(raw))])
                time.sleep(0.002)
            status, data = read_answer(sock)
            assert status == 200, data
            assert json.loads(data.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("piece", [None, 64, 8192])
def test_one_byte_too_many_is_413_and_the_connection_closes(runtime, piece):
    body = padded(LIMIT + 1)
    raw = (
        head(f"Content-Length: {len(body)}") + body
        if piece is None
        else head("Transfer-Encoding: chunked") + chunked(body, piece)
    )
    with runtime.connect(raw=b"") as sock:
        sock.settimeout(20)
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # It may close while we send; the answer has come all the same.
            sock.sendall(raw)
        status, data = read_answer(sock)
        assert status == 413
        assert b"connection: close" in data
        assert json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_too_large"
        assert closed(sock)


def closed(sock):
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_an_endless_chunked_body_is_stopped_at_the_limit(runtime):
    """What counts is what was read: no length is announced, and the sender would go on for ever."""
    sent = 0
    with runtime.connect(raw=head("Transfer-Encoding: chunked")) as sock:
        sock.settimeout(20)
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            while sent < 64 * LIMIT:
                sock.sendall(piece)
                sent += 65536
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
    assert LIMIT <= sent < 8 * LIMIT


def test_expect_continue_is_honoured_before_the_body_and_refused_when_it_is_too_long(runtime):
    body = padded(5000)
    with runtime.connect(raw=head(f"Content-Length: {len(body)}", "Expect: 100-continue")) as sock:
        sock.settimeout(20)
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        assert read_answer(sock)[0] == 200
    with runtime.connect(raw=head(f"Content-Length: {LIMIT + 1}", "Expect: 100-continue")) as sock:
        sock.settimeout(20)
        assert read_answer(sock)[0] == 413


def test_a_body_shorter_than_announced_leaves_nothing_behind(runtime):
    body = padded(500)
    with runtime.connect(raw=head("Content-Length: 5000") + body) as sock:
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(20)
        assert sock.recv(65536) == b""
    assert runtime.completion(prompt="A", max_tokens=1).status_code == 200


@pytest.fixture(scope="module")
def impatient(start_runtime, tiny_checkpoint):
    """A runtime that waits for bodies for half a second, and keeps idle connections for one."""
    flags = ["--body-timeout", 0.5, "--keep-alive-seconds", 1, "--num-blocks", 512]
    return start_runtime(tiny_checkpoint("llama", max_position_embeddings=8192), *flags)


def test_a_slow_upload_is_408_and_holds_no_slot(impatient):
    with impatient.connect(raw=head("Content-Length: 5000") + b"{") as sock:
        sock.settimeout(20)
        status, data = read_answer(sock)
        assert status == 408 and b"connection: close" in data
    impatient.assert_idle()


def test_the_idle_timer_leaves_an_answer_in_progress_alone(impatient):
    """Two pipelined requests: the first streams for longer than the idle time-out, and both are answered in full."""
    first = json.dumps({"prompt": [5] * 90, "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
    second = json.dumps({"prompt": "A", "max_tokens": 1}).encode()
    raw = head(f"Content-Length: {len(first)}") + first + head(f"Content-Length: {len(second)}") + second
    with impatient.connect(raw=raw) as sock:
        sock.settimeout(60)
        data, began = b"", time.monotonic()
        while data.count(b"HTTP/1.1 200") < 2 or not data.endswith(b"}"):
            data += sock.recv(65536) or pytest.fail(f"closed after {data[-300:]}")
            if b"[DONE]" not in data:
                streamed = time.monotonic() - began
        assert b"data: [DONE]" in data
        assert streamed > 1.2, "the stream has to outlast the idle time-out"


def test_an_idle_connection_is_kept_for_as_long_as_was_said(impatient):
    with impatient.connect({"prompt": "A", "max_tokens": 1}) as sock:
        sock.settimeout(30)
        assert read_answer(sock)[0] == 200
        began = time.monotonic()
        assert sock.recv(10) == b""
        assert 0.7 < time.monotonic() - began < 15


def drip(sock, count):
    for _ in range(count):
        sock.sendall(b"a")
        time.sleep(0.1)


def test_the_rest_of_a_body_that_nobody_waits_for_keeps_no_connection_open(impatient):
    with impatient.connect(raw=b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n") as sock:
        assert b" 405 " in sock.recv(10_000)
        with pytest.raises(OSError):
            drip(sock, 300)
