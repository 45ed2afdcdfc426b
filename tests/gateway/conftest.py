"""A gateway in front of scripted runtimes: real sockets on both sides, exact bytes on cue."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field

import pytest
from headway_core.contract import documents, header_names, reports
from headway_core.contract.policy import Endpoint, Knobs, Pool
from headway_core.contract.reports import ClassLoad, EngineLimits, ReplicaState, RuntimeReport
from headway_gateway.server import listening
from headway_gateway.settings import Settings

MODEL = "m"


@dataclass
class Request:
    """One request as it reached the stub."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name):
        return next((value for key, value in self.headers if key == name), None)

    @property
    def script(self):
        try:
            return json.loads(self.body).get("stub", {})
        except ValueError:
            return {}


@dataclass
class StubRuntime:
    """What the contract asks of a runtime, scripted. `script` replaces the answer to /v1/*: an async function of
    (request, write).

    A request's member "stub" steers the default answer: first and gap (seconds), tokens, status.
    """

    name: str = "stub-0"
    model: str = MODEL
    slots: int = 1_000_000
    prefill_rate: float | None = 100_000.0
    completion_rate: float | None = 1_000.0
    state: ReplicaState = ReplicaState.READY
    script: object = None
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    running: int = 0
    cancelled: int = 0
    finished: int = 0
    sockets: int = 0
    boot: int = 1
    seq: int = 0
    seen: dict = field(default_factory=dict)
    port: int = 0
    control_port: int = 0
    load_answer: bytes | None = None
    hints: bool = True
    claims: int | None = None
    """Slots that it says it has, when that is not the truth."""

    def __post_init__(self):
        self._free = asyncio.Semaphore(self.slots)
        self._servers = []
        self._connections = set()

    @property
    def endpoint(self):
        return Endpoint("127.0.0.1", self.port, self.control_port)

    async def start(self):
        for attribute, handler in (("port", self._serve), ("control_port", self._control)):
            server = await asyncio.start_server(handler, "127.0.0.1", getattr(self, attribute), limit=1 << 25)
            setattr(self, attribute, server.sockets[0].getsockname()[1])
            self._servers.append(server)
        return self

    async def kill(self):
        """Like SIGKILL: every socket is reset, nobody listens."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task, writer in list(self._connections):
            writer.transport.abort()
            task.cancel()
        await asyncio.sleep(0)

    async def restart(self):
        self.boot += 1
        self.seq = 0
        self.seen.clear()
        await self.start()

    def report(self):
        self.seq += 1
        waiting = self.open - self.running
        return RuntimeReport(
            replica_id=self.name,
            pool="p",
            model=self.model,
            boot_id=f"{self.name}-{self.boot}",
            seq=self.seq,
            at=time.time(),
            state=self.state,
            limits=EngineLimits(min(self.slots, 4096), 2048, 131_072, 16, 1_000_000),
            effective=Knobs(min(self.slots, 4096), 2048),
            running=self.running,
            waiting=waiting,
            free_slots=max(0, (self.claims or self.slots) - self.open),
            free_blocks=1_000_000,
            classes=(ClassLoad(0, waiting, self.running, 0),),
            prefill_rate=self.prefill_rate,
            completion_rate=self.completion_rate,
            iteration_seconds=0.001,
            dispatched=dict(self.seen),
        )

    def hint(self):
        report = self.report()
        return documents.dump(
            reports.LoadHint(
                report.boot_id,
                report.seq,
                report.running,
                report.waiting,
                report.free_slots,
                report.free_blocks,
                {},
                dict(self.seen),
            )
        )

    async def _control(self, reader, writer):
        await self._connection(reader, writer, self._load)

    async def _load(self, request, write):
        body = self.load_answer if self.load_answer is not None else documents.dump(self.report()).encode()
        write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def _serve(self, reader, writer):
        await self._connection(reader, writer, self._answer)

    async def _connection(self, reader, writer, handler):
        record = (asyncio.current_task(), writer)
        self._connections.add(record)
        self.sockets += 1
        try:
            while (request := await _read(reader)) is not None:
                answer = asyncio.ensure_future(handler(request, writer.write))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        answer.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await answer
                        return
                    if answer.result() == "close":
                        return
                finally:
                    answer.cancel()
                    gone.cancel()
                    await asyncio.gather(answer, gone, return_exceptions=True)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.sockets -= 1
            self._connections.discard(record)
            writer.close()

    async def _answer(self, request, write):
        self.requests.append(request)
        number = request.header(header_names.DISPATCH)
        if number:
            gateway, _, count = number.partition(":")
            self.seen[gateway] = max(self.seen.get(gateway, 0), int(count))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with self._free:
                self.running += 1
                try:
                    result = await (self.script or self._default)(request, write)
                finally:
                    self.running -= 1
            self.finished += 1
            return result
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _default(self, request, write):
        asked = json.loads(request.body)
        script = request.script
        tokens = script.get("tokens", asked.get("max_tokens") or 3)
        status = script.get("status", 200)
        if status != 200:
            answer(
                write,
                status,
                json.dumps({"error": {"message": "as scripted", "type": "x", "param": None, "code": None}}).encode(),
            )
            return
        chat = request.path.endswith("chat/completions")
        hint = [(header_names.LOAD, self.hint())] if self.hints else []
        hint.append((header_names.PROMPT_TOKENS, str(script.get("prompt", 7))))
        if not asked.get("stream"):
            await asyncio.sleep(script.get("first", 0) + (tokens - 1) * script.get("gap", 0))
            text = "".join(f"w{index} " for index in range(tokens))
            choice = {
                "index": 0,
                "finish_reason": "length",
                **({"message": {"content": text}} if chat else {"text": text}),
            }
            usage = {"prompt_tokens": script.get("prompt", 7), "completion_tokens": tokens}
            answer(write, 200, json.dumps({"object": "x", "choices": [choice], "usage": usage}).encode(), hint)
            return
        begin(write, hint)
        if chat:
            chunk(write, record({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await asyncio.sleep(script.get("first", 0))
        for index in range(tokens):
            if index:
                await asyncio.sleep(script.get("gap", 0))
            piece = {"delta": {"content": f"w{index} "}} if chat else {"text": f"w{index} "}
            chunk(write, record({"choices": [{"index": 0, **piece, "finish_reason": None}]}))
        last = {"delta": {}} if chat else {"text": ""}
        tail = record({"choices": [{"index": 0, **last, "finish_reason": "length"}]})
        if request.header(header_names.WANT_USAGE):
            usage = {"prompt": script.get("prompt", 7), "cached": 0, "completion": tokens}
            tail += header_names.USAGE_COMMENT.encode() + json.dumps(usage).encode() + b"\n\n"
        chunk(write, tail + b"data: [DONE]\n\n")
        end(write)
        return


async def _read(reader):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", 0))
    return Request(method, path, headers, await reader.readexactly(length))


def record(event):
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def answer(write, status, body, headers=(), kind="application/json"):
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        *(f"{n}: {v}" for n, v in headers),
    ]
    write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def begin(write, headers=(), status=200, kind="text/event-stream"):
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-type: {kind}",
        "transfer-encoding: chunked",
        *(f"{n}: {v}" for n, v in headers),
    ]
    write("\r\n".join(lines).encode() + b"\r\n\r\n")


def chunk(write, data):
    write(b"%x\r\n%s\r\n" % (len(data), data))


def end(write):
    write(b"0\r\n\r\n")


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name):
        return next((value for key, value in self.headers if key == name), None)

    def all(self, name):
        return [value for key, value in self.headers if key == name]

    def json(self):
        return json.loads(self.body)


class Client:
    """A client made of one socket: it sees every byte, and leaves when it likes."""

    def __init__(self, port):
        self.port = port
        self.reader = self.writer = None

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 25)
        return self

    async def __aexit__(self, *_):
        self.close()

    def close(self, reset=False):
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()

    def send(self, body=b"", path="/v1/completions", headers=(), method="POST", length=None):
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        lines = [f"{method} {path} HTTP/1.1", "host: gateway", "content-type: application/json"]
        lines += [f"content-length: {len(data) if length is None else length}"] if method == "POST" else []
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)

    async def head(self):
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)).decode("latin-1")
        first, *lines = text.split("\r\n")[:-2]
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return int(first.split(" ")[1]), headers

    async def piece(self):
        """One chunk of a chunked body; empty at its end."""
        size = int(await asyncio.wait_for(self.reader.readline(), 60), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def chunks(self):
        """The rest of a chunked body."""
        body = b""
        while data := await self.piece():
            body += data
        return body

    async def reply(self):
        status, headers = await self.head()
        if status == 100:
            status, headers = await self.head()
        named = dict(headers)
        if named.get("transfer-encoding") == "chunked":
            body = await self.chunks()
        else:
            body = await asyncio.wait_for(self.reader.readexactly(int(named.get("content-length", 0))), 60)
        return Reply(status, headers, body)


class RunningGateway:
    """A running gateway and how to talk to it."""

    def __init__(self, gateway, port, control_port):
        self.gateway = gateway
        self.port = port
        self.control_port = control_port
        self.url = f"http://127.0.0.1:{port}"

    def client(self):
        return Client(self.port)

    async def ask(self, body=None, path="/v1/completions", headers=(), method="POST", port=None, **members):
        async with Client(port or self.port) as client:
            client.send({"model": MODEL, "prompt": "hello", **members} if body is None else body, path, headers, method)
            return await client.reply()

    async def get(self, path, headers=()):
        return await self.ask(b"", path, headers, "GET")

    async def control(self, path):
        return await self.ask(b"", path, (), "GET", self.control_port)

    def counters(self, name="default", pool="p"):
        return next(known for known in self.gateway.pools if known.name == pool).counters[name]

    @property
    def pool(self):
        return next(iter(self.gateway.pools))

    async def settled(self):
        """Nothing runs, nothing waits, and every offered request has exactly one outcome."""
        classes = [counters for pool in self.gateway.pools for counters in pool.counters.values()]
        await until(lambda: not self.gateway.pipeline.active, "requests are still open")
        await until(
            lambda: all(counters.in_flight == counters.queued == 0 for counters in classes),
            "gauges did not return to zero",
        )
        for counters in classes:
            assert counters.offered == sum(counters.outcomes.values())
        for pool in self.gateway.pools:
            fleet = pool.admission.fleet
            assert {replica: fleet.in_flight(replica) for replica in fleet} == dict.fromkeys(fleet, 0)
            assert len(pool.admission.queue) == 0


async def until(condition, message="it did not happen", seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        await asyncio.sleep(0.01)


@pytest.fixture
async def start_gateway():
    """`await start_gateway(stub, ..., **settings)`: a gateway with one pool "p" of these stubs, once it knows them."""
    async with contextlib.AsyncExitStack() as stack:

        async def build(*stubs, ready=True, pools=None, **settings):
            for stub in stubs:
                if not stub.port:
                    await stub.start()
                    stack.push_async_callback(stub.kill)
            pools = (Pool("p", tuple(stub.endpoint for stub in stubs)),) if pools is None else pools
            settings = {
                "host": "127.0.0.1",
                "port": 0,
                "control_port": 0,
                "poll_interval": 0.1,
                "pools": pools,
            } | settings
            built = RunningGateway(*await stack.enter_async_context(listening(Settings(**settings))))
            if ready:
                await until(
                    lambda: (
                        sum(pool.ready(asyncio.get_running_loop().time()) for pool in built.gateway.pools) == len(stubs)
                    ),
                    "the replicas were not found",
                )
            return built

        yield build


@pytest.fixture
def wire():
    """The stub's pen: helpers that write responses byte by byte."""
    return type(
        "Wire", (), {name: staticmethod(globals()[name]) for name in ("record", "answer", "begin", "chunk", "end")}
    )


@pytest.fixture
def stub_runtime():
    return StubRuntime


@pytest.fixture(name="until")
def until_fixture():
    return until


@pytest.fixture
def client_of():
    return Client
