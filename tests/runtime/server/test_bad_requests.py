"""Bad input gets a clear 4xx, the same with and without streaming, and harms nobody."""

import json
import random

import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "A"}]
# (endpoint, members besides a good request's, status, param of the error)
CASES = {
    "prompt missing": (COMPLETION, {"prompt": None}, 400, "prompt"),
    "prompt of another kind": (COMPLETION, {"prompt": 5}, 400, "prompt"),
    "prompt list empty": (COMPLETION, {"prompt": []}, 400, "prompt"),
    "prompt list mixed": (COMPLETION, {"prompt": ["a", 1]}, 400, "prompt"),
    "prompt list of booleans": (COMPLETION, {"prompt": [True]}, 400, "prompt"),
    "no ids": (COMPLETION, {"prompt": [[]]}, 400, "prompt[0]"),
    "id beyond the vocabulary": (COMPLETION, {"prompt": [1, 10**6]}, 400, "prompt"),
    "negative id": (COMPLETION, {"prompt": [1, -1]}, 400, "prompt"),
    "prompt longer than the context": (COMPLETION, {"prompt": [5] * 4096}, 400, "prompt"),
    "prompt and maximum longer than the context": (
        COMPLETION,
        {"prompt": [5] * 4000, "max_tokens": 200},
        400,
        "max_tokens",
    ),
    "text far longer than the context": (COMPLETION, {"prompt": "x" * 500_000}, 400, "prompt"),
    "messages missing": (CHAT, {"messages": None}, 400, "messages"),
    "messages of another type": (CHAT, {"messages": "hello"}, 400, "messages"),
    "messages empty": (CHAT, {"messages": []}, 400, "messages"),
    "message is no object": (CHAT, {"messages": ["hello"]}, 400, "messages[0]"),
    "unknown role": (CHAT, {"messages": [{"role": "wizard", "content": "A"}]}, 400, "messages[0].role"),
    "content missing": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "content part of another type": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0].type",
    ),
    "unknown model": (CHAT, {"model": "gpt-9"}, 404, "model"),
    "max_tokens negative": (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
    "max_tokens zero": (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    "max_completion_tokens zero": (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    "max_completion_tokens huge": (CHAT, {"max_completion_tokens": 10**9}, 400, "max_completion_tokens"),
    "two maxima that differ": (CHAT, {"max_completion_tokens": 5, "max_tokens": 50}, 400, "max_completion_tokens"),
    "max_tokens a float": (CHAT, {"max_tokens": 5.0}, 400, "max_tokens"),
    "max_tokens a boolean": (CHAT, {"max_tokens": True}, 400, "max_tokens"),
    "n zero": (CHAT, {"n": 0}, 400, "n"),
    "n huge": (CHAT, {"n": 10**30}, 400, "n"),
    "temperature a string": (CHAT, {"temperature": "0"}, 400, "temperature"),
    "temperature negative": (CHAT, {"temperature": -1}, 400, "temperature"),
    "temperature beyond counting": (CHAT, {"temperature": 10**400}, 400, "temperature"),
    "top_p above one": (CHAT, {"top_p": 1.5}, 400, "top_p"),
    "top_k a fraction": (CHAT, {"top_k": 0.01}, 400, "top_k"),
    "min_p above one": (CHAT, {"min_p": 2}, 400, "min_p"),
    "seed a string": (CHAT, {"seed": "x"}, 400, "seed"),
    "seed beyond 64 bits": (CHAT, {"seed": 2**64}, 400, "seed"),
    "logit_bias a list": (CHAT, {"logit_bias": [1]}, 400, "logit_bias"),
    "logit_bias beyond the vocabulary": (CHAT, {"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    "logit_bias too strong": (CHAT, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    "presence_penalty too strong": (CHAT, {"presence_penalty": 3}, 400, "presence_penalty"),
    "five stops": (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    "stop a number": (CHAT, {"stop": 5}, 400, "stop"),
    "stop_token_ids a string": (CHAT, {"stop_token_ids": "5"}, 400, "stop_token_ids"),
    "ignore_eos a number": (CHAT, {"ignore_eos": 1}, 400, "ignore_eos"),
    "min_tokens above the default maximum": (COMPLETION, {"min_tokens": 17, "max_tokens": None}, 400, "min_tokens"),
    "min_tokens above the context": (CHAT, {"min_tokens": 5000}, 400, "min_tokens"),
    "min_tokens beyond 64 bits": (CHAT, {"min_tokens": 10**30}, 400, "min_tokens"),
    "min_tokens above max_tokens": (CHAT, {"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
    "logprobs a number in chat": (CHAT, {"logprobs": 1}, 400, "logprobs"),
    "top_logprobs alone": (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
    "top_logprobs 21": (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "logprobs a boolean in completions": (COMPLETION, {"logprobs": True}, 400, "logprobs"),
    "logprobs 6 in completions": (COMPLETION, {"logprobs": 6}, 400, "logprobs"),
    "echo": (COMPLETION, {"echo": True}, 400, "echo"),
    "suffix": (COMPLETION, {"suffix": "end"}, 400, "suffix"),
    "best_of beyond n": (COMPLETION, {"best_of": 3}, 400, "best_of"),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    "response_format": (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format"),
    "audio": (CHAT, {"modalities": ["text", "audio"]}, 400, "modalities"),
    "lone surrogate in a prompt": (COMPLETION, {"prompt": "\ud83d"}, 400, "prompt"),
    "lone surrogate in a message": (
        CHAT,
        {"messages": [{"role": "user", "content": "a\udc00"}]},
        400,
        "messages[0].content",
    ),
    "lone surrogate in a stop": (CHAT, {"stop": "\ud83d"}, 400, "stop"),
    "stream_options of another type": (CHAT, {"stream_options": 1}, 400, "stream_options"),
}


def good(path):
    return {"prompt": "A", "max_tokens": 2} if path == COMPLETION else {"messages": MESSAGES}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_request_is_told_so_the_same_way_with_and_without_streaming(runtime, name):
    path, members, status, param = CASES[name]
    answers = [
        runtime.client.post(f"{runtime.url}{path}", content=json.dumps({**good(path), **members, "stream": stream}))
        for stream in (False, True)
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert error["type"] == "invalid_request_error" and error["message"] and error["code"]
        assert answer.headers["content-type"] == "application/json"
    assert answers[0].content == answers[1].content


def test_stream_must_be_a_boolean_and_stream_options_needs_it(runtime):
    assert runtime.chat(stream="true").json()["error"]["param"] == "stream"
    assert runtime.chat(stream_options={"include_usage": True}).json()["error"]["param"] == "stream_options"


def test_a_request_that_can_never_fit_is_told_both_numbers(runtime):
    message = runtime.completion(prompt=[5] * 4000, max_tokens=200).json()["error"]["message"]
    assert "4000" in message and "4200" in message and "4096" in message


def test_good_requests_are_served_after_two_hundred_that_were_too_long(runtime):
    for number in range(200):
        assert runtime.completion(prompt=[5] * 5000, stream=bool(number % 2)).status_code == 400
    assert runtime.completion(prompt="A", max_tokens=2).status_code == 200


@pytest.mark.parametrize("top_k", [2**31, 2**64, 10**30])
def test_a_top_k_beyond_any_vocabulary_is_all_of_it(runtime, top_k):
    """Such a number must not break the link to the engine: it carries the requests of everybody."""
    usual, odd = (runtime.completion(prompt="A", seed=1, max_tokens=4, **given) for given in ({}, {"top_k": top_k}))
    assert odd.status_code == 200, odd.text
    assert odd.json()["choices"] == usual.json()["choices"]


BODIES = {
    "not JSON": b"hello",
    "empty": b"",
    "not an object": b"[1]",
    "null": b"null",
    "trailing garbage": b'{"prompt": "A"} x',
    "duplicate keys": b'{"prompt": "A", "prompt": "B"}',
    "duplicate keys inside": b'{"prompt": "A", "foo": {"a": 1, "a": 2}}',
    "byte order mark": b'\xef\xbb\xbf{"prompt": "A"}',
    "UTF-16": '{"prompt": "A"}'.encode("utf-16"),
    "not UTF-8": b'{"prompt": "\xff"}',
    "NaN": b'{"prompt": "A", "temperature": NaN}',
    "Infinity": b'{"prompt": "A", "temperature": Infinity}',
    "beyond a double": b'{"prompt": "A", "temperature": 1e309}',
    "an endless integer": b'{"prompt": "A", "n": ' + b"9" * 10_000 + b"}",
    "deep nesting": b'{"prompt": "A", "foo": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep nesting, unclosed": b"[" * 20_000,
    "surrogate escape": b'{"prompt": "\\ud83d"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_not_one_plain_json_object_is_refused(runtime, name):
    answer = runtime.client.post(f"{runtime.url}{COMPLETION}", content=BODIES[name])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_null_is_unset_and_unknown_members_are_passed_over(runtime):
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":"A","name":"x","id":7},{"role":"assistant","content":""},'
        b'{"role":"user","content":[{"type":"text","text":"B"}]}],"stop":null,"seed":null,"stream_options":null,"tools":TOOLS,'
        b'"foo":{"bar":1},"n":null,"temperature":null,"max_tokens":null,"max_completion_tokens":3,"logprobs":null,"top_logprobs":null,'
        b'"logit_bias":null,"user":"someone","metadata":{"a":"b"},"response_format":{"type":"text"}}'
    )
    for tools in (b"null", b"[]"):
        answer = runtime.client.post(f"{runtime.url}{CHAT}", content=body.replace(b"TOOLS", tools))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 3
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert runtime.client.post(f"{runtime.url}{CHAT}", json={"messages": messages, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("priority", ["high", "1.5", "", "-9223372036854775808", "1e9", "99999999", "null"])
def test_absurd_priorities_are_refused(runtime, priority):
    answer = runtime.client.post(
        f"{runtime.url}{COMPLETION}", json=good(COMPLETION), headers={"x-headway-priority": priority}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-headway-priority")


def test_unknown_paths_and_methods_answer_in_the_same_shape(runtime):
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
    ]:
        answer = runtime.client.request(method, f"{runtime.url}{path}")
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert runtime.client.get(f"{runtime.url}/v1/models/tiny").json()["id"] == "tiny"


def test_random_bytes_never_cause_a_server_error(runtime):
    """Noise, and good bodies with bytes changed, cut out or doubled."""
    draw = random.Random(7)
    seeds = [
        json.dumps({**good(path), "temperature": 0.5, "stop": ["x"], "logprobs": None, "n": 1}).encode()
        for path in (CHAT, COMPLETION)
    ]
    statuses = set()
    for number in range(600):
        path = (CHAT, COMPLETION)[number % 2]
        body = bytearray(seeds[number % 2]) if number % 3 else bytearray(draw.randbytes(draw.randrange(200)))
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(body) + 1)
            body[at : at + draw.randrange(4)] = (
                draw.randbytes(draw.randrange(4))
                if draw.random() < 0.5
                else draw.choice(
                    [b'"', b"{", b"]", b",", b"null", b"-1", b"1e999", b"\\u0000", b"true", b"99999999999999999999"]
                )
            )
        statuses.add(runtime.client.post(f"{runtime.url}{path}", content=bytes(body)).status_code)
    assert statuses <= {200, 400, 404}
    assert 400 in statuses


def test_a_model_without_a_chat_template_says_so_and_completes_all_the_same(start_runtime, tiny_llama, tmp_path):
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    runtime = start_runtime(tmp_path)
    for stream in (False, True):
        answer = runtime.chat(stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
    assert runtime.completion(prompt="A", max_tokens=2).status_code == 200


def test_a_prompt_counts_its_begin_token_once_and_ids_are_left_as_they_are(runtime):
    def tokens(prompt):
        return runtime.completion(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"]

    assert tokens("A") == tokens("<s>A") == 2
    assert tokens([5, 6, 7]) == 3 and tokens([0, 0, 5]) == 3
    # The template of this model writes no begin token; in a message its name is text, three bytes of it.
    plain = runtime.chat("A", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert runtime.chat("<s>A", max_tokens=1).json()["usage"]["prompt_tokens"] == plain + 3
