"""Twenty thousand strangers and two hundred replicas that come and go: what is exported and what is kept stays as it
was."""

import asyncio
import gc
import json
import random
import time

import psutil

BATCH, CONNECTIONS = 20, 8
METHODS = ("GET", "POST", "PUT", "PROPFIND", "DELETE")


def series(body):
    return {line.rsplit(b" ", 1)[0] for line in body.splitlines() if line and not line.startswith(b"#")}


def question(rng, last):
    """One request with a word of its own in every place that a client can write into."""
    word = f"{rng.random():.15f}"
    names = [f"x-{word}", "x-request-id", "user-agent", "authorization", "x-stainless-retry-count"]
    names += [f"x-headway-{name}" for name in ("class", "tenant", "priority", "dispatch", "shed-reason")]
    body = {
        "model": "m",
        "prompt": "x",
        "max_tokens": 1,
        "user": word,
        "priority": word,
        "service_tier": word,
        "metadata": {word: word},
    }
    method, path, kind = "POST", "/v1/completions", rng.randrange(4)
    if kind == 0:
        body["model"] = word
    elif kind == 1:
        method, path = rng.choice(METHODS), f"/v1/x{word}?{word}"
    data = b"{" + word.encode() if kind == 2 else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: x",
        f"content-length: {len(data)}",
        *(f"{name}: {word}" for name in names),
    ]
    return "\r\n".join([*lines, *(["connection: close"] if last else []), "\r\n"]).encode() + data


async def strangers(gateway, stub, count, rng):
    """`count` requests, a batch on each connection, and one with a method that is none."""

    async def batch():
        text = b"".join(question(rng, number == BATCH - 1) for number in range(BATCH))
        for sent, answers in ((text, BATCH), (b"FOO" + text[4:], 1)):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(sent)
            assert (await asyncio.wait_for(reader.read(), 60)).count(b"HTTP/1.1 ") == answers
            writer.close()

    for _ in range(count // (CONNECTIONS * BATCH)):
        await asyncio.gather(*(batch() for _ in range(CONNECTIONS)))
        stub.requests.clear()


async def test_twenty_thousand_strangers_make_no_series_and_cost_no_memory(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    rng = random.Random(1)
    await strangers(gateway, stub, 3_200, rng)
    gc.collect()
    before, memory = (await gateway.control("/metrics")).body, psutil.Process().memory_info().rss
    await strangers(gateway, stub, 20_000, rng)
    gc.collect()
    assert psutil.Process().memory_info().rss - memory < 8 * 2**20
    begun = time.perf_counter()
    after = (await gateway.control("/metrics")).body
    took = time.perf_counter() - begun
    assert series(after) == series(before)
    assert len(after) < 1_000_000
    begun = time.perf_counter()
    await strangers(gateway, stub, CONNECTIONS * BATCH, rng)
    assert took < time.perf_counter() - begun, "a scrape costs as much as these many requests"
    await gateway.settled()
    assert gateway.counters().offered + gateway.gateway.pools.unclassified.offered > 16_000


async def test_two_hundred_replicas_come_and_go_and_leave_nothing(start_gateway, stub_runtime, until):
    stub = stub_runtime()
    gateway = await start_gateway(stub, poll_interval=0.01)
    before = await gateway.control("/metrics")
    for life in range(200):
        stub.name = f"stub-{life}"
        stub.boot += 1
        seq = stub.seq
        assert (await gateway.ask(max_tokens=1)).status == 200
        await until(lambda seq=seq: stub.seq > seq + 1)
    assert (await gateway.ask(max_tokens=1)).status == 200
    await gateway.settled()
    assert series((await gateway.control("/metrics")).body) == series(before.body)
    assert len(gateway.pool.admission.fleet) == 1
    for path in ("/load", "/policy"):
        assert b"stub-7" not in (await gateway.control(path)).body
    status = (await gateway.get("/status.json")).json()
    assert [replica["name"] for replica in status["pools"][0]["replicas"]] == ["stub-199"]
