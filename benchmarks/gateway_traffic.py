"""The parts that `gateway.py` measures with, each run as a process of its own: a scripted runtime, a bare byte relay, a
gateway, and load.

    python benchmarks/gateway_traffic.py upstream CHUNKS GAP SPREAD | bare PORT | gateway PORT CONTROL | streams ... |
    requests ...

Servers print their ports; loads print "measuring" when they begin to, and one line of JSON at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from typing import ClassVar

import uvloop
from headway_core.contract import documents
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits, ReplicaState, RuntimeReport
from headway_gateway.server import serve
from headway_gateway.settings import Settings, parse_pool

MODEL = "m"
_BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
_PLAIN = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
_RECORD = (
    b"data: "
    b'{"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n'
)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
).encode()


# ---------------------------------------------------------------- the scripted runtime


SEEN: dict[str, int] = {}
"""Gateway boot id → highest dispatch number, as the load report says it."""


class Upstream(asyncio.Protocol):
    """Answers every stream request with chunks that carry the instant they were written; every other one at once."""

    streams: ClassVar[set[Upstream]] = set()

    def __init__(self, chunks: int) -> None:
        self.left = 0
        self.chunks = chunks
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, rest = self.buffer[:end].lower(), self.buffer[end + 4 :]
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            if b"x-headway-dispatch: " in head:
                gateway, _, number = head.split(b"x-headway-dispatch: ")[1].split(b"\r\n")[0].decode().partition(":")
                SEEN[gateway] = max(SEEN.get(gateway, 0), int(number))
            if b'"stream": true' in body or b'"stream":true' in body:
                self.transport.write(_STREAM_HEAD)
                self.left = self.chunks
                self.streams.add(self)
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
                    + _ANSWER
                )

    def connection_lost(self, _error: Exception | None) -> None:
        self.streams.discard(self)

    def tick(self) -> None:
        record = _RECORD % time.monotonic_ns()
        self.left -= 1
        if self.left > 0:
            self.transport.write(b"%x\r\n%s\r\n" % (len(record), record))
            return
        record += b"data: [DONE]\n\n"
        self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(record), record))
        self.streams.discard(self)


class Control(asyncio.Protocol):
    """The load report of a runtime that has a slot for every request."""

    seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, _data: bytes) -> None:
        Control.seq += 1
        many = 1_000_000
        report = RuntimeReport(
            replica_id="bench",
            pool="p",
            model=MODEL,
            boot_id="b",
            seq=Control.seq,
            at=time.time(),
            state=ReplicaState.READY,
            limits=EngineLimits(many, 8192, 131_072, 16, many),
            effective=Knobs(many, 8192),
            free_slots=many,
            free_blocks=many,
            prefill_rate=1e9,
            completion_rate=1e6,
            iteration_seconds=0.001,
            dispatched=dict(SEEN),
        )
        body = documents.dump(report).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def upstream(chunks: int, gap: float, spread: bool) -> None:
    """`spread`: the streams' chunks are spread over the gap; otherwise all come at the same instant, as tokens of one
    engine step do."""
    loop = asyncio.get_running_loop()
    serving = await loop.create_server(lambda: Upstream(chunks), "127.0.0.1", 0, backlog=20_000)
    control = await loop.create_server(Control, "127.0.0.1", 0)
    print(*(server.sockets[0].getsockname()[1] for server in (serving, control)), flush=True)
    slots = 500 if spread else 1
    for number in range(1_000_000_000):
        due = loop.time() + gap / slots
        members = list(Upstream.streams)
        for index in range(number % slots, len(members), slots):
            members[index].tick()
        await asyncio.sleep(max(0.0, due - loop.time()))


# ---------------------------------------------------------------- the bare byte relay


class Pipe(asyncio.Protocol):
    """Passes bytes from one socket to another: the least that anything between client and runtime can do."""

    def __init__(self, port: int, other: Pipe | None = None) -> None:
        self.port = port
        self.other = other
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self.other is None:
            loop = asyncio.get_running_loop()
            self.opening = loop.create_task(
                loop.create_connection(lambda: Pipe(self.port, self), "127.0.0.1", self.port)
            )
        else:
            self.other.other = self
            transport.write(self.other.early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


async def bare(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Pipe(port), "127.0.0.1", 0, backlog=20_000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---------------------------------------------------------------- the load


class Stream(asyncio.Protocol):
    """One streaming client: counts chunks and how late each is."""

    def __init__(self, late: list[int]) -> None:
        self.late = late
        self.first = asyncio.Event()
        self.done = asyncio.Event()
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            b"application/json\r\ncontent-length: %d\r\n\r\n"
        )
        transport.write(head % len(_BODY) + _BODY)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.first.set()
        data = self.tail + data
        *whole, self.tail = data.split(b"\n\n")
        for part in whole:
            at = part.rfind(b'"content":"')
            if at >= 0:
                self.late.append(now - int(part[at + 11 : part.index(b'"', at + 11)]))
        if whole and whole[-1].endswith(b"data: [DONE]"):
            self.transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self.done.set()


async def load_streams(port: int, count: int, seconds: float) -> None:
    """Opens `count` streams, then measures for `seconds`, or until they end when that is 0."""
    loop = asyncio.get_running_loop()
    late: list[int] = []
    streams: list[Stream] = []
    for index in range(count):
        _, stream = await loop.create_connection(lambda: Stream(late), "127.0.0.1", port)
        streams.append(stream)
        if seconds and index % 20 == 19:
            await asyncio.sleep(0.04)
    if seconds:
        await asyncio.gather(*(stream.first.wait() for stream in streams))
        await asyncio.sleep(2.0)
    late.clear()
    print("measuring", flush=True)
    begun = time.monotonic()
    if seconds:
        await asyncio.sleep(seconds)
    else:
        await asyncio.gather(*(stream.done.wait() for stream in streams))
    late.sort()
    broken = sum(stream.done.is_set() for stream in streams) if seconds else 0
    result = {"chunks": len(late), "seconds": time.monotonic() - begun, "broken": broken}
    if late:
        result |= {"p50": late[len(late) // 2] / 1e6, "p99": late[int(len(late) * 0.99)] / 1e6}
    print(json.dumps(result), flush=True)
    os._exit(0)


class Asker(asyncio.Protocol):
    """One closed-loop client of small answers."""

    def __init__(self, taken: list[int], headers: bytes) -> None:
        self.taken = taken
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            b"application/json\r\n%scontent-length: %d\r\n\r\n" % (headers, len(_PLAIN)) + _PLAIN
        )
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.begun = time.monotonic_ns()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, split, rest = self.buffer.partition(b"\r\n\r\n")
        if not split:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not served: {self.buffer[:300]!r}")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(rest) >= length:
            self.taken.append(time.monotonic_ns() - self.begun)
            self.buffer = b""
            self.ask()


async def load_requests(port: int, count: int, seconds: float, key: str) -> None:
    loop = asyncio.get_running_loop()
    taken: list[int] = []
    headers = f"authorization: Bearer {key}\r\n".encode() if key else b""
    for _ in range(count):
        await loop.create_connection(lambda: Asker(taken, headers), "127.0.0.1", port)
    await asyncio.sleep(1.0)
    taken.clear()
    print("measuring", flush=True)
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - begun
    taken.sort()
    print(
        json.dumps(
            {
                "requests": len(taken),
                "seconds": elapsed,
                "p50": taken[len(taken) // 2] / 1e6,
                "p99": taken[int(len(taken) * 0.99)] / 1e6,
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)


async def serve_gateway(port: int, control: int) -> None:
    settings = Settings(host="127.0.0.1", port=0, control_port=0, pools=(parse_pool(f"p=127.0.0.1:{port}/{control}"),))
    await serve(settings, lambda _gateway, serving, _control: print(serving, flush=True))


PARTS = {
    "upstream": lambda chunks, gap, spread: upstream(int(chunks), float(gap), spread == "1"),
    "bare": lambda port: bare(int(port)),
    "gateway": lambda port, control: serve_gateway(int(port), int(control)),
    "streams": lambda port, count, seconds: load_streams(int(port), int(count), float(seconds)),
    "requests": lambda port, count, seconds, key: load_requests(int(port), int(count), float(seconds), key),
}

if __name__ == "__main__":
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(PARTS[sys.argv[1]](*sys.argv[2:]))
