"""Twenty thousand strangers on a runtime: what is exported stays as it was, and nothing is kept of them."""

import asyncio
import json
import random
import re
import time

import psutil
from headway_runtime.server.metrics import RuntimeMetrics

BATCH, CONNECTIONS = 40, 8
METHODS = ("GET", "POST", "PUT", "PROPFIND", "DELETE")


def series(text):
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")}


def question(draw, last):
    """One request with a word of its own in every place that a client can write into; one in forty is served."""
    word = f"{draw.random():.15f}"
    names = [
        f"x-{word}",
        "x-request-id",
        "user-agent",
        "authorization",
        *(f"x-headway-{name}" for name in ("class", "tenant")),
    ]
    priority, dispatch = draw.randrange(-1000, 1000), f"{word}:{draw.randrange(10**9)}"
    body = {"model": "tiny", "prompt": "A", "max_tokens": 1, "user": word, "priority": word, "metadata": {word: word}}
    method, path, kind = "POST", "/v1/completions", 3 if last else draw.randrange(3)
    if kind == 0:
        body["model"] = word
    elif kind == 1:
        method, path = draw.choice(METHODS), f"/v1/x{word}?{word}"
    data = b"{" + word.encode() if kind == 2 else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: x",
        f"content-length: {len(data)}",
        *(f"{name}: {word}" for name in names),
    ]
    lines += [
        f"x-headway-priority: {priority}",
        f"x-headway-dispatch: {dispatch}",
        *(["connection: close"] if last else []),
    ]
    return "\r\n".join([*lines, "\r\n"]).encode() + data


async def strangers(runtime, count, draw):
    """`count` requests, a batch on each connection, and one with a method that is none."""

    async def batch():
        text = b"".join(question(draw, number == BATCH - 1) for number in range(BATCH))
        for sent, answers in ((text, BATCH), (b"FOO" + text[4:], 1)):
            reader, writer = await asyncio.open_connection(*runtime.address)
            writer.write(sent)
            assert (await asyncio.wait_for(reader.read(), 120)).count(b"HTTP/1.1 ") == answers
            writer.close()

    for _ in range(count // (CONNECTIONS * BATCH)):
        await asyncio.gather(*(batch() for _ in range(CONNECTIONS)))


def resident(runtime):
    return psutil.Process(runtime.process.pid).memory_info().rss


async def test_twenty_thousand_strangers_make_no_series_and_cost_no_memory(runtime):
    draw = random.Random(3)
    await strangers(runtime, 3_200, draw)
    before, memory = series(runtime.metrics()), resident(runtime)
    served = runtime.load().finished
    await strangers(runtime, 20_000, draw)
    assert resident(runtime) - memory < 8 * 2**20
    begun = time.perf_counter()
    text = runtime.metrics()
    took = time.perf_counter() - begun
    after = series(text)
    assert len(after - before) < 20 and len(text) < 1_000_000
    assert {name for name in after if 'class="' in name} == {name for name in after if 'class="other"' in name}
    assert runtime.assert_idle().finished - served == 20_000 // (CONNECTIONS * BATCH) * CONNECTIONS
    assert len(runtime.load().dispatched) <= 64
    begun = time.perf_counter()
    await strangers(runtime, CONNECTIONS * BATCH, draw)
    assert took < time.perf_counter() - begun, "a scrape costs as much as these many requests"


def test_series_of_classes_that_the_policy_no_longer_has_are_dropped():
    metrics = RuntimeMetrics()
    for life in range(50):
        metrics.set_classes([f"class-{life}", "stays"])
        for name in (f"class-{life}", "stays", "unknown"):
            metrics.observe_ttft(metrics.class_label(name), 0.1)
            metrics.observe_itl(metrics.class_label(name), 0.1)
    found = set(re.findall(r'class="([^"]*)"', metrics.render().decode()))
    assert found == {"class-49", "stays", "other"}
