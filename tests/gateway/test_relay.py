"""What passes between client and replica, byte for byte, and what never does."""

import asyncio
import gzip
import json

import pytest
from headway_core.contract import header_names

PIECES = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
    'data: {"choices":[{"index":0,"delta":{"content":"héllo \\u00e9 한국"}}]}\n\n'.encode(),
    b'data:{"choices":[{"index":0,"delta":{"content":"a"}}], "odd":  1}\n\n',
    b"event: ping\nid: 7\ndata: {}\n\n",
    b": somebody else's comment\n\n",
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n\r\n',
    b"data: [DONE]\n\n",
]


def streaming(wire, pieces, gap=0.0, headers=()):
    async def script(request, write):
        wire.begin(write, headers)
        for piece in pieces:
            wire.chunk(write, piece)
            await asyncio.sleep(gap)
        wire.end(write)

    return script


@pytest.mark.parametrize("cut", [1, 3, 17, 10_000])
async def test_a_stream_passes_byte_for_byte_however_it_is_cut(start_gateway, stub_runtime, wire, cut):
    text = b"".join(PIECES)
    stub = stub_runtime(script=streaming(wire, [text[start : start + cut] for start in range(0, len(text), cut)]))
    gateway = await start_gateway(stub)
    reply = await gateway.ask(stream=True)
    assert reply.body == text
    assert reply.header("content-type") == "text/event-stream"
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 1


async def test_an_unfinished_record_at_the_end_passes_too(start_gateway, stub_runtime, wire):
    stub = stub_runtime(script=streaming(wire, [PIECES[1], b'data: {"cho']))
    gateway = await start_gateway(stub)
    assert (await gateway.ask(stream=True)).body == PIECES[1] + b'data: {"cho'


async def test_the_request_body_reaches_the_runtime_unchanged_and_nothing_private_does(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    body = b'{ "model" : "m",\n "prompt":"caf\\u00e9 \xc3\xa9", "foo": {"bar": 1},"fop":2, "max_tokens":1 }'
    private = [
        ("authorization", "Bearer secret"),
        ("cookie", "a=b"),
        ("x-api-key", "secret"),
        ("x-headway-priority", "99"),
        ("x-headway-tenant", "victim"),
        ("x-headway-class", "vip"),
        ("x-headway-dispatch", "other:1"),
        ("accept-encoding", "gzip"),
        ("x-request-id", "mine-1"),
    ]
    reply = await gateway.ask(body, headers=private)
    assert reply.status == 200 and reply.all("x-request-id") == ["mine-1"]
    (seen,) = stub.requests
    assert seen.body == body
    assert seen.header("host") == f"127.0.0.1:{stub.port}"
    assert not {"authorization", "cookie", "x-api-key", header_names.TENANT} & {name for name, _ in seen.headers}
    assert seen.header(header_names.PRIORITY) == "0" and seen.header(header_names.CLASS) == "default"
    assert seen.header(header_names.DISPATCH) == f"{gateway.gateway.boot_id}:1"
    assert seen.header("accept-encoding") == "identity" and seen.header("x-request-id") == "mine-1"
    assert len({name for name, _ in seen.headers}) == len(seen.headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_connection_headers_stop_here_and_lengths_are_recomputed(start_gateway, stub_runtime, wire, stream):
    packed = gzip.compress(b'{"choices":[{"text":"a"}]}')
    scoped = [
        ("content-encoding", "gzip"),
        ("connection", "keep-alive, X-Foo"),
        ("x-foo", "1"),
        ("keep-alive", "timeout=5"),
        ("x-kept", "yes"),
        ("x-request-id", "theirs"),
        (header_names.LOAD, "{}"),
        (header_names.PROMPT_TOKENS, "7"),
    ]

    async def script(request, write):
        wire.answer(write, 200, packed, scoped, "text/event-stream" if stream else "application/json")

    gateway = await start_gateway(stub_runtime(script=script))
    reply = await gateway.ask(stream=stream)
    assert reply.body == packed and reply.header("content-encoding") == "gzip"
    assert reply.header("x-kept") == "yes"
    names = [name for name, _ in reply.headers]
    assert not {"x-foo", "keep-alive", header_names.LOAD, header_names.PROMPT_TOKENS} & set(names)
    assert names.count("x-request-id") == 1 and reply.header("x-request-id") != "theirs"
    assert names.count("content-length") + names.count("transfer-encoding") == 1
    assert names.count("date") == 1 and "server" not in names


async def test_an_error_to_a_stream_request_keeps_its_own_type_and_status(start_gateway, stub_runtime, wire):
    async def script(request, write):
        wire.answer(write, 400, b'{"error":{"message":"too long","code":"context_length_exceeded"}}')

    gateway = await start_gateway(stub_runtime(script=script))
    for stream in (False, True):
        reply = await gateway.ask(stream=stream)
        assert (reply.status, reply.header("content-type")) == (400, "application/json")
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    await gateway.settled()
    assert gateway.counters().outcomes["client_error"] == 2


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("cut", ["event", "line", "split"])
async def test_the_usage_comment_feeds_the_counters_and_never_the_client(start_gateway, stub_runtime, wire, asks, cut):
    comment = header_names.USAGE_COMMENT.encode() + b'{"prompt": 11, "cached": 4, "completion": 5}'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":5}}\n\n' if asks else b""
    wanted = PIECES[1] + usage + b"data: [DONE]\n\n"
    whole = {
        "event": PIECES[1] + usage + comment + b"\n\ndata: [DONE]\n\n",
        "line": PIECES[1] + usage + comment + b"\ndata: [DONE]\n\n",
        "split": PIECES[1] + usage + b"data: [DONE]\n\n" + comment + b"\n\n",
    }[cut]
    pieces = [whole[start : start + 5] for start in range(0, len(whole), 5)] if cut == "split" else [whole]
    gateway = await start_gateway(stub_runtime(script=streaming(wire, pieces)))
    reply = await gateway.ask(stream=True, stream_options={"include_usage": asks})
    assert reply.body == wanted
    await gateway.settled()
    assert (gateway.counters().prompt_tokens, gateway.counters().output_tokens) == (11, 5)


async def test_text_that_looks_like_the_comment_is_content(start_gateway, stub_runtime, wire):
    tricky = (
        b'data: {"choices":[{"text":"\\n: headway {\\"prompt\\": 1}"}]}\n\n'
        + b'data: {"choices":[{"text":": headway "}]}\n\n'
    )
    gateway = await start_gateway(stub_runtime(script=streaming(wire, [tricky])))
    assert (await gateway.ask(stream=True)).body == tricky


async def test_nothing_goes_out_before_content_until_the_hold_is_spent(start_gateway, stub_runtime, wire):
    more, release = asyncio.Event(), asyncio.Event()
    empty = wire.record({"choices": [{"index": 0, "delta": {}}]})

    async def script(request, write):
        wire.begin(write)
        wire.chunk(write, PIECES[0])
        await more.wait()
        wire.chunk(write, empty)
        await release.wait()
        wire.chunk(write, PIECES[1])
        wire.chunk(write, PIECES[-1])
        wire.end(write)

    gateway = await start_gateway(stub_runtime(script=script), first_byte_hold=0.3)
    async with gateway.client() as client:
        client.send(
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}, "/v1/chat/completions"
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.head(), 0.15)
        status, _ = await client.head()
        assert status == 200
        assert await client.piece() == PIECES[0]
        kept = [await client.piece(), await client.piece()]
        # A comment line that ends no record: no client sees an empty one.
        assert all(piece.startswith(b":") and piece.count(b"\n") == 1 for piece in kept)
        more.set()
        while (piece := await client.piece()) in kept:
            pass
        # Once begun, what the runtime itself says to keep the connection alive passes at once.
        assert piece == empty
        release.set()
        rest = b""
        while piece := await client.piece():
            rest += piece
        assert rest.replace(kept[0], b"") == PIECES[1] + PIECES[-1]


async def test_pieces_that_arrive_together_leave_together(start_gateway, stub_runtime, wire):
    go = asyncio.Event()

    async def script(request, write):
        wire.begin(write)
        wire.chunk(write, PIECES[1])
        await go.wait()
        together = []
        for _ in range(50):
            wire.chunk(together.append, PIECES[2])
        write(b"".join(together))
        await asyncio.sleep(0.05)
        wire.end(write)

    gateway = await start_gateway(stub_runtime(script=script))
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True})
        await client.head()
        assert await client.piece() == PIECES[1]
        go.set()
        assert await client.piece() == PIECES[2] * 50


async def test_a_replica_that_breaks_off_after_content_ends_the_stream_with_an_error_record(
    start_gateway, stub_runtime, wire
):
    async def script(request, write):
        wire.begin(write)
        wire.chunk(write, PIECES[1] + b'data: {"cut')
        await asyncio.sleep(0.05)
        return "close"

    stubs = [stub_runtime("a", script=script), stub_runtime("b", script=script)]
    gateway = await start_gateway(*stubs)
    reply = await gateway.ask(stream=True)
    assert reply.status == 200
    first, error, rest = reply.body.split(b"\n\n")
    assert first + b"\n\n" == PIECES[1] and rest == b""
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
    assert len(stubs[0].requests) + len(stubs[1].requests) == 1
    await gateway.settled()
    assert gateway.counters().outcomes["upstream_error"] == 1


async def test_an_error_record_of_the_runtime_counts_as_its_failure(start_gateway, stub_runtime, wire):
    failed = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    gateway = await start_gateway(stub_runtime(script=streaming(wire, [PIECES[1], failed])))
    assert (await gateway.ask(stream=True)).body == PIECES[1] + failed
    await gateway.settled()
    assert gateway.counters().outcomes["upstream_error"] == 1


async def test_an_answer_that_is_not_http_is_the_replica_s_failure(start_gateway, stub_runtime):
    async def script(request, write):
        write(b"HTTP/1.1 200 OK\r\nx-broken: a\x01b\r\ncontent-length: 2\r\n\r\n{}")

    gateway = await start_gateway(*[stub_runtime(name, script=script) for name in "ab"])
    assert (await gateway.ask()).status == 502
    await gateway.settled()
    assert gateway.counters().outcomes["upstream_error"] == 1


async def test_an_answer_without_a_length_ends_with_its_connection(start_gateway, stub_runtime, wire):
    async def script(request, write):
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + PIECES[1])
        await asyncio.sleep(0.02)
        write(PIECES[-1])
        return "close"

    gateway = await start_gateway(stub_runtime(script=script))
    for _ in range(3):
        assert (await gateway.ask(stream=True)).body == PIECES[1] + PIECES[-1]
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 3


async def http_1_0(gateway, method, path, body=b""):
    async with gateway.client() as client:
        client.writer.write(
            b"%s %s HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (method, path, len(body), body)
        )
        status, headers = await client.head()
        # The body ends with the connection.
        return status, dict(headers), await asyncio.wait_for(client.reader.read(), 10)


async def test_a_client_of_http_1_0_gets_no_chunks(start_gateway, stub_runtime, wire):
    stub = stub_runtime(script=streaming(wire, PIECES, gap=0.02))
    gateway = await start_gateway(stub, first_byte_hold=0.01)
    body = b'{"model":"m","prompt":"x","stream":true}'
    status, headers, answer = await http_1_0(gateway, b"POST", b"/v1/completions", body)
    assert status == 200 and headers["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & set(headers)
    assert answer.replace(b": waiting for the first token\n", b"") == b"".join(PIECES)
    stub.script = None
    status, headers, answer = await http_1_0(gateway, b"POST", b"/v1/completions", body.replace(b"true", b"false"))
    assert status == 200 and int(headers["content-length"]) == len(answer) and b"w0" in answer
    status, headers, answer = await http_1_0(gateway, b"GET", b"/v1/models")
    assert status == 200 and int(headers["content-length"]) == len(answer)
    status, headers, answer = await http_1_0(gateway, b"POST", b"/v1/completions", b"{")
    assert status == 400 and int(headers["content-length"]) == len(answer)
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 2


async def test_two_pipelined_requests_on_one_connection_both_complete(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), keep_alive=0.2)
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x", "stream": True, "stub": {"tokens": 3, "gap": 0.3}})
        client.send({"model": "m", "prompt": "y", "max_tokens": 2})
        first, second = await client.reply(), await client.reply()
    assert first.body.endswith(b"data: [DONE]\n\n") and second.json()["choices"][0]["text"] == "w0 w1 "


async def test_an_idle_connection_is_closed_only_after_its_time(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), keep_alive=0.5)
    async with gateway.client() as client:
        for _ in range(3):
            client.send({"model": "m", "prompt": "x"})
            assert (await client.reply()).status == 200
            await asyncio.sleep(0.2)
        assert await asyncio.wait_for(client.reader.read(), 10) == b""


async def test_one_client_id_on_many_live_requests_mixes_nothing_up(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)

    async def one(index):
        async with gateway.client() as client:
            client.send(
                {"model": "m", "prompt": f"{index}", "stream": True, "stub": {"tokens": index + 2, "gap": 0.05}},
                headers=[("x-request-id", "id")],
            )
            await client.head()
            if index % 2:
                return None
            body = b""
            while piece := await client.piece():
                body += piece
            return body.count(b'"text": "w')

    counts = await asyncio.gather(*(one(index) for index in range(20)))
    assert [count for count in counts if count is not None] == [index + 2 for index in range(0, 20, 2)]
    await gateway.settled()
    assert gateway.counters().offered == 20


@pytest.mark.parametrize("given", ["i" * 60_000, "a b", "\u00e9", '"><script>', ""])
async def test_an_odd_client_id_is_replaced_and_never_echoed(start_gateway, stub_runtime, given):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    reply = await gateway.ask(headers=[("x-request-id", given)])
    assert reply.status == 200
    assert len(reply.header("x-request-id")) <= 128 and reply.header("x-request-id").startswith("req-")
    assert stub.requests[0].header("x-request-id") == reply.header("x-request-id")


async def test_a_null_byte_in_a_client_id_is_refused_and_harms_nobody(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    async with gateway.client() as client:
        client.send({"model": "m", "prompt": "x"}, headers=[("x-request-id", "a\x00b")])
        status, headers = await client.head()
        assert status == 400 and ("connection", "close") in headers
    assert stub.requests == [] and (await gateway.ask()).status == 200


async def test_a_head_without_end_is_cut_off(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    async with gateway.client() as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nx-long: ")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # noqa: PT012 - the answer may be lost to the reset
            for _ in range(100):
                client.writer.write(b"a" * 10_000)
                await client.writer.drain()
            assert b" 431 " in await client.reader.readuntil(b"\r\n\r\n")
            raise ConnectionError
    assert (await gateway.ask()).status == 200
