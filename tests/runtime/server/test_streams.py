"""Streams as SDKs and proxies read them: framing, usage, finish reasons, log-probabilities, and the same text as
without streaming."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def body_of(path, **members):
    start = (
        {"prompt": "hello world"} if path == COMPLETION else {"messages": [{"role": "user", "content": "hello world"}]}
    )
    return {**start, "max_tokens": 12, "seed": 5, **members}


def text_of(choice):
    return choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))["content"] or ""


def joined(records, index=0):
    choices = [choice for record in records for choice in record["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_record_is_one_json_object_and_done_is_last(runtime, path):
    with runtime.client.stream("POST", f"{runtime.url}{path}", json=body_of(path, stream=True)) as response:
        raw = response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    assert raw.endswith(b"data: [DONE]\n\n")
    records = raw.decode().split("\n\n")[:-2]
    assert len(records) >= 3
    documents = [json.loads(record.removeprefix("data: ")) for record in records]
    assert (
        len({(document["id"], document["created"], document["model"], document["object"]) for document in documents})
        == 1
    )
    if path == CHAT:
        assert documents[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("n", [1, 3])
def test_usage_comes_when_asked_for_in_one_last_record(runtime, path, n):
    whole = runtime.client.post(f"{runtime.url}{path}", json=body_of(path, n=n)).json()["usage"]
    assert (
        whole["completion_tokens"] >= n and whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    )
    *chunks, last = runtime.records(path, body_of(path, n=n, stream_options={"include_usage": True}))
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole[name]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert all(
            record["choices"] and "usage" not in record
            for record in runtime.records(path, body_of(path, n=n, stream_options=options))
        )


def test_the_gateways_usage_comment_is_there_only_when_asked_for_and_never_alone(runtime):
    for want in (False, True):
        headers = {"x-headway-want-usage": "1"} if want else {}
        with runtime.client.stream(
            "POST", f"{runtime.url}{COMPLETION}", json=body_of(COMPLETION, stream=True), headers=headers
        ) as response:
            raw = response.read()
        comments = [line for line in raw.split(b"\n") if line.startswith(b":")]
        assert len(comments) == want
        if want:
            figures = json.loads(comments[0].removeprefix(b": headway "))
            assert figures["completion"] == 12 and figures["prompt"] > 1 and figures["cached"] >= 0
            assert raw.endswith(comments[0] + b"\ndata: [DONE]\n\n")
        assert response.headers["x-headway-prompt-tokens"].isdigit()


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_streamed_and_whole_texts_are_equal_for_every_choice(runtime, path):
    request = body_of(path, n=3, temperature=1.0, max_tokens=40)
    whole = runtime.client.post(f"{runtime.url}{path}", json=request).json()["choices"]
    records = runtime.records(path, request)
    assert len({text_of(choice) for choice in whole}) == 3
    for index in range(3):
        assert joined(records, index) == text_of(whole[index])
        reasons = [
            c["finish_reason"] for r in records for c in r["choices"] if c["index"] == index and c["finish_reason"]
        ]
        assert reasons == [whole[index]["finish_reason"]]


def test_several_prompts_are_answered_in_order(runtime):
    prompts = ["hello", "the world", [70, 71, 72]]
    single = []
    for prompt in prompts:
        single += [c["text"] for c in runtime.completion(prompt=prompt, n=2, seed=3, max_tokens=8).json()["choices"]]
    for batch in (prompts[:2],):
        answer = runtime.completion(prompt=batch, n=2, seed=3, max_tokens=8).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == single[:4]


def test_chat_logprobs_have_their_shape_and_their_bytes_are_the_text(runtime):
    for members in ({}, {"top_logprobs": 0}):
        plain = runtime.chat(max_tokens=3, logprobs=True, temperature=0, **members).json()["choices"][0]
        assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[], [], []]
    five = runtime.chat(max_tokens=3, logprobs=True, top_logprobs=5, temperature=0).json()["choices"][0]["logprobs"][
        "content"
    ]
    for entry in five:
        tops = entry["top_logprobs"]
        assert len(tops) == 5 and tops[0]["logprob"] == entry["logprob"] == max(top["logprob"] for top in tops)
    assert runtime.chat(max_tokens=3).json()["choices"][0]["logprobs"] is None
    sampled = runtime.chat("한국어 👩‍👩‍👧", max_tokens=60, logprobs=True, ignore_eos=True, seed=1)
    choice = sampled.json()["choices"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode(errors="replace") == choice["message"]["content"]
    assert "\ufffd" in choice["message"]["content"], (
        "the random model writes broken characters, which is what this is about"
    )
    assert len(choice["logprobs"]["content"]) == sampled.json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("logprobs", [0, 5])
def test_completion_logprobs_have_their_shape_and_offsets_into_the_whole_text(runtime, logprobs):
    request = body_of(COMPLETION, max_tokens=30, logprobs=logprobs, ignore_eos=True)
    whole = runtime.client.post(f"{runtime.url}{COMPLETION}", json=request).json()["choices"][0]
    shape = whole["logprobs"]
    assert (
        len(shape["tokens"])
        == len(shape["token_logprobs"])
        == len(shape["top_logprobs"])
        == len(shape["text_offset"])
        == 30
    )
    for token, offset in zip(shape["tokens"], shape["text_offset"], strict=True):
        if not token.startswith("bytes:") and "<" not in token:
            assert whole["text"][offset:].startswith(token)
    for token, value, tops in zip(shape["tokens"], shape["token_logprobs"], shape["top_logprobs"], strict=True):
        assert tops[token] == value and max(1, logprobs) <= len(tops) <= logprobs + 1
    streamed = [c["logprobs"] for r in runtime.records(COMPLETION, request) for c in r["choices"] if c["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert (
            [item for part in streamed for item in part[name]] == pytest.approx(shape[name])
            if name == "token_logprobs"
            else [item for part in streamed for item in part[name]] == shape[name]
        )


def test_every_choice_has_one_finish_reason_with_logprobs_and_two_tokens(runtime):
    records = runtime.records(CHAT, body_of(CHAT, n=3, max_tokens=2, logprobs=True, ignore_eos=True))
    for index in range(3):
        choices = [choice for record in records for choice in record["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 2


LETTERS = {str(4 + ord(letter) - ord("!")): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}
"""A bias that leaves the tiny model the letters alone; which of them comes next is still its own choice."""


def letters(path, **members):
    return body_of(path, temperature=0, max_tokens=24, ignore_eos=True, logit_bias=LETTERS, **members)


def known_text(runtime, path):
    """A text of letters that greedy decoding gives every time."""
    text = text_of(runtime.client.post(f"{runtime.url}{path}", json=letters(path)).json()["choices"][0])
    assert len(text) == 24 and text.isalpha() and len(set(text)) > 4
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stop_string_cuts_before_its_first_match_and_nothing_else_is_lost(runtime, path):
    """Every part of the text of up to 12 letters, whole and streamed, eight at a time."""
    text = known_text(runtime, path)
    stops = {text[at : at + length] for length in range(1, 13) for at in range(len(text) - length + 1)}
    base = letters(path)

    def ask(stop):
        cut = text.find(stop)
        expected, reason = (text[:cut], "stop") if cut >= 0 else (text, "length")
        tokens = cut + len(stop) if cut >= 0 else len(text)  # Each letter is a token.
        whole = runtime.client.post(f"{runtime.url}{path}", json={**base, "stop": stop}).json()
        assert (text_of(whole["choices"][0]), whole["choices"][0]["finish_reason"]) == (expected, reason), stop
        records = runtime.records(path, {**base, "stop": [stop], "stream_options": {"include_usage": True}})
        reasons = [
            choice["finish_reason"] for record in records for choice in record["choices"] if choice["finish_reason"]
        ]
        assert (joined(records), reasons) == (expected, [reason]), stop
        assert whole["usage"]["completion_tokens"] == records[-1]["usage"]["completion_tokens"] == tokens
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, [*sorted(stops), text[:3] + "never", text[-3:] + "x", "never"]))


def test_overlapping_and_empty_stops(runtime):
    text = known_text(runtime, COMPLETION)
    short, long = text[6:8], text[6:9]
    base = letters(COMPLETION)
    for stops in ([short, long], [long, short], [long, "never"]):
        cut = min(text.find(stop) for stop in stops if stop in text)
        assert (
            runtime.client.post(f"{runtime.url}{COMPLETION}", json={**base, "stop": stops}).json()["choices"][0]["text"]
            == text[:cut]
        )
    for nothing in ("", [], [""]):
        assert (
            runtime.client.post(f"{runtime.url}{COMPLETION}", json={**base, "stop": nothing}).json()["choices"][0][
                "text"
            ]
            == text
        )


def test_a_forced_end_token_ends_the_text_unless_it_is_ignored(runtime):
    """Id 1 is the model's end token, id 3 a second one of generation_config.json; a bias makes either certain."""
    for end in (1, 3):
        forced = {"logit_bias": {str(end): 100}, "max_tokens": 6, "temperature": 0}
        answer = runtime.completion(prompt="hello", **forced).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 1
        ignored = runtime.completion(prompt="hello", ignore_eos=True, **forced).json()
        assert (ignored["choices"][0]["text"], ignored["choices"][0]["finish_reason"]) == ("", "length")
        assert ignored["usage"]["completion_tokens"] == 6
    own = runtime.completion(
        prompt="hello", stop_token_ids=[70], logit_bias={"70": 100}, ignore_eos=True, max_tokens=6
    ).json()
    assert own["choices"][0]["finish_reason"] == "stop"
    late = runtime.completion(prompt="hello", min_tokens=4, logit_bias={"1": 100}, max_tokens=6).json()
    assert late["usage"]["completion_tokens"] >= 4


def test_characters_are_never_split_however_the_answer_is_cut(runtime):
    """Ids are forced one after another by asking for each prefix: every cut of a multi-byte text decodes like the whole
    of it."""
    text = "".join(
        text_of(c)
        for c in runtime.completion(prompt="한국어", max_tokens=64, seed=2, ignore_eos=True).json()["choices"]
    )
    for length in (1, 2, 3, 5, 17):
        answer = runtime.completion(prompt="한국어", max_tokens=length, seed=2, ignore_eos=True).json()["choices"][0][
            "text"
        ]
        assert text.startswith(answer.rstrip("\ufffd"))


@pytest.mark.parametrize(
    "members",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_completion_tokens": 5, "max_tokens": 5},
        {"max_completion_tokens": None, "max_tokens": 5},
        {"max_completion_tokens": 5, "max_tokens": None},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_ends_at_its_maximum_by_either_name(runtime, members, stream):
    request = {**body_of(CHAT, ignore_eos=True), "max_tokens": None, **members}
    if stream:
        *chunks, last = runtime.records(CHAT, {**request, "stream_options": {"include_usage": True}})
        reasons = [
            choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
        ]
        assert (last["usage"]["completion_tokens"], reasons) == (5, ["length"])
    else:
        answer = runtime.client.post(f"{runtime.url}{CHAT}", json=request).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")


def test_the_default_maximum_is_capped_to_what_fits(runtime):
    answer = runtime.completion(prompt=[5] * 4090, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 6
    assert runtime.completion(prompt="A", ignore_eos=True).json()["usage"]["completion_tokens"] == 16
