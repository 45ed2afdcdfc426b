"""Hundreds of requests that end in every way, on a pool that is nearly full: afterwards everything is free and memory
has not grown."""

import asyncio
import json
import random

import aiohttp
import psutil
import pytest

WAYS = (
    "success",
    "stopped",
    "gone while queued",
    "gone while prefilling",
    "gone while decoding",
    "bad request",
    "timeout",
)
PER_ROUND = 25
ROUNDS = 3
"""7 ways of 25 requests in 3 rounds: 525 requests, 75 of each way."""


@pytest.fixture(scope="module")
def tight(start_runtime, tiny_checkpoint):
    """A pool that eight sequences fill, and a request time-out that long ones meet."""
    flags = ["--num-blocks", 80, "--max-num-seqs", 8, "--prefill-token-budget", 32, "--request-timeout", 6]
    return start_runtime(tiny_checkpoint("llama", max_position_embeddings=2048), *flags)


class Crowd:
    """Sends requests and ends them; counts which way each ended."""

    def __init__(self, runtime, session, seed):
        self.url = runtime.url
        self.session = session
        self.draw = random.Random(seed)
        self.ended = dict.fromkeys(WAYS, 0)

    def prompt(self, length):
        return [self.draw.randrange(5, 260) for _ in range(length)]

    async def post(self, body, priority=0):
        headers = {"x-headway-priority": str(priority)}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def leave_after(self, body, events):
        """Reads so many records of a stream (none: waits a moment for an answer that does not come) and hangs up."""
        headers = {"x-headway-priority": "10"}
        async with self.session.post(
            f"{self.url}/v1/completions", json={**body, "stream": True}, headers=headers
        ) as answer:
            async for line in answer.content:
                events -= line.startswith(b"data: ")
                if events <= 0:
                    answer.close()
                    return True
        return False

    async def run(self, way):
        """Those that are to succeed, or to be left while they decode, go before the others, which keep the pool
        full."""
        stream = self.draw.random() < 0.5
        base = {"ignore_eos": True, "stream": False, "n": self.draw.choice([1, 1, 1, 2])}
        if way == "success":
            status, answer = await self.post(
                {**base, "prompt": self.prompt(self.draw.randrange(1, 120)), "max_tokens": 20}, 10
            )
            good = status == 200 and answer["usage"]["completion_tokens"] == 20 * base["n"]
        elif way == "stopped":
            status, answer = await self.post(
                {**base, "prompt": self.prompt(20), "max_tokens": 200, "stop": ["a", "e", "o", "i"]}, 10
            )
            good = status == 200
        elif way == "bad request":
            bad = self.draw.choice(
                [{"temperature": -1}, {"prompt": [5] * 3000}, {"stop": 5}, {"logit_bias": {"9999": 1}}]
            )
            good = (await self.post({**base, "prompt": "A", **bad}))[0] == 400
        elif way == "gone while decoding":
            good = await self.leave_after(
                {**base, "prompt": self.prompt(30), "max_tokens": 2000}, self.draw.randrange(1, 20)
            )
        elif way == "timeout":
            status, answer = await self.post({**base, "prompt": self.prompt(60), "max_tokens": 1800, "n": 2})
            good = status == 504 and answer["error"]["code"] == "request_timeout"
        else:
            length = 1500 if way == "gone while prefilling" else 50
            body = {**base, "prompt": self.prompt(length), "max_tokens": 500, "stream": stream}
            try:
                await asyncio.wait_for(self.post(body), self.draw.uniform(0.01, 0.25))
                good = False
            except TimeoutError:
                good = True
        self.ended[way] += good


async def one_round(runtime, seed, peaks):
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        crowd = Crowd(runtime, session, seed)
        ways = [way for way in WAYS for _ in range(PER_ROUND)]
        crowd.draw.shuffle(ways)
        watching = asyncio.create_task(watch(runtime, session, peaks))
        await asyncio.gather(*(crowd.run(way) for way in ways))
        watching.cancel()
    return crowd.ended


async def watch(runtime, session, peaks):
    """Notes how full the pool gets."""
    while True:
        async with session.get(f"{runtime.control}/load") as answer:
            report = json.loads(await answer.read())
        peaks.append(1 - report["freeBlocks"] / report["limits"]["totalBlocks"])
        await asyncio.sleep(0.05)


def memory(runtime):
    """Resident bytes of server and engine."""
    return sum(process.memory_info().rss for process in [psutil.Process(runtime.process.pid), *runtime.children()])


@pytest.mark.slow
async def test_hundreds_of_requests_ended_in_every_way_leave_nothing_behind(tight):
    ended, resident, peaks = dict.fromkeys(WAYS, 0), [], []
    for number in range(ROUNDS):
        for way, count in (await one_round(tight, number, peaks)).items():
            ended[way] += count
        report = tight.assert_idle()
        assert report.classes == ()
        resident.append(memory(tight))
    assert sum(ended.values()) >= 500 and min(ended.values()) >= 30, ended
    assert max(peaks) > 0.8, "the pool was nearly full"
    assert resident[2] < resident[1] * 1.05, f"memory grew from round to round: {resident}"
    for name in ("headway_engine_running_sequences", "headway_engine_waiting_sequences"):
        assert tight.metric(name) == 0
    used, free, cached = (tight.metric("headway_engine_kv_blocks", state=state) for state in ("used", "free", "cached"))
    assert (used, free + cached) == (0, 80)


@pytest.mark.slow
async def test_an_engine_killed_under_thirty_requests_ends_each_of_them(start_runtime, tiny_checkpoint, eventual):
    runtime = start_runtime(tiny_checkpoint("llama", max_position_embeddings=2048), "--num-blocks", 256)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = Crowd(runtime, session, 1)
        body = {"prompt": crowd.prompt(40), "max_tokens": 1900, "ignore_eos": True}
        whole = [asyncio.create_task(crowd.post(body)) for _ in range(20)]

        async def stream():
            async with session.post(f"{runtime.url}/v1/completions", json={**body, "stream": True}) as answer:
                return answer.status, await answer.read()

        streams = [asyncio.create_task(stream()) for _ in range(20)]
        await asyncio.to_thread(eventual, lambda: runtime.load().running == 8 and runtime.load().waiting == 32)
        runtime.children()[0].kill()
        for status, answer in await asyncio.gather(*whole):
            assert (status, answer["error"]["code"]) == (502, "engine_died")
        for status, data in await asyncio.gather(*streams):
            assert b'"code":"engine_died"' in data and b"[DONE]" not in data
            assert status == 502 or data.startswith(b"data: ")
    assert await asyncio.to_thread(runtime.process.wait, 60) != 0
