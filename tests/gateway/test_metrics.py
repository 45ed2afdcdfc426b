"""/metrics: counters that only grow, and gauges that come back to zero."""

import asyncio
import random


def series(text):
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }


async def scrape(gateway):
    reply = await gateway.control("/metrics")
    assert reply.status == 200 and reply.header("content-type").startswith("text/plain")
    return series(reply.body.decode())


async def strangers(gateway, count, rng):
    """`count` requests with random model, user, path, method, priority, tenant and request id, 16 at a time."""

    async def one():
        word = f"{rng.random():.15f}"
        kind = rng.randrange(4)
        headers = [
            ("x-request-id", word),
            ("x-headway-class", word),
            ("x-headway-tenant", word),
            ("x-headway-priority", word),
        ]
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


async def test_counters_never_fall_and_gauges_return_to_zero(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    last = {}
    work = asyncio.ensure_future(strangers(gateway, 320, random.Random(2)))
    while not work.done():
        now = await scrape(gateway)
        fell = [
            name
            for name, value in last.items()
            if ("_total" in name or "_count" in name or "_bucket" in name) and now[name] < value
        ]
        assert fell == []
        last = now
        await asyncio.sleep(0.02)
    await work
    await gateway.settled()
    now = await scrape(gateway)
    assert now['headway_in_flight_requests{pool="p"}'] == now['headway_queue_depth{class="default",pool="p"}'] == 0
    assert now["process_resident_memory_bytes"] > 0
