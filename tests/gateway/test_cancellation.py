"""A client that goes away stops the work, whichever phase it is in."""

import asyncio
import contextlib
import hashlib
import time

import pytest

KEY = "a-key-long-enough-1"


SCRIPT = {"tokens": 1000, "gap": 0.02}
PHASES = {
    # phase → how many others go first to bring a request into it, and what the request itself asks of the stub
    "queued at the gateway": (1, SCRIPT),
    "queued in the engine": (1, SCRIPT),
    "prefill": (0, {"first": 60.0, "tokens": 1000}),
    "decode": (0, SCRIPT),
}


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
async def test_work_stops_within_a_second_of_the_client_leaving(
    start_gateway, stub_runtime, until, tmp_path, phase, stream, how
):
    keys = tmp_path / "keys"
    keys.write_text(f"acme sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    # A runtime that claims more slots than it has is sent requests that then wait there.
    stub = stub_runtime(slots=1, completion_rate=0.01, claims=50 if phase == "queued in the engine" else None)
    gateway = await start_gateway(stub, keys=keys, admission_rule="open")
    before, script = PHASES[phase]
    auth = [("authorization", f"Bearer {KEY}")]
    async with open_clients(gateway, before + 1) as clients:
        for client in clients[:-1]:
            client.send({"model": "m", "prompt": "x", "stub": {"first": 60.0}}, headers=auth)
            await until(lambda: stub.running == 1)
            if phase == "queued at the gateway":
                # Its next report says that no slot is free.
                seq = stub.seq
                await until(lambda seq=seq: stub.seq > seq + 1)
        last = clients[-1]
        last.send({"model": "m", "prompt": "y", "stream": stream, "stub": script}, headers=auth)
        await until(lambda: gateway.counters().in_flight == before + 1)
        await asyncio.sleep(0.3)
        reached = 1 if phase == "queued at the gateway" else before + 1
        assert len(stub.requests) == stub.open == reached
        assert gateway.counters().queued == (phase == "queued at the gateway")
        last.close(reset=how == "reset")
        left = time.monotonic()
        await until(lambda: gateway.counters().in_flight == before and stub.open == before)
        assert time.monotonic() - left < 1.0
        assert gateway.counters().outcomes["client_closed"] == 1
        assert stub.cancelled == (phase != "queued at the gateway")
    await gateway.settled()
    assert stub.open == 0


async def test_a_client_that_leaves_with_several_requests_on_one_connection_stops_them_all(
    start_gateway, stub_runtime, until
):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    async with gateway.client() as client:
        for number in range(3):
            client.send({"model": "m", "prompt": str(number), "stub": {"first": 60.0}})
        await until(lambda: stub.open == 1)
        client.close()
        left = time.monotonic()
        await until(lambda: stub.open == 0)
        assert time.monotonic() - left < 1.0
    await gateway.settled()
    assert len(stub.requests) == 1


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_pipelined_request_that_waits_for_its_turn_is_given_up_with_its_client(
    start_gateway, stub_runtime, until, size, how
):
    stub = stub_runtime(slots=1, completion_rate=0.01)
    gateway = await start_gateway(stub, admission_rule="open")
    async with gateway.client() as client, gateway.client() as other:
        client.send({"model": "m", "prompt": "first", "max_tokens": 1, "stub": {"first": 0.4}})
        client.send({"model": "m", "prompt": "s" * size})
        client.send({"model": "m", "prompt": "third"})
        await until(lambda: stub.running == 1)
        # It stands before the second one: its client asked while the first was being answered.
        other.send({"model": "m", "prompt": "other", "stub": {"first": 60.0}})
        await until(lambda: gateway.counters().queued == 1)
        assert (await client.reply()).status == 200
        await until(lambda: stub.running == 1 and gateway.counters().queued == 1 and gateway.counters().offered == 3)
        client.close(reset=how == "reset")
        left = time.monotonic()
        await until(lambda: gateway.counters().queued == 0)
        assert time.monotonic() - left < 1.0
        counters = gateway.counters()
        assert (counters.outcomes["ok"], counters.outcomes["client_closed"], counters.in_flight) == (1, 1, 1)
    await gateway.settled()
    # The third was never begun, and so never offered.
    assert gateway.counters().offered == 3 and len(stub.requests) == 2


@contextlib.asynccontextmanager
async def open_clients(gateway, count):
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gateway.client()) for _ in range(count)]


async def test_a_client_that_leaves_while_a_retry_is_on_its_way_is_booked_once(start_gateway, stub_runtime, until):
    async def dies(request, write):
        return "close"

    broken, good = stub_runtime("a", script=dies), stub_runtime("b")
    gateway = await start_gateway(broken, good)
    for _ in range(8):
        async with gateway.client() as client:
            client.send({"model": "m", "prompt": "x", "stream": True, "stub": {"first": 60.0}})
            await until(lambda: good.open == 1)
        await gateway.settled()
    counters = gateway.counters()
    assert counters.offered == counters.outcomes["client_closed"] == 8 and good.cancelled == 8


async def test_a_client_that_reads_nothing_is_cut_off_and_holds_up_nobody(start_gateway, stub_runtime, wire, until):
    flood = wire.record({"choices": [{"index": 0, "text": "x" * 50_000}]})
    sent = 0

    async def script(request, write):
        nonlocal sent
        wire.begin(write)
        for _ in range(4_000):
            wire.chunk(write, flood)
            sent += len(flood)
            await asyncio.sleep(0.001)
        wire.end(write)

    slow = stub_runtime("a", script=script)
    gateway = await start_gateway(slow, stall_timeout=2.0)
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True})
        await client.head()
        # Reading stops here. The kernel takes some megabytes; beyond that the gateway must wait, and then give up.
        client.reader._transport.pause_reading()
        await until(lambda: any(sending.sending_since for sending in gateway.gateway.pipeline.active))
        begun = time.monotonic()
        slow.script = None
        assert (await gateway.ask(max_tokens=2)).status == 200
        assert time.monotonic() - begun < 1.0
        await until(lambda: gateway.counters().outcomes["client_closed"] == 1)
        await until(lambda: slow.open == 0)
    await gateway.settled()
