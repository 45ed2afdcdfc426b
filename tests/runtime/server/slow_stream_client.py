"""Streams whose first token takes long, read by the official client from the server at argv[1]; prints the client's
version.

Run as a program, so that the test can run it with one version of the client and then with another.
"""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0, timeout=120)
IGNORE_EOS = {"ignore_eos": True}

texts = list(
    client.completions.create(model="tiny", prompt=[5] * 2000, max_tokens=2, stream=True, extra_body=IGNORE_EOS)
)
assert len(texts) >= 6, "records that say nothing came before the two of the tokens"
assert [chunk.choices[0].finish_reason for chunk in texts if chunk.choices[0].finish_reason] == ["length"]

messages = [{"role": "user", "content": "hello" * 2000}]
chunks = list(
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, stream=True, extra_body=IGNORE_EOS)
)
assert len(chunks) >= 6
assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]

print(openai.__version__)
