"""Twice what the replicas can do, with clients that leave and a replica that dies: the counters stay exact and nothing
is left behind."""

import asyncio
import gc
import random

import psutil
import pytest


@pytest.mark.slow
async def test_overload_with_random_closes_and_a_lost_replica_leaves_exact_counters(start_gateway, stub_runtime, until):
    # 2 x 2 slots at 0.1 s serve 40 requests a second; they come at least twice as fast.
    stubs = [stub_runtime(name, slots=2, completion_rate=20.0, prefill_rate=20_000.0) for name in "ab"]
    script = {"first": 0.06, "tokens": 3, "gap": 0.02}
    gateway = await start_gateway(*stubs)
    rng = random.Random(7)
    offered = 3_000
    seen: dict[object, int] = {}

    async def one(index):
        async with gateway.client() as client:
            stream = rng.random() < 0.5
            client.send({"model": "m", "prompt": "x" * rng.randrange(1, 400), "stream": stream, "stub": script})
            try:
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.2)
                    client.close(reset=rng.random() < 0.5)
                    seen["left"] = seen.get("left", 0) + 1
                    return
                reply = await client.reply()
                cut = reply.status == 200 and stream and not reply.body.endswith(b"[DONE]\n\n")
                seen["cut" if cut else reply.status] = seen.get("cut" if cut else reply.status, 0) + 1
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                pytest.fail(f"request {index} got neither an answer nor an error: {error!r}")

    async def wave(count):
        tasks = []
        for index in range(count):
            tasks.append(asyncio.ensure_future(one(index)))
            await asyncio.sleep(rng.expovariate(200))
        await asyncio.gather(*tasks)

    await wave(offered // 3)
    await gateway.settled()
    gc.collect()
    memory = psutil.Process().memory_info().rss
    storm = asyncio.ensure_future(wave(offered // 3))
    await asyncio.sleep(0.2)
    await stubs[0].kill()
    await asyncio.sleep(0.3)
    await stubs[0].restart()
    await storm
    await wave(offered // 3)
    await gateway.settled()
    await until(lambda: all(stub.open == 0 for stub in stubs), "a replica still works for nobody")
    outcomes = gateway.counters().outcomes
    unclassified = gateway.gateway.pools.unclassified.outcomes["client_closed"]
    # Those that left before their request was even read were never offered; every other one is in exactly one outcome.
    assert offered - seen["left"] <= gateway.counters().offered + unclassified <= offered
    assert sum(outcomes.values()) == gateway.counters().offered
    assert outcomes["ok"] >= seen[200] and outcomes["shed"] >= seen.get(429, 0) + seen.get(503, 0)
    assert outcomes["client_error"] == outcomes["timeout"] == 0
    broken = seen.get("cut", 0) + seen.get(502, 0)
    assert broken <= outcomes["upstream_error"] <= broken + seen["left"]
    assert seen[429] > offered / 20, "it was no overload"
    assert seen[200] > offered / 10
    gc.collect()
    # The stubs keep the requests that they saw; beyond that nothing grows.
    for stub in stubs:
        stub.requests.clear()
    assert psutil.Process().memory_info().rss - memory < 24 * 2**20
    await until(
        lambda: not [task for task in asyncio.all_tasks() if "run_asgi" in repr(task)], "a request's task is left"
    )
