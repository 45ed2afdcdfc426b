"""Who is sent to: identity, readiness and draining from reports; retries, and replicas that fail."""

import asyncio
import dataclasses

import pytest
from headway_core.admission import outliers
from headway_core.contract import documents, header_names
from headway_core.contract.policy import Endpoint, Policy, Pool
from headway_core.contract.reports import ReplicaState
from headway_core.slo import DEFAULT_CLASS
from headway_gateway import replicas as discovery


def ready(gateway):
    return gateway.pool.ready(asyncio.get_running_loop().time())


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new(start_gateway, stub_runtime, until):
    a, b = stub_runtime("a"), stub_runtime("b")
    gateway = await start_gateway(a, b)
    running = [asyncio.ensure_future(gateway.ask(stream=True, stub={"first": 0.6, "tokens": 3})) for _ in range(6)]
    await until(lambda: a.open + b.open == 6)
    a.state = ReplicaState.DRAINING
    await until(lambda: ready(gateway) == 1)
    seen = len(a.requests)
    for _ in range(10):
        assert (await gateway.ask(max_tokens=1)).status == 200
    assert len(a.requests) == seen
    assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in await asyncio.gather(*running))


async def test_one_odd_replica_never_blocks_the_others(start_gateway, stub_runtime, until):
    good = stub_runtime("good")
    garbage, foreign = (
        stub_runtime("g", load_answer=b"<html>404</html>"),
        stub_runtime("f", load_answer=b'{"replicaId": 5}'),
    )
    closed = Endpoint("127.0.0.1", 1, 2)
    for stub in (good, garbage, foreign):
        await stub.start()
    endpoints = (garbage.endpoint, closed, foreign.endpoint, Endpoint("no-such-host.invalid"), good.endpoint)
    gateway = await start_gateway(ready=False, pools=(Pool("p", endpoints),))
    await until(lambda: ready(gateway) == 1)
    for _ in range(20):
        assert (await gateway.ask(max_tokens=1)).status == 200
    assert garbage.requests == foreign.requests == []
    reasons = dict(gateway.pool.replicas.errors())
    assert "not a load report" in reasons[f"127.0.0.1:{garbage.control_port}"]
    for stub in (good, garbage, foreign):
        await stub.kill()


async def test_two_replicas_that_report_the_same_id_are_two(start_gateway, stub_runtime, until):
    a, b = stub_runtime("same"), stub_runtime("same")
    gateway = await start_gateway(a, b)
    asked = [asyncio.ensure_future(gateway.ask(stub={"first": 0.3})) for _ in range(10)]
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
    assert a.requests and b.requests


async def test_a_replica_that_restarts_is_a_new_one(start_gateway, stub_runtime, until):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    for _ in range(3):
        assert (await gateway.ask()).status == 200
        await stub.kill()
        await until(lambda: ready(gateway) == 0)
        assert (await gateway.ask()).status == 503
        await stub.restart()
        await until(lambda: ready(gateway) == 1)
    await gateway.settled()
    assert stub.boot == 4


async def test_a_silent_replica_goes_stale_while_others_report(start_gateway, stub_runtime, until):
    silent, others = stub_runtime("silent"), [stub_runtime(name) for name in "abc"]
    gateway = await start_gateway(silent, *others)
    silent.load_answer = b""
    await until(lambda: ready(gateway) == 3)
    # When most are silent it is the reporting that failed: those last known good stay in use.
    for stub in others:
        stub.load_answer = b""
    await asyncio.sleep(0.6)
    assert ready(gateway) == 3
    assert (await gateway.ask()).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_dies_before_the_first_byte_is_replaced(start_gateway, stub_runtime, wire, stream):
    async def dies(request, write):
        if stream:
            wire.begin(write)
            wire.chunk(write, wire.record({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}))
            await asyncio.sleep(0.02)
        return "close"

    broken, good = stub_runtime("a", script=dies), stub_runtime("b")
    gateway = await start_gateway(broken, good)
    replies = await asyncio.gather(*(gateway.ask(stream=stream, max_tokens=2) for _ in range(20)))
    assert all(reply.status == 200 and b"w0" in reply.body for reply in replies)
    assert broken.requests and len(good.requests) == 20
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == gateway.counters().admitted == 20
    if len(broken.requests) >= outliers.ERRORS:
        seen = len(broken.requests)
        assert {(await gateway.ask(max_tokens=1)).status for _ in range(20)} == {200}
        assert len(broken.requests) == seen, "it is ejected"


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_answer_of_a_dead_replica_is_tried_elsewhere(start_gateway, stub_runtime, status):
    broken, good = stub_runtime("a"), stub_runtime("b")
    gateway = await start_gateway(broken, good)
    broken.script = lambda request, write: dead(write, status)
    replies = await asyncio.gather(*(gateway.ask(max_tokens=1) for _ in range(20)))
    assert {reply.status for reply in replies} == {200}
    assert broken.requests and len(good.requests) == 20


async def test_replicas_that_are_going_away_pass_a_request_on_and_are_not_blamed(start_gateway, stub_runtime):
    """Its report is half a second old when a replica begins to drain: until the next one it rejects what is sent to
    it."""
    # The slower one is the last to be chosen.
    going, good = [stub_runtime(name) for name in "abc"], stub_runtime("d", prefill_rate=50_000.0)
    gateway = await start_gateway(*going, good, poll_interval=30.0)
    for stub in going:
        stub.script = lambda request, write: dead(write, 503)
    replies = [await gateway.ask(max_tokens=1) for _ in range(20)]
    assert {reply.status for reply in replies} == {200}
    assert all(len(stub.requests) <= 1 for stub in going) and sum(len(stub.requests) for stub in going) > 0
    assert len(good.requests) == 20
    good.script = lambda request, write: dead(write, 503)
    assert (await gateway.ask()).header(header_names.SHED_REASON) == "no_replica"
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 20 and gateway.counters().outcomes["upstream_error"] == 0


async def test_a_gateway_that_has_just_started_is_ready_once_it_has_asked_every_replica(
    start_gateway, stub_runtime, until
):
    stub = stub_runtime()
    answers, plain = asyncio.Event(), stub._load

    async def slow(request, write):
        await answers.wait()
        await plain(request, write)

    stub._load = slow
    gateway = await start_gateway(stub, ready=False, pools=None)
    assert ((first := await gateway.control("/ready")).status, first.json()) == (503, {"status": "starting"})
    answers.set()
    await until(lambda: ready(gateway) == 1)
    assert (await gateway.control("/ready")).status == 200
    await stub.kill()
    await until(lambda: ready(gateway) == 0)
    assert (await gateway.control("/ready")).status == 200, (
        "no replica is no reason to send elsewhere: the answer says when to try again"
    )


async def dead(write, status):
    write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)


async def test_a_request_that_breaks_replicas_does_not_meet_them_all(start_gateway, stub_runtime):
    async def dies(request, write):
        return "close"

    stubs = [stub_runtime(name, script=dies) for name in "abcde"]
    gateway = await start_gateway(*stubs)
    reply = await gateway.ask(stream=True)
    assert reply.status == 502 and reply.json()["error"]["code"] == "upstream_error"
    assert sum(len(stub.requests) for stub in stubs) == 2
    await gateway.settled()
    assert gateway.counters().outcomes["upstream_error"] == 1


async def test_a_failure_of_the_request_alone_is_not_retried(start_gateway, stub_runtime):
    a, b = stub_runtime("a"), stub_runtime("b")
    gateway = await start_gateway(a, b)
    reply = await gateway.ask(stub={"status": 500})
    assert reply.status == 500 and reply.json()["error"]["message"] == "as scripted"
    assert len(a.requests) + len(b.requests) == 1
    await gateway.settled()
    assert gateway.counters().outcomes["upstream_error"] == 1


async def test_a_kept_connection_that_was_closed_costs_one_more_try_and_no_error(start_gateway, stub_runtime):
    """The only replica closes each connection after an answer, a moment later than it should: the classic race."""
    stub = stub_runtime()
    lives = 0

    async def closing(request, write):
        nonlocal lives
        lives += 1
        if lives % 2 == 0:
            # An answered connection that takes one more request and drops it.
            return "close"
        await stub._default(request, write)
        return None

    stub.script = closing
    gateway = await start_gateway(stub)
    for _ in range(30):
        assert (await gateway.ask(max_tokens=1)).status == 200
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 30 and stub.cancelled == 0


async def test_idle_connections_that_a_replica_closes_all_at_once_cost_no_request(start_gateway, stub_runtime, until):
    """Its time for idle connections is over just when requests come, and every connection that is kept is as old as the
    next."""
    stub = stub_runtime()
    gateway = await start_gateway(stub)

    for _ in range(10):
        stub.script = None
        replies = await asyncio.gather(*(gateway.ask(max_tokens=1, stub={"first": 0.05}) for _ in range(5)))
        assert [reply.status for reply in replies] == [200] * 5
        # The five connections are kept; whatever comes on one of them finds it closed.
        kept = {writer for _, writer in stub._connections}

        async def only_new(request, write, kept=kept):
            writer = next(writer for task, writer in stub._connections if writer.write == write)
            if writer in kept:
                return "close"
            return await stub._default(request, write)

        stub.script = only_new
        assert (await gateway.ask(max_tokens=1)).status == 200
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 60


async def test_a_policy_cordons_adds_and_moves_replicas(start_gateway, stub_runtime, tmp_path, until):
    a, b = stub_runtime("a"), stub_runtime("b")
    for stub in (a, b):
        await stub.start()
    policy = Policy(1, "u", 1, Pool("p", (a.endpoint,)), (DEFAULT_CLASS,), "default")
    file = tmp_path / "p.json"

    def write(**changes):
        nonlocal policy
        policy = dataclasses.replace(policy, revision=policy.revision + 1, **changes)
        file.write_text(documents.dump(policy))

    gateway = await start_gateway(ready=False, pools=(), policy=file)
    assert (await gateway.ask()).status == 503
    write()
    await until(lambda: len(list(gateway.gateway.pools)) == 1 and ready(gateway) == 1)
    write(pool=Pool("p", (a.endpoint, b.endpoint), "renamed"))
    await until(lambda: ready(gateway) == 2)
    assert (await gateway.ask()).status == 404
    write(cordoned=("a",))
    await until(lambda: ready(gateway) == 1)
    before = len(a.requests)
    for _ in range(5):
        assert (await gateway.ask(model="renamed", max_tokens=1)).status == 200
    assert len(a.requests) == before
    report = documents.load_gateway_report((await gateway.control("/load")).body)
    assert report.pools[0].policy.revision == policy.revision and report.pools[0].known_replicas == 2
    file.write_text("{broken")
    now = asyncio.get_running_loop().time
    await until(lambda: "p.json" in (gateway.gateway.reporter.report(now()).pools[0].policy.error or ""))
    assert (await gateway.ask(model="renamed", max_tokens=1)).status == 200
    assert documents.load_policy((await gateway.control("/policy")).body.split(b":", 1)[1][:-1]) == policy
    for stub in (a, b):
        await stub.kill()


async def test_an_address_that_a_name_no_longer_gives_is_kept_while_it_answers(
    start_gateway, stub_runtime, until, monkeypatch
):
    a, b = stub_runtime("a"), stub_runtime("b")
    for stub in (a, b):
        await stub.start()
    answers = {"pool.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}

    async def resolve(host):
        if not answers[host]:
            raise OSError("no such name")
        return answers[host]

    monkeypatch.setattr(discovery, "resolve", resolve)
    monkeypatch.setattr(discovery, "RESOLVE_SECONDS", 0.1)
    monkeypatch.setattr(discovery, "VANISHED_SECONDS", 0.5)
    pool = Pool("p", (Endpoint("pool.test", a.port, a.control_port), Endpoint("other.test", b.port, b.control_port)))
    gateway = await start_gateway(ready=False, pools=(pool,))
    await until(lambda: ready(gateway) == 2)
    answers["pool.test"] = []
    await asyncio.sleep(0.8)
    assert ready(gateway) == 2
    answers["pool.test"] = ["127.0.0.99"]
    await asyncio.sleep(0.3)
    assert ready(gateway) == 2
    await until(lambda: ready(gateway) == 1)
    assert (await gateway.ask()).status == 200
    for stub in (a, b):
        await stub.kill()


async def test_several_pools_serve_a_model_each(start_gateway, stub_runtime, until):
    chat, code = stub_runtime("x", model="chat-model"), stub_runtime("y", model="code-model")
    for stub in (chat, code):
        await stub.start()
    late = Pool("late", (Endpoint("127.0.0.1", 1, 2),))
    gateway = await start_gateway(
        ready=False, pools=(Pool("chat", (chat.endpoint,)), Pool("code", (code.endpoint,)), late)
    )
    await until(lambda: len(gateway.gateway.pools.models()) == 2)
    assert (await gateway.ask(model="chat-model")).status == (await gateway.ask(model="code-model")).status == 200
    assert len(chat.requests) == len(code.requests) == 1
    assert [model["id"] for model in (await gateway.get("/v1/models")).json()["data"]] == ["chat-model", "code-model"]
    # What the third pool serves nobody knows yet: not "no such model".
    assert (await gateway.ask(model="other")).status == 503
    for stub in (chat, code):
        await stub.kill()


async def test_the_load_that_rides_on_an_answer_counts_from_its_head(start_gateway, stub_runtime, until):
    stub = stub_runtime(slots=3)
    gateway = await start_gateway(stub, poll_interval=30.0)
    fleet = gateway.pool.admission.fleet
    assert fleet.report("stub-0").free_slots == 3
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True, "stub": {"first": 60.0}})
        await until(lambda: fleet.report("stub-0").free_slots == 2)
    await gateway.settled()
