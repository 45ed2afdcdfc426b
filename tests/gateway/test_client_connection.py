"""What clients send that is no request, and requests without end: what the gateway counts, and that others go on."""

import asyncio
import json

import pytest
from headway_edge.client_connection import MAX_UNANSWERED

BODY = json.dumps({"model": "m", "prompt": "x"}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (
    len(BODY),
    BODY,
)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
NO_HEAD = b"GARBAGE\r\n\r\n"
NO_BODY = POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n"


async def again_and_again(client, piece, times, pause=0.0):
    for _ in range(times):
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(pause)


async def test_a_trailer_is_no_header(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    async with gateway.client() as client:
        client.writer.write(CHUNKED + b"x-request-id: from-the-trailer\r\n\r\n")
        reply = await client.reply()
    assert reply.status == 200 and reply.header("x-request-id").startswith("req-")


async def test_the_rest_of_a_body_that_nobody_waits_for_keeps_no_connection_open(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), keep_alive=0.3)
    for port in (gateway.port, gateway.control_port):
        async with gateway.client() as client:
            client.close()
            client.reader, client.writer = await asyncio.open_connection("127.0.0.1", port)
            client.send(b"a", path="/health", length=10_000)
            assert (await client.reply()).status == 405
            with pytest.raises(ConnectionError):
                await again_and_again(client, b"a", 200, pause=0.05)


async def test_requests_that_wait_on_one_connection_are_bounded(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    most = 0

    async def watch():
        nonlocal most
        while True:
            most = max([most, *(len(connection.pipeline) for connection in gateway.gateway.connections)])
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with gateway.client() as client:
        for _ in range(300):
            client.writer.write(HEALTH)
        for _ in range(300):
            assert (await client.reply()).status == 200
        # Reading nothing, as fast as it can.
        for _ in range(20):
            client.writer.write(HEALTH * 2_000)
            await asyncio.sleep(0.01)
    watching.cancel()
    assert 0 < most <= MAX_UNANSWERED
    assert (await gateway.get("/health")).status == 200


async def test_a_client_that_takes_none_of_its_answers_is_reset(start_gateway, stub_runtime, until):
    gateway = await start_gateway(stub_runtime(), stall_timeout=0.2)
    async with gateway.client() as client:
        client.writer.transport.pause_reading()
        question = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100
        for _ in range(20):
            client.writer.write(question)
        await until(lambda: len(gateway.gateway.connections) == 1)
        await until(lambda: not gateway.gateway.connections, "it is still connected", 30.0)
    assert (await gateway.ask()).status == 200


@pytest.mark.parametrize("raw", [NO_HEAD, NO_BODY], ids=["no head", "no body"])
async def test_what_is_no_http_is_refused_like_everything_else(start_gateway, stub_runtime, raw):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    async with gateway.client() as neighbour, gateway.client() as client:
        neighbour.send({"model": "m", "prompt": "x", "stream": True, "stub": {"tokens": 20, "gap": 0.02}})
        await neighbour.head()
        client.writer.write(raw)
        reply = await client.reply()
        assert (
            reply.status == 400
            and reply.header("content-type") == "application/json"
            and reply.header("connection") == "close"
        )
        error = reply.json()["error"]
        assert (
            error["type"] == "invalid_request_error"
            and error["code"] == "invalid_http_request"
            and "plain HTTP" in error["message"]
        )
        assert await asyncio.wait_for(client.reader.read(), 30) == b""
        assert (await neighbour.chunks()).endswith(b"data: [DONE]\n\n")
    await gateway.settled()
    assert len(stub.requests) == 1
    unclassified = gateway.gateway.pools.unclassified
    # Without a head there was no request; with one, it ended by its client's doing, once.
    assert (
        unclassified.offered
        == sum(unclassified.outcomes.values())
        == unclassified.outcomes["client_closed"]
        == (raw == NO_BODY)
    )


async def test_what_is_no_http_behind_a_request_is_not_taken_for_its_answer(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True, "stub": {"first": 5.0}})
        client.writer.write(NO_HEAD)
        assert await asyncio.wait_for(client.reader.read(), 30) == b""
    await gateway.settled()
    assert gateway.counters().outcomes["client_closed"] == 1
