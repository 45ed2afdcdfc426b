"""The process itself: starting, refusing to start, and going away without losing anybody."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys

import pytest
from headway_core.admission import RULES
from headway_core.contract import documents, header_names, reports
from headway_core.contract.policy import Endpoint, Pool
from headway_gateway.settings import parse

COMMAND = (sys.executable, "-m", "headway_gateway", "--host", "127.0.0.1", "--poll-interval", "0.1")


class Process:
    """`headway-gateway` as its user runs it."""

    def __init__(self, running):
        self.running = running
        self.port = self.control_port = 0
        self.log = ""

    async def started(self):
        while not (found := re.search(r"serving on http://[^:]+:(\d+) \(control on (\d+)\)", self.log)):
            line = (await asyncio.wait_for(self.running.stderr.readline(), 30)).decode()
            assert line, self.log
            self.log += line
        self.port, self.control_port = int(found[1]), int(found[2])
        return self

    async def end(self):
        code = await asyncio.wait_for(self.running.wait(), 30)
        self.log += (await self.running.stderr.read()).decode()
        return code


@pytest.fixture
async def run():
    runs = []

    async def start(*arguments):
        running = await asyncio.create_subprocess_exec(*COMMAND, *map(str, arguments), stderr=asyncio.subprocess.PIPE)
        runs.append(running)
        return Process(running)

    yield start
    for running in runs:
        if running.returncode is None:
            running.kill()
            await running.wait()


@pytest.fixture
async def behind(run, stub_runtime, client_of, until):
    """A gateway process in front of one stub, ready to serve."""
    stubs = []

    async def start(*arguments, **script):
        stub = await stub_runtime(**script).start()
        stubs.append(stub)
        place = f"p=127.0.0.1:{stub.port}/{stub.control_port}"
        process = await (await run("--port", 0, "--control-port", 0, "--pool", place, *arguments)).started()
        await until(lambda: stub.seq > 0)
        await asyncio.sleep(0.05)
        return process, stub

    yield start
    for stub in stubs:
        await stub.kill()


async def test_what_runs_and_what_waits_finishes_and_nothing_new_comes_in(behind, client_of, until):
    process, stub = await behind("--admission-rule", "open", slots=1, completion_rate=1.0)
    clients = [client_of(process.port) for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        runs, waits, idle, silent = [await stack.enter_async_context(client) for client in clients]
        idle.send({"model": "m", "prompt": "x", "max_tokens": 1})
        assert (await idle.reply()).header("connection") is None
        runs.send({"model": "m", "prompt": "x", "stream": True, "stub": {"tokens": 30, "gap": 0.05}})
        status, headers = await runs.head()
        assert status == 200 and "connection" not in dict(headers)
        seq = stub.seq
        await until(lambda: stub.seq > seq + 1)
        waits.send({"model": "m", "prompt": "y", "stream": True, "stub": {"tokens": 3}})
        await asyncio.sleep(0.2)
        process.running.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        async with client_of(process.port) as late:
            for newcomer in (late, silent):
                newcomer.send({"model": "m", "prompt": "z", "stream": True})
                reply = await newcomer.reply()
                assert (reply.status, reply.header(header_names.SHED_REASON), reply.header("connection")) == (
                    503,
                    "draining",
                    "close",
                )
                assert reply.header("retry-after").isdigit()
        assert await asyncio.wait_for(idle.reader.read(), 5) == b"", (
            "a connection that was kept ends, before somebody asks on it"
        )
        async with client_of(process.control_port) as control:
            control.send(b"", "/ready", method="GET")
            assert (await control.reply()).status == 503
        async with client_of(process.control_port) as control:
            control.send(b"", "/load", method="GET")
            assert documents.load_gateway_report((await control.reply()).body).state is reports.ReplicaState.DRAINING
        first, second = await runs.chunks(), await waits.reply()
        assert first.endswith(b"data: [DONE]\n\n") and first.count(b'"text": "w') == 30
        assert second.body.endswith(b"data: [DONE]\n\n") and second.header("connection") == "close"
        assert await asyncio.wait_for(runs.reader.read(), 5) == b"", (
            "its head was out before the drain: the end of the answer ends it"
        )
    assert await process.end() == 0


async def test_what_outlasts_the_budget_ends_with_an_error_of_its_own(behind, client_of, until):
    process, stub = await behind("--drain-seconds", "0.5")
    async with client_of(process.port) as streams, client_of(process.port) as whole:
        streams.send({"model": "m", "prompt": "x", "stream": True, "stub": {"tokens": 10_000, "gap": 0.05}})
        whole.send({"model": "m", "prompt": "x", "stub": {"first": 600}})
        await until(lambda: stub.running == 2)
        assert (await streams.head())[0] == 200
        process.running.send_signal(signal.SIGTERM)
        body = await streams.chunks()
        last = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "draining"
        reply = await whole.reply()
        assert (reply.status, reply.header(header_names.SHED_REASON), reply.header("retry-after")) == (
            503,
            "draining",
            "1",
        )
        await until(lambda: stub.cancelled == 2)
    assert await process.end() == 0


async def test_a_second_signal_ends_the_wait(behind, client_of, until):
    process, stub = await behind()
    async with client_of(process.port) as client:
        client.send({"model": "m", "prompt": "x", "stub": {"first": 600}})
        await until(lambda: stub.running == 1)
        process.running.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert process.running.returncode is None
        process.running.send_signal(signal.SIGINT)
        assert (await client.reply()).status == 503
    assert await process.end() == 0


async def test_it_says_when_it_is_open_to_everybody(behind):
    process, _ = await behind()
    assert "open to everybody" in process.log
    process.running.send_signal(signal.SIGTERM)
    assert await process.end() == 0
    assert "Traceback" not in process.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--pool NAME=HOST:PORT"),
        (["--pool", "chat=localhost:9000", "--workers", "4"], "Run more gateway replicas instead"),
        (["--pool", "Chat=localhost:9000"], "lower-case"),
        (["--pool", "chat=localhost:99999"], "between 1 and 65535"),
        (["--pool", "chat=a b:1"], "HOST:PORT"),
        (["--pool", "chat=a:1", "--pool", "chat=b:1"], "given twice"),
        (["--pool", "chat=a:1", "--port", "8001"], "must differ"),
        (["--pool", "chat=a:1", "--request-timeout", "soon"], "seconds"),
        (["--pool", "chat=a:1", "--max-queue-requests", "1e6"], "whole number"),
        (["--pool", "chat=a:1", "--admission-rule", "luck"], "moore"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_pool_is_a_name_and_places():
    given = parse(["--pool", "chat=a:1/2,[::1]:3,b", "--drain-seconds", "5"])
    assert given.pools == (Pool("chat", (Endpoint("a", 1, 2), Endpoint("::1", 3, 8001), Endpoint("b", 8000, 8001))),)
    assert given.drain_seconds == 5.0 and given.admission_rule == "moore" and given.admission_rule in RULES


async def test_a_taken_port_and_a_broken_key_file_are_explained(run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await run("--pool", "a=b:1", "--port", taken.getsockname()[1], "--control-port", 0)
        assert await process.end() == 1
        assert "cannot listen" in process.log and "Traceback" not in process.log
    process = await run("--pool", "a=b:1", "--port", 0, "--control-port", 0, "--keys", "/no/such/file")
    assert await process.end() == 1
    assert "/no/such/file" in process.log and "Traceback" not in process.log
    keys = tmp_path / "keys"
    keys.write_text("acme plain-key\n")
    process = await run("--pool", "a=b:1", "--port", 0, "--control-port", 0, "--keys", keys)
    assert await process.end() == 1
    assert "keys:1" in process.log and "hash-key" in process.log and "plain-key" not in process.log
