"""The generator against a real HTTP server that behaves in scripted ways."""

import asyncio
import json

import pytest
from aiohttp import web
from headway_cli.load_generator import (
    BenchTarget,
    PlannedRequest,
    PromptWriter,
    first_model,
    learn_prompt_length,
    run_load,
)


def event(data):
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def content(text, finish=None):
    return event({"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]})


class Endpoint:
    """Answers by the number of tokens asked for: 1 sheds, 2 breaks the stream, 3 sends an in-band error, else all is
    well."""

    def __init__(self):
        self.bodies = []
        self.open = self.peak = 0
        self.release = asyncio.Event()

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if not body.get("stream"):
            return web.json_response({"usage": {"prompt_tokens": 11 + 2 * len(body["messages"][0]["content"].split())}})
        asked = body["max_tokens"]
        if asked == 1:
            return web.json_response(
                {"error": {"message": "busy"}},
                status=429,
                headers={"Retry-After": "7", "x-headway-shed-reason": "slot_wait"},
            )
        self.open += 1
        self.peak = max(self.peak, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": a comment\n\n" + event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}))
        if asked == 50:
            await self.release.wait()
        await response.write(content("a"))
        if asked == 2:
            self.open -= 1
            request.transport.close()
            return response
        if asked == 3:
            await response.write(event({"error": {"message": "the engine died"}}) + event("[DONE]"))
        else:
            await asyncio.sleep(0.02)
            await response.write(content("b") + content("", "stop"))
            await response.write(
                event({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 2}}) + event("[DONE]")
            )
        self.open -= 1
        return response


async def models(request):
    return web.json_response({"data": [{"id": "tiny", "max_model_len": 512}]})


@pytest.fixture
async def endpoint():
    made = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield made
    await runner.cleanup()


async def test_every_way_a_request_can_end_is_recorded_as_what_it_was(endpoint):
    asked = [1, 2, 3, 10]
    records = await run_load(
        BenchTarget(endpoint.url, "tiny"), [PlannedRequest(0.0, 5, n) for n in asked], PromptWriter()
    )
    shed, broken, failed, good = records
    assert (shed.status, shed.shed_reason, shed.retry_after, shed.ok, shed.ttft) == (429, "slot_wait", 7, False, None)
    assert not broken.ok and broken.first_token is not None
    assert not failed.ok and "engine died" in failed.error
    assert (failed.in_band, broken.in_band) == (True, False)
    assert good.ok and (good.prompt_tokens, good.output_tokens, len(good.token_times)) == (21, 2, 2)
    assert good.tpot >= 0.01
    assert all(record.end is not None for record in records)


async def test_the_loop_is_open_later_requests_do_not_wait_for_earlier_ones(endpoint):
    run = asyncio.create_task(
        run_load(BenchTarget(endpoint.url, "tiny"), [PlannedRequest(0.01 * i, 5, 50) for i in range(8)], PromptWriter())
    )
    while endpoint.open < 8:
        await asyncio.sleep(0.01)
        assert not run.done()
    endpoint.release.set()
    assert all(record.ok for record in await run)
    assert endpoint.peak == 8


async def test_when_told_that_it_is_enough_it_sends_nothing_more_and_waits_for_what_is_open(endpoint):
    enough = asyncio.Event()
    planned = [PlannedRequest(0.01 * i, 5, 50) for i in range(4)] + [PlannedRequest(600.0, 5, 50)]
    run = asyncio.create_task(run_load(BenchTarget(endpoint.url, "tiny"), planned, PromptWriter(), enough=enough))
    while endpoint.open < 4:
        await asyncio.sleep(0.01)
    enough.set()
    endpoint.release.set()
    records = await asyncio.wait_for(run, 10)
    assert len(records) == 4 and all(record.ok for record in records)


async def test_an_endpoint_that_is_gone_gives_records_with_the_reason():
    (record,) = await run_load(BenchTarget("http://127.0.0.1:9", "tiny"), [PlannedRequest(0.0, 5, 5)], PromptWriter())
    assert not record.ok and "Connect" in record.error and record.status is None


async def test_the_service_tier_names_the_class(endpoint):
    await run_load(
        BenchTarget(endpoint.url, "tiny", ignore_eos=True),
        [PlannedRequest(0.0, 5, 5, "flex", "batch"), PlannedRequest(0.0, 5, 5)],
        PromptWriter(),
    )
    assert sorted(str(body.get("service_tier")) for body in endpoint.bodies) == ["None", "flex"]
    assert all(body["ignore_eos"] for body in endpoint.bodies)


async def test_the_server_is_asked_for_its_model_and_its_token_counts(endpoint):
    assert await first_model(endpoint.url, None) == ("tiny", 512)
    writer = PromptWriter()
    await learn_prompt_length(BenchTarget(endpoint.url, "tiny"), writer)
    assert writer.tokens_per_word == pytest.approx(2.0)
    assert writer.fixed_tokens == pytest.approx(11.0)
    with pytest.raises(ConnectionError, match="does not answer"):
        await first_model("http://127.0.0.1:9", None)
