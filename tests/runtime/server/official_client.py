"""Everything that a user of the official client does, against the server at argv[1]; prints the client's version when
all of it held.

Run as a program, so that the test can run it with one version of the client and then with another.
"""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0, timeout=120)
MODEL = "tiny"
MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "hello world"}]


def completions():
    answer = client.completions.create(
        model=MODEL, prompt="hello world", max_tokens=8, seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion" and answer.model == MODEL and answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)
    assert answer._request_id
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="hello world",
            max_tokens=8,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    ids = client.completions.create(model=MODEL, prompt=[[70, 71], [72, 73]], max_tokens=2, n=2)
    assert [choice.index for choice in ids.choices] == [0, 1, 2, 3]
    with_logprobs = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=3, logprobs=2, extra_body={"ignore_eos": True}
    )
    shape = with_logprobs.choices[0].logprobs
    assert len(shape.tokens) == len(shape.token_logprobs) == len(shape.top_logprobs) == len(shape.text_offset) == 3


def chat():
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=8,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    several = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=3, seed=1, temperature=1.0)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) == 3
    probed = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
    )
    for entry in probed.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0 and isinstance(entry.bytes, list)
    streamed = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0, stream=True
        )
    )
    entries = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in probed.choices[0].logprobs.content]


def stops():
    text = (
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0)
        .choices[0]
        .message.content
    )
    clean = [at for at in range(1, len(text)) if text[at : at + 1].isascii() and text[at] not in text[:at]]
    stop = text[clean[0]]
    cut = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0, stop=[stop, "never there"]
    )
    assert cut.choices[0].message.content == text[: clean[0]]
    assert cut.choices[0].finish_reason == "stop"


def refused(kind, **request):
    """The client's own error of this kind, which the request must raise."""
    try:
        client.chat.completions.create(**request)
    except kind as error:
        return error
    raise AssertionError(f"{request} was served")


def errors():
    for stream in (False, True):
        missing = refused(openai.NotFoundError, model="another", messages=MESSAGES, stream=stream)
        assert missing.code == "model_not_found" and missing.param == "model"
        bad = refused(openai.BadRequestError, model=MODEL, messages=MESSAGES, temperature=-1, stream=stream)
        assert bad.param == "temperature" and bad.type == "invalid_request_error"
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


completions()
chat()
stops()
errors()
print(openai.__version__)
