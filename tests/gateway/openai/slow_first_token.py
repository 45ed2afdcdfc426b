"""The official client against a server at argv[1] whose first token takes longer than the client waits for a byte;
prints its version.

argv[2] and argv[3] are these two times, in seconds.

Run as a program, so that the test can run it with one version of the client and then with another.
"""

import sys

import httpx
import openai

url, first, timeout = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=httpx.Timeout(timeout))
SCRIPT = {"stub": {"first": first, "tokens": 3}}

chat = client.chat.completions.create(
    model="m", messages=[{"role": "user", "content": "x"}], stream=True, extra_body=SCRIPT
)
chunks = list(chat)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "w0 w1 w2 "
assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]

text = client.completions.create(model="m", prompt="x", stream=True, extra_body=SCRIPT)
assert "".join(chunk.choices[0].text for chunk in text) == "w0 w1 w2 "

print(openai.__version__)
