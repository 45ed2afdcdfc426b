"""What a request gets that cannot be served now: the right status, a usable Retry-After, before any 200."""

import asyncio
import contextlib

import pytest
from headway_core.contract import header_names
from headway_core.contract.policy import Endpoint, Pool
from headway_core.contract.reports import ReplicaState

LONG = {"first": 60.0, "tokens": 2}


def assert_not_now(reply, status, reasons):
    assert reply.status == status
    (after,) = reply.all("retry-after")
    assert after.isdigit() and 0 <= int(after) <= 60
    assert reply.header(header_names.SHED_REASON) in reasons
    assert reply.header("content-type") == "application/json"
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@contextlib.asynccontextmanager
async def occupied(gateway, stub, until, count=1):
    """`count` requests fill the stub, and its report says so."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            client = await stack.enter_async_context(gateway.client())
            client.send({"model": "m", "prompt": "x", "stub": LONG})
        await until(lambda: stub.running == count)
        seq = stub.seq
        await until(lambda: stub.seq > seq + 1)
        yield


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_contended_and_says_when_to_come_back(start_gateway, stub_runtime, until, stream):
    stub = stub_runtime(slots=1, completion_rate=0.01)
    gateway = await start_gateway(stub, admission_rule="open", max_queue_requests=1)
    async with occupied(gateway, stub, until), gateway.client() as waiting:
        waiting.send({"model": "m", "prompt": "x"})
        await until(lambda: gateway.counters().queued == 1)
        assert_not_now(await gateway.ask(stream=stream), 429, ["queue_full"])
    await gateway.settled()
    assert gateway.counters().shed == {"queue_full": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_cannot_end_in_time_is_refused_at_once(start_gateway, stub_runtime, until, stream):
    stub = stub_runtime(slots=1, completion_rate=0.01)
    gateway = await start_gateway(stub)
    async with occupied(gateway, stub, until):
        assert_not_now(await gateway.ask(stream=stream), 429, ["slot_wait"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_lasted_too_long_ends_contended(start_gateway, stub_runtime, until, stream):
    stub = stub_runtime(slots=1, completion_rate=2.0)
    gateway = await start_gateway(stub, max_queue_time=0.5)
    async with occupied(gateway, stub, until):
        stub.completion_rate = 1.0
        reply = await gateway.ask(stream=stream)
        assert_not_now(reply, 429, ["queue_time", "slot_wait", "outranked"])
    await gateway.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.STARTING, "gone", "never there"])
async def test_nobody_ready_is_unavailable(start_gateway, stub_runtime, until, state, stream):
    stub = stub_runtime()
    if state == "never there":
        gateway = await start_gateway(ready=False, pools=(Pool("p", (Endpoint("127.0.0.1", 1, 2),), "m"),))
    else:
        gateway = await start_gateway(stub)
        if state == "gone":
            await stub.kill()
        else:
            stub.state = state
        await until(lambda: gateway.pool.ready(asyncio.get_running_loop().time()) == 0)
    assert_not_now(await gateway.ask(stream=stream), 503, ["no_replica"])
    models = await gateway.get("/v1/models")
    assert [model["id"] for model in models.json()["data"]] == ["m"]
    await gateway.settled()
    assert gateway.counters().shed == {"no_replica": 1}


async def test_who_waits_is_served_in_order_when_a_replica_comes_back(start_gateway, stub_runtime, until):
    stub = stub_runtime(slots=1, completion_rate=5.0)
    gateway = await start_gateway(stub, admission_rule="open")
    async with occupied(gateway, stub, until):
        waiting = [asyncio.ensure_future(gateway.ask(prompt=f"{index}", max_tokens=1)) for index in range(3)]
        await until(lambda: gateway.counters().queued == 3)
        before = len(stub.requests)
        await stub.kill()
    await stub.restart()
    replies = await asyncio.gather(*waiting)
    assert [reply.status for reply in replies] == [200] * 3
    prompts = [request.body.split(b'"prompt": "')[1][:1] for request in stub.requests[before:]]
    assert prompts == [b"0", b"1", b"2"]
    await gateway.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_runtime_s_own_refusal_passes_with_its_retry_after(start_gateway, stub_runtime, wire, stream):
    async def script(request, write):
        wire.answer(write, 429, b'{"error":{"message":"busy"}}', [("Retry-After", "7")])

    stub = stub_runtime(script=script)
    gateway = await start_gateway(stub)
    reply = await gateway.ask(stream=stream)
    assert (reply.status, reply.all("retry-after"), reply.body) == (429, ["7"], b'{"error":{"message":"busy"}}')
    await gateway.settled()
    assert gateway.counters().outcomes["shed"] == 1


async def test_retry_after_grows_with_the_backlog(start_gateway, stub_runtime, until):
    stub = stub_runtime(slots=1, completion_rate=0.2)
    gateway = await start_gateway(stub, admission_rule="prediction")
    seen = []
    for rate in (0.4, 0.1, 0.02):
        stub.completion_rate = rate
        async with occupied(gateway, stub, until):
            answers = [int((await gateway.ask()).header("retry-after")) for _ in range(10)]
            seen.append(sum(answers) / len(answers))
        await gateway.settled()
    assert seen == sorted(seen) and seen[0] < seen[-1]


async def test_sdk_retries_are_counted_apart_from_demand(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    for count in ("0", "1", "2", "junk", "-1"):
        await gateway.ask(headers=[("x-stainless-retry-count", count)])
    await gateway.settled()
    assert (gateway.counters().offered, gateway.counters().retries) == (5, 2)


async def test_the_admission_knows_who_was_shed_before(start_gateway, stub_runtime, until):
    stub = stub_runtime(slots=1, completion_rate=2.0)
    gateway = await start_gateway(stub)
    async with occupied(gateway, stub, until), gateway.client() as fresh, gateway.client() as back:
        fresh.send({"model": "m", "prompt": "x"})
        await until(lambda: gateway.counters().queued == 1)
        back.send({"model": "m", "prompt": "x"}, headers=[("x-stainless-retry-count", "1")])
        await until(lambda: gateway.counters().queued == 2)
        assert [one.retry for one in gateway.pool.admission.queue.order()] == [False, True]


async def test_a_request_that_takes_too_long_is_timed_out(start_gateway, stub_runtime, until):
    stub = stub_runtime()
    gateway = await start_gateway(stub, request_timeout=0.5)
    reply = await gateway.ask(stub=LONG)
    assert reply.status == 504 and reply.json()["error"]["code"] == "request_timeout"
    reply = await gateway.ask(stream=True, stub={"tokens": 1000, "gap": 0.05})
    assert reply.status == 200 and b'"request_timeout"' in reply.body.split(b"\n\n")[-2]
    await until(lambda: stub.open == 0)
    await gateway.settled()
    assert gateway.counters().outcomes["timeout"] == 2 and stub.cancelled == 2
