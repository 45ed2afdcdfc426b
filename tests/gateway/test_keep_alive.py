"""Kept connections that close just as the next request goes out, on either side of the gateway: no request is lost, and
none done twice."""

import asyncio
import itertools
import json
import socket
import threading
import time

import uvicorn
from headway_core.contract.policy import Pool
from headway_edge.client_connection import ClientConnection
from headway_gateway import upstream
from uvicorn.server import ServerState

IDLE = 0.05
"""Seconds that a server keeps an idle connection."""
LANES, TRIES = 4, 125
OFFSETS = [step / 1000 for step in range(-5, 6)]
"""From 5 ms before the connection closes to 5 ms after."""


def pauses():
    return [IDLE + offset for offset in itertools.islice(itertools.cycle(OFFSETS), TRIES)]


class HastyServer:
    """An HTTP server in a thread of its own, with the runtime's own connections, that closes idle ones after `IDLE`."""

    def __init__(self):
        self.answered = self.connections = 0
        self.port = None
        self._listens = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self._listens.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._serve())
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        self._loop.run_forever()
        server.close()

    async def _serve(self):
        quiet = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
        config = uvicorn.Config(self._app, interface="asgi3", timeout_keep_alive=IDLE, **quiet)
        config.load()
        state = ServerState()

        def connection():
            self.connections += 1
            return ClientConnection(config=config, server_state=state, app_state={})

        return await self._loop.create_server(connection, "127.0.0.1", 0)

    async def _app(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.answered += 1
        body = json.dumps(
            {"choices": [{"index": 0, "text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        ).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def test_no_request_fails_where_the_replica_closes_just_as_it_is_sent(
    start_gateway, stub_runtime, until, monkeypatch
):
    """The gateway would keep its connections for longer here, so it is always the replica that closes them."""
    monkeypatch.setattr(upstream, "POOL_IDLE", 60.0)
    hasty, stubs, pools = [HastyServer() for _ in range(LANES)], [], []
    for number, server in enumerate(hasty):
        stub = await stub_runtime(f"stub-{number}", model=f"m{number}").start()
        server.__enter__()
        stubs.append(stub)
        stub.port = server.port  # Its reports are the stub's, its answers the hasty server's.
        pools.append(Pool(f"p{number}", (stub.endpoint,), f"m{number}"))
    try:
        gateway = await start_gateway(ready=False, pools=tuple(pools))
        await until(lambda: all(pool.ready(asyncio.get_running_loop().time()) for pool in gateway.gateway.pools))

        async def lane(number):
            statuses = []
            async with gateway.client() as client:
                for pause in pauses():
                    client.send({"model": f"m{number}", "prompt": "x"})
                    statuses.append((await client.reply()).status)
                    await asyncio.sleep(pause)
            return statuses

        statuses = await asyncio.gather(*(lane(number) for number in range(LANES)))
        await gateway.settled()
    finally:
        for server, stub in zip(hasty, stubs, strict=True):
            server.__exit__()
            await stub.kill()
    assert statuses == [[200] * TRIES] * LANES
    assert [server.answered for server in hasty] == [TRIES] * LANES, "a request was done twice"
    # The edge was met from both sides: some found the connection still open, some did not.
    assert 0.05 * TRIES * LANES < sum(server.connections for server in hasty) < 0.95 * TRIES * LANES


def ask_again_and_again(port, tries):
    """A client that keeps its connection and, as HTTP has it, asks again when that was closed before a byte of the
    answer came.

    Returns how many of the requests met a closed connection.
    """
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    closed, sock = 0, socket.create_connection(("127.0.0.1", port))
    for pause in tries:
        answer = answer_to(sock, request)
        if answer == b"":
            closed += 1
            sock.close()
            sock = socket.create_connection(("127.0.0.1", port))
            answer = answer_to(sock, request)
        assert answer.startswith(b"HTTP/1.1 200") and b"w0" in answer, answer
        time.sleep(pause)
    sock.close()
    return closed


def answer_to(sock, request):
    """The whole answer; nothing when the connection was closed before its first byte."""
    data = b""
    sock.settimeout(30)
    try:
        sock.sendall(request)
        while b"\r\n\r\n" not in data or len(data) < announced(data):
            part = sock.recv(65536)
            if not part:
                break
            data += part
    except (BrokenPipeError, ConnectionResetError):
        pass
    return data


def announced(data):
    """Bytes of the whole answer, as its head says."""
    head, _, _ = data.partition(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(head) + 4 + int(length.split(b":")[1])


async def test_a_request_that_meets_the_closing_of_its_connection_was_not_begun(start_gateway, stub_runtime):
    """Then a client may ask again on a new one, and each is answered and counted once."""
    gateway = await start_gateway(stub_runtime(), keep_alive=IDLE)
    closed = await asyncio.gather(
        *(asyncio.to_thread(ask_again_and_again, gateway.port, pauses()) for _ in range(LANES))
    )
    await gateway.settled()
    assert 0.05 * TRIES * LANES < sum(closed) < 0.95 * TRIES * LANES, "the edge is to be met from both sides"
    assert gateway.counters().offered == gateway.counters().outcomes["ok"] == TRIES * LANES
    assert gateway.gateway.pools.unclassified.offered == 0


async def test_a_slow_upload_on_a_kept_connection_is_no_idle_time(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), keep_alive=0.1)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
    async with gateway.client() as client:
        for _ in range(2):
            client.send(body[:5], length=len(body))
            for byte in range(5, len(body), 10):
                await asyncio.sleep(0.15)
                client.writer.write(body[byte : byte + 10])
            assert (await client.reply()).status == 200
