"""The load generator as tests use it: a process of its own against a server that behaves in scripted ways."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from open_loop import Load, OpenLoop

WAYS = ("ok", "shed", "failed", "lost", "truncated", "short")
"""What becomes of the n-th request; `short` ends properly with a token too few."""


class Server:
    """Answers request n in the way n modulo six."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        way = WAYS[len(self.prompts) % len(WAYS)]
        self.prompts.append(body["messages"][0]["content"])
        if way == "shed":
            return web.json_response({}, status=429)
        if way == "failed":
            return web.json_response({}, status=500)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(_event({"choices": [{"index": 0, "delta": {"content": "a"}}]}))
        if way == "lost":
            await answer.write(_event({"error": {"message": "the engine died"}}))
        if way == "truncated":
            await answer.write(b'data: {"choices": [{"in')
        if way in ("ok", "short"):
            await answer.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
            tokens = body["max_tokens"] - (way == "short")
            await answer.write(
                _event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})
                + b"data: [DONE]\n\n"
            )
        return answer


def _event(data: dict[str, object]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    made, loop, bound = Server(), asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", made.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        bound.set()
        return runner

    runner = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert bound.wait(10)
    yield made, f"http://127.0.0.1:{ports[0]}"
    asyncio.run_coroutine_threadsafe(runner.result().cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_every_ending_is_counted_as_what_it_was_and_written_down(server: tuple[Server, str], tmp_path: Path):
    made, url = server
    load = Load(rate=30, seconds=0.4, prompt_tokens=6, output_tokens=9, arrivals="uniform", tokens_per_word=1.0)
    with OpenLoop.start([url, url], "m", load, tmp_path / "run.jsonl") as running:
        summary = running.finish(30)
        lines = running.lines()
    assert (summary.offered, summary.ok, summary.shed, summary.failed, summary.lost, summary.truncated) == (
        12,
        2,
        2,
        2,
        2,
        4,
    )
    assert len(lines) == 12 and all(line["sent"] >= line["due"] - 0.001 for line in lines)
    assert [line["tokens"] for line in lines if line["outcome"] == "ok"] == [9, 9]
    assert len(set(made.prompts)) == 12 and all(len(prompt.split()) == 6 for prompt in made.prompts)


def test_a_load_can_be_ended_before_its_time(server: tuple[Server, str], tmp_path: Path):
    made, url = server
    load = Load(rate=20, seconds=600, prompt_tokens=6, output_tokens=9, arrivals="uniform", tokens_per_word=1.0)
    with OpenLoop.start([url], "m", load, tmp_path / "run.jsonl") as running:
        deadline = time.monotonic() + 30
        while len(running.lines()) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        running.enough()
        summary = running.finish(30)
        assert summary.offered == len(running.lines()) == len(made.prompts) >= 6


def test_the_same_seed_makes_the_same_arrivals_and_the_rate_is_what_was_asked_for():
    load = Load(rate=20, seconds=100, prompt_tokens=6, output_tokens=9, seed=3)
    assert load.planned() == load.planned()
    assert abs(len(load.planned()) - 2000) < 3 * 2000**0.5
    assert [planned.at for planned in Load(4, 1, 6, 9, arrivals="uniform").planned()] == [0, 0.25, 0.5, 0.75]


def test_a_generator_that_cannot_work_says_why(tmp_path: Path):
    load = Load(rate=1, seconds=1, prompt_tokens=6, output_tokens=9)
    with (
        OpenLoop.start(["http://127.0.0.1:9"], "m", load, tmp_path / "run.jsonl") as running,
        pytest.raises(RuntimeError, match="answer"),
    ):
        running.finish(30)
