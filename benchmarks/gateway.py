"""What the gateway costs: CPU per relayed chunk beside a bare byte relay, added latency, requests per core beside a peer, streams held.

    python benchmarks/gateway.py chunks            100 streams, one chunk each every 20 ms, all at the same instant
    python benchmarks/gateway.py requests          small JSON answers; --litellm PATH/TO/bin/litellm adds the peer
    python benchmarks/gateway.py held              more and more streams, one chunk each per second

Every part runs in a process of its own: a scripted runtime, the relay under test, and the load. Only the relay's CPU time is counted. The
baseline of each table is measured in the same run; compare ratios, the machine is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import uvloop
from headway_core import contract
from headway_core.contract import Capacity, Knobs, ReplicaState, RuntimeReport
from headway_gateway.server import serve
from headway_gateway.settings import Settings, parse_pool

MODEL = "m"
_BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
_PLAIN = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
_RECORD = b'data: {"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n'
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
            if b'"stream": true' in body or b'"stream":true' in body:
                self.transport.write(_STREAM_HEAD)
                self.left = self.chunks
                self.streams.add(self)
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER) + _ANSWER
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
    """The load report of a runtime that has room for everybody."""

    seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, _data: bytes) -> None:
        Control.seq += 1
        many = 1_000_000
        report = RuntimeReport(
            replica="bench",
            pool="p",
            model=MODEL,
            boot_id="b",
            seq=Control.seq,
            at=time.time(),
            state=ReplicaState.READY,
            capacity=Capacity(many, 8192, 131_072, 16, many),
            effective=Knobs(many, 8192),
            free_slots=many,
            free_blocks=many,
            prefill_rate=1e9,
            completion_rate=1e6,
            iteration_seconds=0.001,
            dispatched={},
        )
        body = contract.dump(report).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def upstream(chunks: int, gap: float, spread: bool) -> None:
    """`spread`: the streams' chunks are spread over the gap; otherwise all come at the same instant, as tokens of one engine step do."""
    loop = asyncio.get_running_loop()
    serving = await loop.create_server(lambda: Upstream(chunks), "127.0.0.1", 0, backlog=20_000)
    control = await loop.create_server(Control, "127.0.0.1", 0)
    print(*(server.sockets[0].getsockname()[1] for server in (serving, control)), flush=True)
    slots = 100 if spread else 1
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
            self.opening = loop.create_task(loop.create_connection(lambda: Pipe(self.port, self), "127.0.0.1", self.port))
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

    def __init__(self, late: list[int], done: asyncio.Event) -> None:
        self.late = late
        self.done = done
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % len(_BODY) + _BODY)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
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
    ends: list[asyncio.Event] = []
    for index in range(count):
        ends.append(asyncio.Event())
        await loop.create_connection(lambda end=ends[-1]: Stream(late, end), "127.0.0.1", port)
        if index % 100 == 99:
            await asyncio.sleep(0.02)
    if seconds:
        await asyncio.sleep(2.0)
        late.clear()
        begun = time.monotonic()
        await asyncio.sleep(seconds)
    else:
        begun = time.monotonic()
        await asyncio.gather(*(end.wait() for end in ends))
    late.sort()
    result = {"chunks": len(late), "seconds": time.monotonic() - begun, "broken": sum(end.is_set() for end in ends) if seconds else 0}
    if late:
        result |= {"p50": late[len(late) // 2] / 1e6, "p99": late[int(len(late) * 0.99)] / 1e6}
    print(json.dumps(result), flush=True)
    os._exit(0)


class Asker(asyncio.Protocol):
    """One closed-loop client of small answers."""

    def __init__(self, taken: list[int], headers: bytes) -> None:
        self.taken = taken
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
            % (headers, len(_PLAIN))
            + _PLAIN
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
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - begun
    taken.sort()
    print(
        json.dumps(
            {"requests": len(taken), "seconds": elapsed, "p50": taken[len(taken) // 2] / 1e6, "p99": taken[int(len(taken) * 0.99)] / 1e6}
        )
    )
    sys.stdout.flush()
    os._exit(0)


# ---------------------------------------------------------------- putting a run together


@contextlib.contextmanager
def process(*command: object) -> Iterator[tuple[psutil.Process, list[int]]]:
    """A part in a process of its own, once it has printed its ports."""
    running = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    try:
        yield psutil.Process(running.pid), [int(word) for word in running.stdout.readline().split()]
    finally:
        running.terminate()
        running.wait()


def part(*arguments: object) -> tuple[object, ...]:
    return (sys.executable, __file__, "--part", *arguments)


@contextlib.contextmanager
def gateway(ports: list[int]) -> Iterator[tuple[psutil.Process, int]]:
    with process(sys.executable, __file__, "--part", "gateway", *ports) as (running, (port,)):
        time.sleep(1.0)
        yield running, port


async def serve_gateway(port: int, control: int) -> None:
    settings = Settings(host="127.0.0.1", port=0, control_port=0, pools=(parse_pool(f"p=127.0.0.1:{port}/{control}"),))
    await serve(settings, lambda _gateway, serving, _control: print(serving, flush=True))


def measured(relay: psutil.Process | None, *load: object) -> dict[str, float]:
    before = sum(relay.cpu_times()[:2]) if relay else 0.0
    done = subprocess.run([str(word) for word in part(*load)], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    result["cpu"] = (sum(relay.cpu_times()[:2]) if relay else 0.0) - before
    result["rss"] = relay.memory_info().rss / 2**20 if relay else 0.0
    return result


def chunks(rounds: int, each: int) -> None:
    """CPU per chunk and added latency, synchronised streams; the arms alternate."""
    streams = 100
    print(f"{streams} streams x {each} chunks every 20 ms, all at the same instant; {rounds} rounds, arms alternating\n")
    print("| relay | chunks/s | p50 / p99 ms | added p50 / p99 ms | CPU us per chunk | over bare |")
    print("|---|---|---|---|---|---|")
    sums: dict[str, list[dict[str, float]]] = {"none": [], "bare": [], "gateway": []}
    with contextlib.ExitStack() as stack:
        _, ports = stack.enter_context(process(*part("upstream", each, 0.02, 0)))
        bare_process, (bare_port,) = stack.enter_context(process(*part("bare", ports[0])))
        gateway_process, gateway_port = stack.enter_context(gateway(ports))
        for _ in range(rounds + 1):
            sums["none"].append(measured(None, "streams", ports[0], streams, 0))
            sums["bare"].append(measured(bare_process, "streams", bare_port, streams, 0))
            sums["gateway"].append(measured(gateway_process, "streams", gateway_port, streams, 0))
    costs = {}
    for arm, (_, *results) in sums.items():  # the first round warms up
        count = sum(result["chunks"] for result in results)
        rate = count / sum(result["seconds"] for result in results)
        p50, p99 = (sorted(result[name] for result in results)[len(results) // 2] for name in ("p50", "p99"))
        if arm == "none":
            direct = (p50, p99)
        costs[arm] = sum(result["cpu"] for result in results) / count * 1e6
        ratio = f"{costs[arm] / costs['bare']:.2f}" if arm != "none" else ""
        added = "" if arm == "none" else f"{p50 - direct[0]:.2f} / {p99 - direct[1]:.2f}"
        cost = "" if arm == "none" else f"{costs[arm]:.0f}"
        print(f"| {arm} | {rate:.0f} | {p50:.2f} / {p99:.2f} | {added} | {cost} | {ratio} |")


def requests(litellm: Path | None, seconds: float) -> None:
    """Small JSON answers, closed loop: requests per second of one core."""
    connections = 32
    print(f"{connections} connections, closed loop, {seconds:g} s each\n")
    print("| relay | requests/s | requests per CPU-second | p50 / p99 ms | CPU us per request |")
    print("|---|---|---|---|---|")
    with process(*part("upstream", 1, 1.0, 0)) as (_, ports):
        with process(*part("bare", ports[0])) as (running, (port,)):
            _request_row("bare", measured(running, "requests", port, connections, seconds, ""))
        with gateway(ports) as (running, port):
            _request_row("gateway", measured(running, "requests", port, connections, seconds, ""))
        if litellm is not None:
            with peer(litellm, ports[0]) as (running, port):
                _request_row("litellm proxy", measured(running, "requests", port, connections, seconds, "sk-bench-1234"))


def _request_row(name: str, result: dict[str, float]) -> None:
    rate, per_cpu = result["requests"] / result["seconds"], result["requests"] / result["cpu"]
    print(f"| {name} | {rate:.0f} | {per_cpu:.0f} | {result['p50']:.2f} / {result['p99']:.2f} | {1e6 / per_cpu:.0f} |")


@contextlib.contextmanager
def peer(litellm: Path, upstream_port: int) -> Iterator[tuple[psutil.Process, int]]:
    """litellm's proxy with one worker, before the same scripted runtime."""
    port = 4519
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "x"},
            }
        ],
        "general_settings": {"master_key": "sk-bench-1234"},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))
        command = [
            str(litellm),
            "--config",
            str(file),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--num_workers",
            "1",
            "--telemetry",
            "False",
        ]
        running = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "LITELLM_LOG": "ERROR"}
        )
        try:
            _until_listening(port)
            yield psutil.Process(running.pid), port
        finally:
            running.terminate()
            running.wait()


def _until_listening(port: int) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            time.sleep(2.0)
            return
        time.sleep(0.5)
    raise SystemExit("litellm did not start")


def held(seconds: float) -> None:
    """Streams held at once: one chunk per second each, spread over the second, until the median latency doubles."""
    print("one chunk per second and stream, spread over the second\n")
    print("| streams | relay | chunks/s | p50 / p99 ms | CPU of one core | memory MiB |")
    print("|---|---|---|---|---|---|")
    with process(*part("upstream", 100_000, 1.0, 1)) as (_, ports):
        for count in (100, 1_000, 2_500, 5_000, 7_500, 10_000):
            for arm in ("bare", "gateway"):
                made = process(*part("bare", ports[0])) if arm == "bare" else gateway(ports)
                with made as (running, port):
                    result = measured(running, "streams", port if isinstance(port, int) else port[0], count, seconds)
                rate = result["chunks"] / result["seconds"]
                # The CPU of opening the streams is in it too, so this is an upper bound.
                share = result["cpu"] / (result["seconds"] + 2.0 + count / 5_000)
                broken = f" ({result['broken']} broken)" if result["broken"] else ""
                print(
                    f"| {count}{broken} | {arm} | {rate:.0f} | {result.get('p50', 0):.2f} / {result.get('p99', 0):.2f} | {share:.0%} "
                    f"| {result['rss']:.0f} |",
                    flush=True,
                )
                time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chunks", "requests", "held"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=64, help="chunks per stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--litellm", type=Path)
    given = parser.parse_args()
    if given.what == "chunks":
        chunks(given.rounds, given.each)
    elif given.what == "requests":
        requests(given.litellm, given.seconds)
    else:
        held(given.seconds)


PARTS = {
    "upstream": lambda chunks, gap, spread: upstream(int(chunks), float(gap), spread == "1"),
    "bare": lambda port: bare(int(port)),
    "gateway": lambda port, control: serve_gateway(int(port), int(control)),
    "streams": lambda port, count, seconds: load_streams(int(port), int(count), float(seconds)),
    "requests": lambda port, count, seconds, key: load_requests(int(port), int(count), float(seconds), key),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (65_536, 65_536))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(PARTS[sys.argv[2]](*sys.argv[3:]))
    else:
        main()
