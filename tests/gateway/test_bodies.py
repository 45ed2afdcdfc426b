"""Bodies: big ones that fit, bigger ones that do not, and slow ones that hold nothing up."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest
import yaml
from headway_core.contract import http
from headway_gateway import settings
from headway_runtime import settings as runtime_settings

LIMIT = 2_000_000


def body_of(size):
    head = b'{"model":"m","max_tokens":1,"prompt":"'
    return head + b"a" * (size - len(head) - 2) + b'"}'


async def chunked(client, body, size=64 * 1024):
    client.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: "
        b"chunked\r\n\r\n"
    )
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    for start in range(0, len(pieces), 1000):
        client.writer.write(b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces[start : start + 1000]))
        await client.writer.drain()
    client.writer.write(b"0\r\n\r\n")


def test_gateway_runtime_and_chart_have_one_limit(tmp_path):
    (tmp_path / "config.json").touch()
    chart = yaml.safe_load((Path(__file__).parents[2] / "charts/headway/values.yaml").read_text())
    assert settings.Settings().max_body_bytes == http.MAX_BODY_BYTES == chart["gateway"]["maxBodyBytes"]
    # What the command lines make of nothing and of a flag.
    gateway = ["--pool", "p=127.0.0.1:1"]
    runtime = ["--model", str(tmp_path)]
    for flag, limit in (([], http.MAX_BODY_BYTES), (["--max-body-bytes", "1000"], 1000)):
        assert settings.parse([*gateway, *flag]).max_body_bytes == limit
        assert runtime_settings.from_arguments([*runtime, *flag]).max_body_bytes == limit


async def test_bodies_up_to_the_limit_pass_at_any_transfer_coding(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub, max_body_bytes=LIMIT)
    for size in (60_000, 65_536, 65_537, 130_000, 1_000_000, LIMIT):
        body = body_of(size)
        for pieces in (None, 64, 64 * 1024):
            async with gateway.client() as client:
                if pieces is None:
                    client.send(body)
                else:
                    await chunked(client, body, pieces)
                assert (await client.reply()).status == 200
            assert stub.requests.pop().body == body


@pytest.mark.parametrize("pieces", [1, 100, 10_000])
@pytest.mark.parametrize("coding", ["content-length", "chunked"])
async def test_the_offer_of_another_protocol_is_passed_over_and_the_body_is_read(
    start_gateway, stub_runtime, coding, pieces
):
    """Some clients offer HTTP/2 in each request; they go on in HTTP/1.1 when the answer does."""
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    body = body_of(300)
    framing = f"content-length: {len(body)}" if coding == "content-length" else "transfer-encoding: chunked"
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA"
    sent = body if coding == "content-length" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    data = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n{offer}\r\n\r\n".encode() + sent
    async with gateway.client() as client:
        for _ in range(2):
            for start in range(0, len(data), pieces):
                client.writer.write(data[start : start + pieces])
                await asyncio.sleep(0)
            assert (await client.reply()).status == 200
            assert stub.requests.pop().body == body
        client.send(method="GET", path="/v1/models", headers=[("connection", "upgrade"), ("upgrade", "websocket")])
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("how", ["content-length", "chunked", "chunked finely", "endless"])
async def test_one_byte_too_many_is_413_and_the_rest_is_not_read(start_gateway, stub_runtime, how):
    stub = stub_runtime()
    gateway = await start_gateway(stub, max_body_bytes=LIMIT)
    body = body_of(LIMIT + 1)
    async with gateway.client() as client:
        if how == "content-length":
            client.send(body)
        elif how.startswith("chunked"):
            with contextlib.suppress(ConnectionResetError):  # The rest is not read.
                await chunked(client, body, 64 if "finely" in how else 64 * 1024)
        else:
            client.send(b"a" * 1000, length=10**12)
        reply = await client.reply()
        assert reply.status == 413 and reply.header("connection") == "close"
        assert reply.json()["error"]["code"] == "request_too_large"
        # Closed, cleanly or over what it did not want to read.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(client.reader.read(), 10) == b""
    assert stub.requests == []
    assert gateway.gateway.pools.unclassified.outcomes["client_error"] == 1
    await gateway.settled()


async def test_a_client_that_asks_before_sending_is_told_to_go_on_or_not_to(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), max_body_bytes=1000)
    async with gateway.client() as client:
        client.send(b"", headers=[("expect", "100-continue")], length=500)
        assert (await client.head())[0] == 100
        client.writer.write(body_of(500))
        assert (await client.reply()).status == 200
    async with gateway.client() as client:
        client.send(b"", headers=[("expect", "100-continue")], length=5000)
        assert (await client.head())[0] == 413


async def test_a_slow_upload_is_408_and_takes_no_place(start_gateway, stub_runtime):
    stub = stub_runtime(slots=1)
    gateway = await start_gateway(stub, body_timeout=0.4, max_queue_requests=1)
    silent, crawling = gateway.client(), gateway.client()
    async with silent, crawling:
        for client in (silent, crawling):
            client.send(b'{"model":', length=500)

        async def crawl():
            for _ in range(100):
                crawling.writer.write(b" ")
                await asyncio.sleep(0.05)

        crawler = asyncio.ensure_future(crawl())
        assert gateway.counters().offered == 0
        assert (await gateway.ask(max_tokens=1)).status == 200
        begun = time.monotonic()
        for client in (silent, crawling):
            reply = await client.reply()
            assert reply.status == 408 and reply.json()["error"]["code"] == "request_timeout"
        assert time.monotonic() - begun < 4
        crawler.cancel()
    await gateway.settled()
    assert gateway.gateway.pools.unclassified.outcomes["client_error"] == 2


async def test_an_upload_that_breaks_off_leaves_nothing_behind(start_gateway, stub_runtime, until):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    async with gateway.client() as client:
        client.send(body_of(300)[:200], length=300)
        client.writer.write_eof()
        await until(lambda: gateway.gateway.pools.unclassified.outcomes["client_closed"] == 1)
    await gateway.settled()
    assert stub.requests == []


async def test_a_slow_upload_does_not_count_as_waiting_for_the_first_token(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    async with gateway.client() as client:
        client.send(body[:10], length=len(body))
        await asyncio.sleep(0.6)
        client.writer.write(body[10:])
        assert (await client.reply()).status == 200
    await gateway.settled()
    assert gateway.counters().ttft.sum < 0.5


async def test_everybody_else_is_answered_while_a_large_body_is_read(start_gateway, stub_runtime):
    """No answer may wait for the reading of a body: the slowest are measured against the time that the body itself
    took."""
    gateway = await start_gateway(stub_runtime(), max_body_bytes=LIMIT, admission_rule="open")
    head = b'{"model":"m","prompt":"x","max_tokens":1,"unused":['
    body = head + b",".join([b"1.5"] * ((LIMIT - len(head) - 2) // 4)) + b"]}"
    took, statuses, waits = [], [], []

    async def send():
        for _ in range(3):
            began = time.perf_counter()
            statuses.append((await gateway.ask(body)).status)
            took.append(time.perf_counter() - began)

    sending = asyncio.create_task(send())
    while not sending.done():
        began = time.perf_counter()
        assert (await gateway.get("/health")).status == 200
        waits.append(time.perf_counter() - began)
    await sending
    assert statuses == [200] * 3
    late = sum(wait > sorted(took)[1] / 3 for wait in waits)
    assert late <= 1, f"{late} of {len(waits)} answers were late; bodies took {took}"
    await gateway.settled()
