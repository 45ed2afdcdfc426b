"""What clients send that is no request, and requests without end: bounded, and cut off without harm to others."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import pytest
from headway_edge import client_connection
from headway_edge.client_connection import CONNECTION, MAX_UNANSWERED
from headway_edge.listener import HttpServer, PortTaken, listen

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
NO_HTTP = {
    "no HTTP": b"GARBAGE\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "header": POST + b"no colon here\r\n\r\n",
    "negative length": POST + b"content-length: -3\r\n\r\n",
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    "length and chunks": POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunk size": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n",
}


@dataclass
class Served:
    """An application that answers with the body that it got, and what it was asked."""

    port: int = 0
    scopes: list = field(default_factory=list)
    disconnected: int = 0
    waits: bool = False
    """It answers nothing, and waits until its client has left."""

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected += 1
                return
            body += message["body"]
            if not message["more_body"] and not self.waits:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextlib.asynccontextmanager
    async def client(self, raw=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def answer(self, raw):
        """All that comes back until the connection ends."""
        async with self.client(raw) as (reader, _):
            return await asyncio.wait_for(reader.read(), 30)


@pytest.fixture
async def served():
    app = Served()
    sock = listen("127.0.0.1", 0, 5.0)
    app.port = sock.getsockname()[1]
    server = HttpServer(app, 30.0, 3.0)
    serving = asyncio.create_task(server.serve([sock]))
    await server.listening.wait()
    yield app
    server.should_exit = True
    await serving


async def again_and_again(writer, piece, times, pause=0.0):
    for _ in range(times):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause)


def refusal(answer):
    """Status and code of an error, which must be JSON and close the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head and b"\r\ncontent-type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return int(head.split(b" ")[1]), error["code"]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("raw", NO_HTTP.values(), ids=NO_HTTP)
async def test_what_is_no_http_is_refused_like_everything_else(served, raw):
    assert refusal(await served.answer(raw)) == (400, "invalid_http_request")
    assert len(served.scopes) == (raw == NO_HTTP["chunk size"])


async def test_what_is_no_http_behind_a_request_is_not_taken_for_its_answer(served):
    served.waits = True
    assert await served.answer(GET + NO_HTTP["no HTTP"]) == b""
    await until(lambda: served.disconnected == 1)


@pytest.mark.parametrize("start", [CHUNKED + b"x: ", b"GET / HTTP/1.1\r\nx: "], ids=["trailers", "head"])
@pytest.mark.parametrize("piece", [b"a: b\r\n" * 2_000, b"a" * 12_000], ids=["many", "long"])
async def test_headers_without_end_are_cut_off(served, start, piece):
    async with served.client(start) as (_, writer):
        with pytest.raises(ConnectionError):
            await again_and_again(writer, piece, 4_000)


async def test_headers_without_end_are_refused_with_a_reason(served):
    async with served.client(POST + b"x-long: ") as (reader, writer):
        # In pieces, each read before the next comes: closing on unread bytes would reset the connection.
        await again_and_again(writer, b"a" * 30_000, 4, pause=0.1)
        assert refusal(await asyncio.wait_for(reader.read(), 30)) == (431, "headers_too_large")
    assert served.scopes == []


@pytest.mark.parametrize("raw", [b"", b"GET / HT", GET + b"GET / HT"], ids=["nothing", "half", "second"])
async def test_a_head_has_a_time_limit(served, monkeypatch, raw):
    monkeypatch.setattr(client_connection, "HEAD_SECONDS", 0.1)
    assert (b" 200 " in await served.answer(raw)) == raw.startswith(GET)


async def test_a_trailer_is_no_header(served):
    async with served.client(CHUNKED + b"x-late: 1\r\n\r\n") as (reader, _):
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
    assert [name for name, _ in served.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_requests_that_wait_on_one_connection_are_bounded(served):
    served.waits = True
    async with served.client(GET) as (_, writer):
        await until(lambda: served.scopes)
        connection = served.scopes[0]["extensions"][CONNECTION]
        for _ in range(20):
            writer.write(GET * 2_000)
            await asyncio.sleep(0.01)
        await until(lambda: served.disconnected == 1)
        assert 0 < len(connection.pipeline) <= MAX_UNANSWERED


async def test_an_offer_of_another_protocol_is_passed_over_and_the_body_kept(served):
    offer = b"connection: Upgrade, close\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc"
    assert b"abc" in await served.answer(POST + offer)


async def test_a_client_of_http_1_0_gets_no_chunks(served):
    answer = await served.answer(b"POST / HTTP/1.0\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and body == b"abc"


def test_a_port_that_is_taken_is_named():
    with (
        listen("127.0.0.1", 0, 1.0) as sock,
        pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{sock.getsockname()[1]}"),
    ):
        listen("127.0.0.1", sock.getsockname()[1], 1.0)
