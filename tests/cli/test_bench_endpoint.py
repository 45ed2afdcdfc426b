"""`headway bench` against endpoints that are none, that refuse, and that break off; and under Ctrl-C."""

import asyncio
import json
import re
import signal
import sys

import pytest
from aiohttp import web

BENCH = (sys.executable, "-m", "headway_cli", "bench", "--seed", "1")
MODELS = {"data": [{"id": "tiny", "max_model_len": 512}]}
USAGE = {"usage": {"prompt_tokens": 30, "completion_tokens": 1}}
PAGE = "<html><body>Welcome to the router</body></html>"


def answering(body, status=200):
    async def handler(request):
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(
            text=text, status=status, content_type="text/html" if text.startswith("<") else "application/json"
        )

    return handler


@pytest.fixture
async def serve():
    """`await serve(models, chat)`: the URL of a server with these two handlers."""
    runners = []

    async def start(models, chat=None):
        app = web.Application()
        app.router.add_get("/v1/models", models)
        if chat is not None:
            app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def bench(*words):
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*BENCH, *map(str, words), stdout=pipe, stderr=pipe)


async def ended(process):
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no-address", "localhost:9", "http://", "http://[::1"])
async def test_an_address_where_nothing_answers_is_named(url):
    status, _, said = await ended(await bench("--url", url))
    assert status == 2 and said.startswith("headway bench: ") and url in said and "Traceback" not in said


REFUSED = answering({"error": {"message": "Incorrect API key provided"}}, 401)


@pytest.mark.parametrize(
    ("models", "chat", "words"),
    [
        (
            REFUSED,
            None,
            r"answered 401 to GET /v1/models: put the key into the variable that --api-key-env names.*Incorrect "
            r"API key",
        ),
        (answering(MODELS), REFUSED, r"answered 401 to a first request: put the key.*Incorrect API key"),
        (answering(PAGE), None, r"gives no list of models.*Welcome to the router.*OpenAI-compatible"),
        (answering(PAGE, 404), None, r"answered 404 to GET /v1/models.*Welcome to the router"),
        (answering(MODELS), answering(PAGE), r"without usage\.prompt_tokens.*Welcome to the router"),
        (answering(MODELS), answering({"choices": []}), r"without usage\.prompt_tokens"),
        (answering([]), None, r"gives no list of models"),
        (answering({"data": 5}), None, r"gives no list of models"),
        (answering({"data": ["tiny"]}), None, r"gives no list of models"),
        (answering({"data": []}), None, r"lists no model"),
        (answering("9" * 5000), None, r"gives no list of models"),
    ],
)
async def test_an_endpoint_that_is_none_or_refuses_is_told_in_a_sentence(serve, models, chat, words):
    status, out, said = await ended(await bench("--url", await serve(models, chat)))
    assert (status, out) == (2, "") and "Traceback" not in said
    assert re.search(words, said), said
    assert len(said) < 600


def events(*documents):
    return "".join(
        f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n" for document in documents
    )


BROKEN = [
    PAGE,
    events(5),
    events([1]),
    events({"usage": {}}),
    events({"usage": 7}),
    events({"choices": [1]}),
    events({"choices": 5}),
    events("{"),
]


async def test_streams_that_are_none_are_failures_of_their_own_and_end_nothing(serve, tmp_path):
    sent = 0

    async def chat(request):
        nonlocal sent
        if not (await request.json()).get("stream"):
            return web.json_response(USAGE)
        sent += 1
        text = (
            BROKEN[(sent - 1) % (len(BROKEN) + 1)]
            if (sent - 1) % (len(BROKEN) + 1) < len(BROKEN)
            else events(GOOD, "[DONE]")
        )
        return web.Response(text=text, content_type="text/event-stream")

    url, file = await serve(answering(MODELS), chat), tmp_path / "run.json"
    count = 2 * (len(BROKEN) + 1)
    status, out, said = await ended(await bench("--url", url, "--requests", count, "--rate", 100, "--json", file))
    assert status == 1 and "Traceback" not in said, said
    assert re.search(rf"^all +{count} +2 +0 +{count - 2} ", out, re.MULTILINE), out


GOOD = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("interrupts", [1, 2])
async def test_ctrl_c_ends_the_load_and_says_what_was_measured(serve, tmp_path, interrupts):
    """Every second request is held open. The first Ctrl-C lets those finish, the second drops them."""
    sent, held, go = 0, 0, asyncio.Event()

    async def chat(request):
        nonlocal sent, held
        if not (await request.json()).get("stream"):
            return web.json_response(USAGE)
        sent += 1
        if sent % 2 == 0:
            held += 1
            await go.wait()
        return web.Response(text=events(GOOD, "[DONE]"), content_type="text/event-stream")

    url, file = await serve(answering(MODELS), chat), tmp_path / "run.json"
    process = await bench("--url", url, "--requests", 1000, "--rate", 40, "--json", file)
    async with asyncio.timeout(60):
        while held < 5:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = b""
        while b"Ctrl-C again drops them" not in said:
            said += await process.stderr.readline()
        before = sent
        if interrupts == 2:
            process.send_signal(signal.SIGINT)
        else:
            await asyncio.sleep(0.3)
            assert sent <= before + 1, "something was sent after Ctrl-C"
            go.set()
        status, out, rest = await ended(process)
    go.set()
    document = json.loads(file.read_text())
    complete = sent if interrupts == 1 else sent - held
    assert status == 130 and f"{complete} of 1000 requests came to an end" in rest and "Traceback" not in rest, rest
    assert re.search(rf"^all +{complete} +{complete} +0 +0 ", out, re.MULTILINE), out
    assert (len(document["requests"]), document["planned"], document["interrupted"]) == (complete, 1000, True)


async def test_ctrl_c_before_anything_was_measured_says_so(serve):
    reached = asyncio.Event()

    async def chat(request):
        reached.set()
        await asyncio.sleep(600)

    process = await bench("--url", await serve(answering(MODELS), chat))
    await asyncio.wait_for(reached.wait(), 60)
    process.send_signal(signal.SIGINT)
    status, out, said = await ended(process)
    assert (status, out) == (130, "") and "Traceback" not in said
    assert "interrupted" in said
