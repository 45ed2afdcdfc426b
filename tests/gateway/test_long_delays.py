"""First tokens after up to 400 seconds, through a whole gateway whose clock is moved on: what /metrics says of them."""

import asyncio
import re

import pytest
from headway_core.histogram import GROWTH

EDGE = GROWTH**4
"""Ratio of two neighbouring edges of the exported buckets."""
DELAYS = [0.05, 0.5, 2.0, 70.0, 400.0]
GAP, TOKENS = 0.2, 4


class Clock:
    """The event loop's clock, which can be moved on: whatever is due by then happens at once."""

    def __init__(self, monkeypatch):
        self._ahead = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self._ahead)
        self._loop = loop

    async def sleep(self, seconds):
        """Seconds of the loop's clock, in steps of which pollers keep up; a small part of them real."""
        until = self._loop.time() + seconds
        await asyncio.sleep(0.02)  # What was sent before is to arrive before the clock moves.
        while (left := until - self._loop.time()) > 0:
            self._ahead += max(0.0, min(0.2, left - 0.02))
            await asyncio.sleep(0.002)


def buckets(text, name):
    """Upper edge → count up to it, in order."""
    found = re.findall(rf'^{name}_bucket{{class="default",le="([^"]+)",pool="p"}} (\S+)$', text, re.MULTILINE)
    return [(float(edge), float(count)) for edge, count in found]


def quantile_edges(before, after, share):
    """The bucket in which that share of what came between two scrapes lies: its lower and its upper edge."""
    counts = [(edge, count - then) for (edge, count), (_, then) in zip(after, before, strict=True)]
    wanted, lower = share * counts[-1][1], 0.0
    for edge, count in counts:
        if count >= wanted:
            return lower, edge
        lower = edge
    raise AssertionError("an empty histogram")


@pytest.mark.parametrize("delay", DELAYS)
async def test_quantiles_of_what_is_exported_lie_within_one_bucket_of_scripted_delays(
    monkeypatch, start_gateway, stub_runtime, wire, delay
):
    clock = Clock(monkeypatch)  # Asked for before the gateway, so that time goes back only after its end.

    async def script(request, write):
        wire.begin(write)
        await clock.sleep(delay)
        for index in range(TOKENS):
            if index:
                await clock.sleep(GAP)
            wire.chunk(write, wire.record({"choices": [{"index": 0, "text": f"w{index}"}]}))
        wire.chunk(write, b': headway {"prompt": 7, "cached": 0, "completion": %d}\ndata: [DONE]\n\n' % TOKENS)
        wire.end(write)

    gateway = await start_gateway(stub_runtime(script=script), keep_alive=10_000.0)

    async def scrape():
        text = (await gateway.control("/metrics")).body.decode()
        return {name: buckets(text, f"headway_{name}_seconds") for name in ("ttft", "tpot", "itl")}

    before = await scrape()
    reply = await gateway.ask(stream=True)
    assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")
    await gateway.settled()
    after = await scrape()
    assert [after[name][-1][1] - before[name][-1][1] for name in ("ttft", "tpot", "itl")] == [1, 1, TOKENS - 1]
    for name, truth in (("ttft", delay), ("tpot", GAP), ("itl", GAP)):
        lower, upper = quantile_edges(before[name], after[name], 0.5)
        # A busy machine makes a delay longer than its script, never shorter.
        assert upper >= truth and lower <= truth * EDGE + 0.1, (name, truth, lower, upper)
        assert upper / lower == pytest.approx(EDGE, rel=1e-3)
