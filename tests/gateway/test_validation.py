"""Bad requests: a clear 4xx, the same with and without streaming, and no trace on anybody's health."""

import json

import pytest
from fastapi import FastAPI
from headway_core.errors import RequestError
from headway_gateway import parsed_request
from headway_runtime.server.api.generation_request import parse_chat, parse_completion

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "A"}]

BAD = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 65, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": [[1]] * 129}, "n"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**80]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": "\ud83d"}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "service_tier": 1}, "service_tier"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": USER, "max_completion_tokens": 5, "max_tokens": 50}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
]

BAD_BYTES = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"model":"m","prompt":"x"} trailing',
    b'\xef\xbb\xbf{"model":"m","prompt":"x"}',
    b'{"model":"m","prompt":"x","temperature":NaN}',
    b'{"model":"m","prompt":"x","temperature":-Infinity}',
    b'{"model":"m","prompt":"\xff"}',
    '{"model":"m","prompt":"x"}'.encode("utf-16"),
    b'{"model":"m","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"model":"x","model":"m","prompt":""}',
    b'{"model":null,"prompt":"x"}',
    b'{"model":["m"],"prompt":"x"}',
    b'{"model":"","prompt":"x"}',
    b'{"model":"m","prompt":"x","stream":"true"}',
    b'{"model":"m","prompt":"x","max_tokens":' + b"9" * 5_000 + b"}",
]


async def test_bad_requests_get_the_same_400_with_and_without_streaming(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    for path, members, field in BAD:
        answers = []
        for stream in (False, True, None):
            reply = await gateway.ask({"model": "m", "stream": stream, **members}, path)
            assert reply.status == 400, (members, reply)
            error = reply.json()["error"]
            assert error["param"] == field and error["type"] == "invalid_request_error" and error["code"], (
                members,
                error,
            )
            answers.append(reply.body)
        assert len(set(answers)) == 1
    assert stub.requests == []


@pytest.mark.parametrize(("path", "members", "field"), [case for case in BAD if case[-1] != "service_tier"])
def test_gateway_and_runtime_give_the_same_fault_the_same_code(path, members, field):
    body = {"model": "m", **members}
    with pytest.raises(RequestError) as at_the_gateway:
        parsed_request.parse(parsed_request.ApiRoute(path), json.dumps(body).encode())
    with pytest.raises(RequestError) as at_the_runtime:
        (parse_chat if path == CHAT else parse_completion)(body)
    given = list(members.values())[-1] if members else None
    code = at_the_gateway.value.code
    assert code == at_the_runtime.value.code
    assert at_the_gateway.value.field == field and at_the_runtime.value.field.startswith(field)
    # By the JSON type, not by the rule that it breaks.
    if not members:
        assert code == "missing_required_parameter"
    if type(given) is int and field != "prompt":
        assert code == "invalid_value"


async def test_absurd_bytes_never_become_a_server_error(start_gateway, stub_runtime):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    for body in BAD_BYTES:
        for path in (COMPLETIONS, CHAT):
            reply = await gateway.ask(body, path)
            assert reply.status == 400, (body[:60], reply)
            assert reply.json()["error"]["message"]
    assert (await gateway.ask()).status == 200
    assert len(stub.requests) == 1


async def test_every_valid_odd_body_is_taken(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    valid = [
        (
            CHAT,
            b'{"model":"m","messages":[{"role":"user","content":"A","name":"x","id":7},{"role":"assistant","content":""},'
            b'{"role":"user","content":[{"type":"text","text":"B"}]}],"stop":null,"seed":null,"stream_options":null,"tools":null,"foo":{"bar":1}}',
        ),
        (
            CHAT,
            b'{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"a"}]},{"role":"user","content":"x"}]}',
        ),
        (
            CHAT,
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_completion_tokens":null,"max_tokens":5,"n":null}',
        ),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_completion_tokens":5,"max_tokens":5}'),
        (COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":0}'),
        (COMPLETIONS, b'{"model":"m","prompt":[1,2,3]}'),
        (COMPLETIONS, b'{"model":"m","prompt":[[1,2],[3]]}'),
        (COMPLETIONS, b'{"model":"m","prompt":["a","b"]}'),
        (COMPLETIONS, '{"model":"m","prompt":"\U0001f468\u200d\U0001f469 \\ud83d\\ude00"}'.encode()),
        (COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":1000000000,"stub":{"tokens":2}}'),
    ]
    for path, body in valid:
        reply = await gateway.ask(body, path)
        assert reply.status == 200, (body, reply)


async def test_an_unknown_model_is_404_and_names_the_known(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    for stream in (False, True):
        reply = await gateway.ask(model="gpt-9", stream=stream)
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "served here: m" in error["message"]
    assert gateway.gateway.pools.unclassified.outcomes["client_error"] == 2


async def test_a_stranger_s_path_or_method_gets_an_openai_error(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions/", 405),
        ("PURGE", "/v1/models", 405),
        ("POST", "/metrics", 404),
    ):
        reply = await gateway.ask(b"", path, method=method)
        assert reply.status == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_completions_go_past_the_web_framework(start_gateway, stub_runtime, monkeypatch):
    through = []
    served = FastAPI.__call__

    async def seen(app, scope, receive, send):
        through.append(scope["path"])
        await served(app, scope, receive, send)

    gateway = await start_gateway(stub_runtime())
    monkeypatch.setattr(FastAPI, "__call__", seen)
    assert (await gateway.ask()).status == (await gateway.get("/v1/models")).status == 200
    assert through == ["/v1/models"]


async def test_a_slash_at_the_end_of_a_path_changes_nothing(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    reply = await gateway.ask({"model": "m", "messages": USER, "max_tokens": 1}, CHAT + "/")
    assert reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == "w0 "
    assert (await gateway.ask(path=COMPLETIONS + "/", stream=True)).body.endswith(b"data: [DONE]\n\n")
    assert (await gateway.get("/v1/models/")).json() == (await gateway.get("/v1/models")).json()
    # Nowhere else is somebody sent on with a redirect, which no client follows with a body.
    reply = await gateway.ask(b"", "/status.json/", method="POST")
    assert (reply.status, reply.json()["error"]["message"]) == (404, "no such path")


async def test_client_errors_never_count_against_a_replica(start_gateway, stub_runtime, wire):
    async def too_long(request, write):
        wire.answer(write, 400, b'{"error":{"message":"too long","code":"context_length_exceeded"}}')

    a, b = stub_runtime("a", script=too_long), stub_runtime("b", script=too_long)
    gateway = await start_gateway(a, b)
    for number in range(200):
        assert (await gateway.ask(stream=bool(number % 2))).status == 400
    # One try each, nobody ejected, and the next good request is served at once.
    assert len(a.requests) + len(b.requests) == 200
    a.script = b.script = None
    assert (await gateway.ask()).status == 200
    await gateway.settled()
    assert gateway.counters().outcomes["client_error"] == 200


@pytest.mark.parametrize("value", [{"prompt": "secret " * 100}, ["secret"] * 3])
async def test_an_error_does_not_repeat_the_prompt(start_gateway, stub_runtime, value):
    gateway = await start_gateway(stub_runtime())
    reply = await gateway.ask(json.dumps({"model": "m", "prompt": "x", "stream": value}).encode())
    assert reply.status == 400 and b"secret" not in reply.body


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_replica_can_hold_is_not_told_to_come_back(start_gateway, stub_runtime, stream):
    """The stubs are so slow that the admission sheds whatever is long; only what fits some time may be told so."""
    stub = stub_runtime(prefill_rate=1.0)
    gateway = await start_gateway(stub)
    longest = stub.report().limits.max_model_len
    too_long = [[5] * longest, [[5], [5] * longest]]
    for prompt in too_long:
        reply = await gateway.ask(stream=stream, prompt=prompt)
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    late = await gateway.ask(stream=stream, prompt=[5] * (longest - 1), max_tokens=1)
    assert late.status == 429
    assert "ahead" not in late.json()["error"]["message"], "nobody is ahead of it: its own tokens are too many"
    assert gateway.gateway.pools.unclassified.outcomes["client_error"] == len(too_long)
    await gateway.settled()
