"""Large bodies are read one after another, aside: those of clients that have left are not read at all, and the others
are told in time."""

import gc
import time
import tracemalloc

import pytest
from headway_gateway import parsed_request

LIMIT = 1_000_000
HEAD = b'{"model":"m","prompt":"x","max_tokens":1,"unused":['
DENSE = HEAD + b",".join([b"1.5"] * ((LIMIT - len(HEAD) - 2) // 4)) + b"]}"
LONG = HEAD[:-1] + b'"' + b"x" * (LIMIT - len(HEAD) - 2) + b'"}'


async def leavers(gateway, count):
    """`count` clients that send a large body and leave; it has wholly arrived."""
    before = gateway.gateway.pools.unclassified.offered
    clients = [gateway.client() for _ in range(count)]
    for client in clients:
        await client.__aenter__()
        client.send(DENSE)
        await client.writer.drain()
        client.close()
    return before + count


async def test_large_bodies_whose_clients_have_left_keep_nobody_waiting_and_reach_no_replica(
    start_gateway, stub_runtime, until
):
    stub = stub_runtime()
    gateway = await start_gateway(stub, max_body_bytes=LIMIT, admission_rule="open")

    async def served():
        began = time.perf_counter()
        assert (await gateway.ask(DENSE)).status == 200
        return time.perf_counter() - began

    alone = sorted([await served() for _ in range(3)])[1]
    counted = await leavers(gateway, 20)
    assert await served() < 10 * alone, "it waited for twenty bodies that nobody wants"
    await until(lambda: gateway.gateway.pools.unclassified.offered == counted)
    await gateway.settled()
    assert gateway.gateway.pools.unclassified.outcomes["client_closed"] == 20
    assert len(stub.requests) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_is_read_for_too_long_is_timed_out(start_gateway, stub_runtime, monkeypatch, stream):
    gateway = await start_gateway(stub_runtime(), max_body_bytes=LIMIT, request_timeout=0.5)

    read = parsed_request.parse

    def slowly(endpoint, body):
        time.sleep(1.5)
        return read(endpoint, body)

    monkeypatch.setattr(parsed_request, "parse", slowly)
    reply = await gateway.ask(
        DENSE.replace(b'"unused":[1.5,1.5,1.5,1.5,', b'"stream":true,"unused":[') if stream else DENSE
    )
    assert reply.status == 504 and reply.json()["error"]["code"] == "request_timeout"
    assert gateway.gateway.pools.unclassified.outcomes["timeout"] == 1
    await gateway.settled()


async def test_large_bodies_on_their_way_in_share_a_budget_that_usual_ones_do_not_need(
    start_gateway, stub_runtime, until
):
    gateway = await start_gateway(
        stub_runtime(), max_body_bytes=LIMIT, max_queue_bytes=LIMIT * 3 // 2, admission_rule="open"
    )
    budget = gateway.gateway.pipeline.body_budget
    async with gateway.client() as slow, gateway.client() as leaver:
        slow.send(LONG[:-1000], length=len(LONG))
        leaver.send(LONG[: LIMIT // 3], length=len(LONG))
        await until(lambda: budget.reserved > LIMIT)
        shed = await gateway.ask(LONG)
        assert shed.status == 429 and shed.json()["error"]["code"] == "queue_full"
        assert int(shed.header("retry-after")) > 0
        assert budget.reserved <= budget.limit
        assert (await gateway.ask()).status == 200, "a body of usual size waited for large ones"
        leaver.close(reset=True)
        await until(lambda: budget.reserved < LIMIT)
        slow.writer.write(LONG[-1000:])
        assert (await slow.reply()).status == 200
    assert (await gateway.ask(LONG)).status == 200, "the budget was not given back"
    await gateway.settled()
    assert budget.reserved == 0
    outcomes = gateway.gateway.pools.unclassified.outcomes
    assert (outcomes["shed"], outcomes["client_closed"]) == (1, 1)


async def test_a_body_that_comes_to_nothing_is_given_back_at_once(start_gateway, stub_runtime, until):
    gateway = await start_gateway(stub_runtime(), max_body_bytes=LIMIT, max_queue_bytes=LIMIT // 2)
    unclassified = gateway.gateway.pools.unclassified
    assert (await gateway.ask(LONG)).status == 429
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            assert (await gateway.ask(LONG)).status == 429
            async with gateway.client() as client:
                client.send(LONG[: LIMIT // 3], length=len(LONG))
                await until(lambda: gateway.gateway.pipeline.body_budget.reserved > 0)
            await until(lambda: gateway.gateway.pipeline.body_budget.reserved == 0)
        await until(lambda: unclassified.outcomes["client_closed"] == 5)
        await gateway.settled()
        _, most = tracemalloc.get_traced_memory()
        # Not what a thread of an earlier test may still be reading.
        elsewhere = [tracemalloc.Filter(False, "*/json/*"), tracemalloc.Filter(False, "*/json_document.py")]
        kept = sum(each.size for each in tracemalloc.take_snapshot().filter_traces(elsewhere).statistics("filename"))
    finally:
        tracemalloc.stop()
        gc.enable()
    assert most > LIMIT // 3, "nothing was measured"
    assert kept < LIMIT // 3
