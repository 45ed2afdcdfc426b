"""What clients send that is no request, and requests without end: bounded, and cut off without harm to others."""

import asyncio
import json

import pytest
from headway_gateway.client_connection import MOST_UNANSWERED

BODY = json.dumps({"model": "m", "prompt": "x"}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def again_and_again(client, piece, times, pause=0.0):
    for _ in range(times):
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(pause)


@pytest.mark.parametrize("piece", [b"a: b\r\n" * 2_000, b"a" * 12_000], ids=["many", "long"])
async def test_trailers_without_end_are_cut_off(house, stub_runtime, piece):
    stub = stub_runtime()
    gateway = await house(stub)
    async with gateway.client() as client:
        client.writer.write(CHUNKED + b"x: ")
        with pytest.raises(ConnectionError):
            await again_and_again(client, piece, 4_000)
    assert (await gateway.ask()).status == 200
    await gateway.settled()
    assert len(stub.requests) == 1


async def test_a_trailer_is_no_header(house, stub_runtime):
    gateway = await house(stub_runtime())
    async with gateway.client() as client:
        client.writer.write(CHUNKED + b"x-request-id: from-the-trailer\r\n\r\n")
        reply = await client.reply()
    assert reply.status == 200 and reply.header("x-request-id").startswith("req-")


async def test_the_rest_of_a_body_that_nobody_waits_for_keeps_no_connection_open(house, stub_runtime):
    gateway = await house(stub_runtime(), keep_alive=0.3)
    for port in (gateway.port, gateway.control_port):
        async with gateway.client() as client:
            client.close()
            client.reader, client.writer = await asyncio.open_connection("127.0.0.1", port)
            client.send(b"a", path="/health", length=10_000)
            assert (await client.reply()).status == 405
            with pytest.raises(ConnectionError):
                await again_and_again(client, b"a", 200, pause=0.05)


async def test_requests_that_wait_on_one_connection_are_bounded(house, stub_runtime):
    gateway = await house(stub_runtime())
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
    assert 0 < most <= MOST_UNANSWERED
    assert (await gateway.get("/health")).status == 200


async def test_a_client_that_takes_none_of_its_answers_is_reset(house, stub_runtime, until):
    gateway = await house(stub_runtime(), stall_timeout=0.2)
    async with gateway.client() as client:
        client.writer.transport.pause_reading()
        question = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100
        for _ in range(20):
            client.writer.write(question)
        await until(lambda: len(gateway.gateway.connections) == 1)
        await until(lambda: not gateway.gateway.connections, "it is still connected", 30.0)
    assert (await gateway.ask()).status == 200
