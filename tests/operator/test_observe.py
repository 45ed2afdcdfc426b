"""Polling pods: one that hangs, lies or floods costs its neighbours nothing."""

import asyncio
import time

import pytest
from headway_core.contract.documents import dump
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import (
    ClassReport,
    EngineLimits,
    GatewayReport,
    PoolReport,
    ReplicaState,
    RuntimeReport,
)
from headway_core.planning.snapshot import Phase, Snapshot
from headway_core.planning.traffic_window import TrafficWindow
from headway_core.slo_parser import parse_slo
from headway_operator.observe import LARGEST_REPORT, Observer, observe
from headway_operator.resources import Deployment, Pod, Service
from headway_operator.settings import Settings
from headway_operator.targets import ResolvedTarget

SLO = parse_slo(
    {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "ServingSLO",
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
        "spec": {"targetRef": {"name": "rt"}, "gatewayRef": {"name": "gw"}, "objectives": {"ttft": {"target": "1s"}}},
    }
)
REPORT = RuntimeReport(
    "a", "rt", "m", "b", 1, 0.0, ReplicaState.READY, EngineLimits(8, 256, 1024, 16, 100), Knobs(8, 256)
)
GATEWAY = GatewayReport(
    "g",
    "b",
    1,
    0.0,
    ReplicaState.READY,
    (PoolReport("rt", {"default": ClassReport(offered=7)}, replica_in_flight={"a": 2}),),
)
GOOD, COUNTS = dump(REPORT).encode(), dump(GATEWAY).encode()


@pytest.fixture
async def pods():
    """Makes a pod that answers with these bytes (None: never) and counts how often it was asked."""
    servers, asked = [], {}

    async def make(name, answer, status=200):
        async def serve(reader, writer):
            asked[name] = asked.get(name, 0) + 1
            await reader.readuntil(b"\r\n\r\n")
            if answer is not None:
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(answer)) + answer
                )
                await writer.drain()
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        return Pod("ns", name, f"uid-{name}", {}, "127.0.0.1", server.sockets[0].getsockname()[1], Phase.READY)

    make.asked = asked
    yield make
    for server in servers:
        server.close()


@pytest.fixture
def observer():
    return Observer(Settings(report_timeout=0.3, interval=5.0))


def target(runtimes, gateways=()):
    return ResolvedTarget(
        SLO, Deployment("ns", "rt", 2, False), Service("ns", "rt", {}), "gw", tuple(runtimes), tuple(gateways)
    )


BAD = {
    "hangs": None,
    "lies": b"<html>",
    "half": GOOD[:40],
    "floods": b"x" * (LARGEST_REPORT + 1),
    "nan": GOOD.replace(b'"at":0.0', b'"at":NaN'),
}


async def test_bad_answers_are_no_news_and_delay_nobody(pods, observer):
    good = await pods("a", GOOD)
    bad = [await pods(name, answer) for name, answer in BAD.items()]
    wrong = await pods("wrong", GOOD, status=404)
    nowhere = Pod("ns", "nowhere", "uid-nowhere", {}, "127.0.0.1", 1, Phase.READY)
    none = Pod("ns", "none", "uid-none", {}, "", 1, Phase.STARTING)
    began = time.monotonic()
    await observer.poll(target([good, *bad, wrong, nowhere, none]))
    assert time.monotonic() - began < 3
    assert observer.runtime(good).report == REPORT
    assert [observer.runtime(pod) for pod in (*bad, wrong, nowhere, none)] == [None] * (len(BAD) + 3)


async def test_a_shared_gateway_is_asked_once_for_all(pods, observer):
    gateway = await pods("g", COUNTS)
    await asyncio.gather(*(observer.poll(target([], [gateway])) for _ in range(20)))
    await observer.poll(target([], [gateway]))
    assert pods.asked == {"g": 1}
    assert observer.gateway(gateway).report == GATEWAY


async def test_who_waits_for_an_acknowledgement_asks_sooner(pods):
    now = [0.0]
    observer = Observer(Settings(interval=5.0), clock=lambda: now[0])
    gateway = await pods("g", COUNTS)
    for at, awaiting_ack, asked in [
        (0.0, False, 1),
        (1.5, False, 1),
        (1.5, True, 2),
        (2.0, True, 2),
        (5.4, False, 2),
        (5.6, False, 3),
    ]:
        now[0] = at
        await observer.poll(target([], [gateway]), awaiting_ack=awaiting_ack)
        assert pods.asked["g"] == asked, at


async def test_a_window_shorter_than_the_age_of_a_shared_reading_still_has_its_traffic(pods):
    now = [0.0]
    observer = Observer(Settings(interval=5.0), clock=lambda: now[0])
    gateway = await pods("g", COUNTS)
    traffic, known = TrafficWindow("rt", 1.0), Snapshot()
    for at in (0.0, 5.0, 8.9):  # the last poll finds the answer of 3.9 s before
        now[0] = at
        await observer.poll(target([], [gateway]))
        seen = observe(target([], [gateway]), observer, traffic, known, at).snapshot
    assert seen.traffic is not None


async def test_the_snapshot_knows_who_is_silent_and_what_is_in_flight(pods, observer):
    runtime, silent, gateway, deaf = (
        await pods("a", GOOD),
        await pods("s", None),
        await pods("g", COUNTS),
        await pods("d", None),
    )
    whole, partly = target([runtime, silent], [gateway]), target([runtime, silent], [gateway, deaf])
    await observer.poll(partly)
    now, known = time.monotonic(), Snapshot()
    seen = observe(whole, observer, TrafficWindow("rt", 60.0), known, now).snapshot
    assert ([replica.name for replica in seen.fresh], len(seen.serving), seen.in_flight) == (["a"], 2, {"a": 2})
    seen = observe(partly, observer, TrafficWindow("rt", 60.0), known, now).snapshot
    assert (seen.gateways, seen.gateways_reporting, seen.in_flight) == (2, 1, None)


async def test_the_dead_are_forgotten(pods, observer):
    runtime = await pods("a", GOOD)
    await observer.poll(target([runtime]))
    observer.forget([])
    assert observer.runtime(runtime) is None
