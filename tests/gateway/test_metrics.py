"""/metrics: series from a closed set, whatever clients send; counters that only grow; a small answer."""

import asyncio
import random
import time

import psutil
import pytest


def series(text):
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and not line.startswith("#")}


async def scrape(gateway):
    reply = await gateway.control("/metrics")
    assert reply.status == 200 and reply.header("content-type").startswith("text/plain")
    return series(reply.body.decode())


async def strangers(gateway, count, rng):
    """`count` requests with random model, user, path, method, priority, tenant and request id, 16 at a time."""

    async def one():
        word = f"{rng.random():.15f}"
        kind = rng.randrange(4)
        headers = [("x-request-id", word), ("x-headway-class", word), ("x-headway-tenant", word), ("x-headway-priority", word)]
        if kind == 0:
            await gateway.ask(model=word, user=word, headers=headers)
        elif kind == 1:
            await gateway.ask(b"", f"/v1/x{word}", headers, method=rng.choice(["GET", "POST", "PUT"]))
        elif kind == 2:
            await gateway.ask(user=word, service_tier=word, max_tokens=1, headers=headers)
        else:
            await gateway.ask(b"{" + word.encode(), headers=headers)

    for _ in range(count // 16):
        await asyncio.gather(*(one() for _ in range(16)))


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.full)])
async def test_what_clients_send_makes_no_series(house, stub_runtime, count):
    gateway = await house(stub_runtime())
    rng = random.Random(1)
    await strangers(gateway, 400, rng)
    before, memory = await scrape(gateway), psutil.Process().memory_info().rss
    await strangers(gateway, count, rng)
    begun = time.monotonic()
    after = await scrape(gateway)
    assert time.monotonic() - begun < 1.0
    assert set(after) == set(before)
    assert len((await gateway.control("/metrics")).body) < 1_000_000
    # The stub keeps what it saw: about a kilobyte each.
    assert psutil.Process().memory_info().rss - memory < 16 * 2**20 + 2_000 * count
    await gateway.settled()
    total = sum(value for name, value in after.items() if name.startswith("headway_requests_total"))
    offered = sum(value for name, value in after.items() if name.startswith("headway_offered_requests_total"))
    assert total == offered > count / 2


async def test_counters_never_fall_and_gauges_return_to_zero(house, stub_runtime):
    gateway = await house(stub_runtime())
    last = {}
    work = asyncio.ensure_future(strangers(gateway, 320, random.Random(2)))
    while not work.done():
        now = await scrape(gateway)
        fell = [name for name, value in last.items() if ("_total" in name or "_count" in name or "_bucket" in name) and now[name] < value]
        assert fell == []
        last = now
        await asyncio.sleep(0.02)
    await work
    await gateway.settled()
    now = await scrape(gateway)
    assert now['headway_in_flight_requests{pool="p"}'] == now['headway_queue_depth{class="default",pool="p"}'] == 0
    assert now["process_resident_memory_bytes"] > 0


async def test_replicas_that_come_and_go_leave_no_series(house, stub_runtime, until):
    stub = stub_runtime()
    gateway = await house(stub)
    before = await scrape(gateway)
    for life in range(20):
        stub.name = f"stub-{life}"
        seq = stub.seq
        await until(lambda seq=seq: stub.seq > seq + 1)
    assert set(await scrape(gateway)) == set(before)
    assert len(gateway.pool.door.fleet) == 1
