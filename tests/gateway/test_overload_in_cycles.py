"""Overload again and again on real engines, whose iterations last as long as they are told to: the admission meets
its objective at full capacity.

Ten cycles of 10 s at twice the capacity and 10 s at half of it. Three conditions together, since admitting nobody would
meet the first, and the rule `open` must fail, since otherwise it was no overload. Of the retries that land after a step
down nine in ten are to succeed.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass

import aiohttp
import pytest
import tiny_model
from headway_cli.supervisor import free_port
from headway_core.contract.policy import Endpoint, Pool

PERIOD, CYCLES = 10.0, 10
TARGET = 2.0
"""Seconds to the first token that a gateway without a policy aims at."""
PACE = "0.02,0.0005,0.001,0.000005"
LIMITS = (
    "--max-num-seqs",
    "32",
    "--num-blocks",
    "1024",
    "--prefill-token-budget",
    "64",
    "--threads",
    "1",
    "--no-enable-prefix-caching",
)
OUTPUT, RETRIES = 6, 2


@dataclass
class Attempt:
    """One try of one request; times in seconds since the start of the run."""

    at: float
    number: int
    tokens: int
    status: int = 0
    first: float | None = None

    @property
    def kept(self):
        return self.first is not None and self.first - self.at <= TARGET

    @property
    def under_overload(self):
        return self.at % (2 * PERIOD) < PERIOD


class Replica:
    """A runtime of known pace."""

    def __init__(self, model, folder, name):
        self.endpoint = Endpoint("127.0.0.1", free_port(), free_port())
        ports = ("--port", str(self.endpoint.port), "--control-port", str(self.endpoint.control_port))
        command = [
            sys.executable,
            "-m",
            "headway_runtime",
            "--model",
            str(model),
            "--served-model-name",
            "m",
            "--replica-id",
            name,
        ]
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen([*command, *ports, *LIMITS, "--pace", PACE], stdout=log, stderr=log)

    async def ready(self, session):
        for _ in range(1200):
            try:
                async with session.get(f"http://127.0.0.1:{self.endpoint.control_port}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError("the replica did not become ready")


@pytest.fixture
def replicas(tmp_path):
    model = tiny_model.write(tmp_path / "model")
    both = [Replica(model, tmp_path, name) for name in ("closed", "opened")]
    yield both
    for replica in both:
        replica.process.terminate()
    for replica in both:
        replica.process.wait(60)


def prompt(rng):
    """The longest take a fifth of the target on their own."""
    length = min(450, max(20, round(rng.lognormvariate(5.0, 0.5))))
    return [rng.randrange(4, 1000) for _ in range(length)]


async def ask(session, url, attempt, ids, start):
    """Fills the attempt in; returns the seconds after which to come back, when it was turned away."""
    body = {"model": "m", "prompt": ids, "max_tokens": OUTPUT, "stream": True, "ignore_eos": True}
    headers = {"x-stainless-retry-count": str(attempt.number)}
    async with session.post(f"{url}/v1/completions", data=json.dumps(body), headers=headers) as answer:
        attempt.status = answer.status
        if answer.status != 200:
            return int(answer.headers["retry-after"])
        async for line in answer.content:
            if attempt.first is None and line.startswith(b"data: {") and b'"choices":[{' in line:
                attempt.first = time.monotonic() - start
    return None


async def capacity(session, url, rng):
    """Prompt tokens per second of a replica that always has enough to do."""
    prompts = [prompt(rng) for _ in range(80)]
    start = time.monotonic()
    await asyncio.gather(*(ask(session, url, Attempt(0.0, 0, len(ids)), ids, start) for ids in prompts))
    took = time.monotonic() - start
    return sum(map(len, prompts)) / took, len(prompts) / took


async def cycles(session, url, rate, retries, seed):
    """All attempts of a run, those of clients that come back when they were told included."""
    rng = random.Random(seed)
    attempts, tasks = [], []

    async def client(ids, at):
        for number in range(retries + 1):
            attempts.append(Attempt(at, number, len(ids)))
            wait = await ask(session, url, attempts[-1], ids, start)
            if wait is None:
                return
            await asyncio.sleep(wait)
            at = time.monotonic() - start

    start, at = time.monotonic(), 0.0
    while at < 2 * PERIOD * CYCLES:
        await asyncio.sleep(start + at - time.monotonic())
        tasks.append(asyncio.ensure_future(client(prompt(rng), at)))
        at += rng.expovariate(rate * (2.0 if at % (2 * PERIOD) < PERIOD else 0.5))
    await asyncio.sleep(5.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return attempts


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_admitted_requests_keep_their_promise_at_full_capacity_and_retries_that_wait_succeed(
    start_gateway, replicas, until
):
    rng = random.Random(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for replica in replicas:
            await replica.ready(session)
        gateways = {}
        for rule, replica in zip(("moore", "open"), replicas, strict=True):
            gateways[rule] = await start_gateway(
                ready=False, pools=(Pool("p", (replica.endpoint,), "m"),), admission_rule=rule
            )
        for gateway in gateways.values():
            await until(lambda gateway=gateway: gateway.pool.ready(asyncio.get_running_loop().time()) == 1)
        tokens, rate = await capacity(session, f"http://127.0.0.1:{replicas[1].endpoint.port}", rng)
        closed, opened = await asyncio.gather(
            cycles(session, gateways["moore"].url, rate, RETRIES, 2), cycles(session, gateways["open"].url, rate, 0, 2)
        )

    def kept_share(attempts):
        return sum(one.kept for one in attempts) / len(attempts)

    admitted = [one for one in closed if one.under_overload and one.status == 200]
    work = sum(one.tokens for one in admitted) / (PERIOD * CYCLES * tokens)
    returned = [one for one in closed if one.number and not one.under_overload]
    figures = (
        f"capacity {tokens:.0f} tokens/s; admitted {len(admitted)}, kept {kept_share(admitted):.1%}, work {work:.1%}; "
        f"returned {len(returned)}, kept {kept_share(returned) if returned else 0:.1%}"
    )
    let_in = [one for one in opened if one.under_overload]
    figures += f"; the rule `open` kept {kept_share(let_in):.1%}"
    print(figures)
    assert kept_share(admitted) >= 0.95 and work >= 0.9, figures
    assert len(returned) >= 30 and kept_share(returned) >= 0.9, figures
    assert kept_share(let_in) < 0.5, f"it was no overload: {figures}"
