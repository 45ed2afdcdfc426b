"""Open-loop load on any OpenAI-compatible endpoint: each request leaves at the trace's time, whatever became of others.

A closed loop (send the next when one returns) slows down with the server and so hides its queue. How late this process
sent each request is recorded, so that a lagging generator is not blamed on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send `at` seconds after the start."""

    at: float
    prompt_tokens: int
    output_tokens: int
    service_tier: str | None = None
    class_name: str = "default"


@dataclass(slots=True)
class RequestResult:
    """What became of one request. Times are seconds after the start of the run; None where it did not come that far."""

    planned: PlannedRequest
    sent: float
    first_token: float | None = None
    token_times: list[float] = field(default_factory=list)
    """Arrival of each piece of content; pieces that came in one read have equal times."""
    end: float | None = None
    status: int | None = None
    error: str | None = None
    in_band: bool = False
    """The error is an event of the stream: the server said what happened, after its 200."""
    shed_reason: str | None = None
    retry_after: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As the server counted them."""
    finish_reason: str | None = None

    @property
    def ok(self) -> bool:
        """The stream came to its proper end."""
        return self.status == 200 and self.error is None and self.finish_reason is not None

    @property
    def ttft(self) -> float | None:
        """Seconds from the planned arrival: a late generator does not make the server look good."""
        return None if self.first_token is None else self.first_token - self.planned.at

    @property
    def tpot(self) -> float | None:
        """(last - first) / (n - 1), n the server's count of tokens, or of pieces if it gave none; None for n < 2."""
        count = self.output_tokens if self.output_tokens is not None else len(self.token_times)
        if self.first_token is None or count < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.first_token) / (count - 1)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The endpoint: base URL without ``/v1``, the model's name, a key if it wants one."""

    url: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = False
    timeout: float = 600.0


_WORDS = (
    "river stone lamp green walk letter window quiet paper north garden seven market table winter orange bridge "
    "simple music evening train island copper number forest silver button yellow travel mirror kitchen autumn "
    "pencil harbor valley morning"
)


class PromptWriter:
    """Prompts of about a wanted number of tokens, without a tokenizer: words, at the server's own tokens per word.

    No two prompts share a beginning, so a prefix cache gains nothing from them.
    """

    def __init__(self, tokens_per_word: float = 1.0, fixed_tokens: float = 0.0) -> None:
        self.tokens_per_word = tokens_per_word
        self.fixed_tokens = fixed_tokens

    def learn(self, short: tuple[int, int], long: tuple[int, int]) -> None:
        """From two (words, tokens) pairs as the server counted them: a slope, and what the template adds."""
        (few, few_tokens), (many, many_tokens) = short, long
        self.tokens_per_word = max(0.1, (many_tokens - few_tokens) / (many - few))
        self.fixed_tokens = max(0.0, few_tokens - few * self.tokens_per_word)

    def words_for(self, tokens: int) -> int:
        """How many words make a prompt of about `tokens` tokens; at least one."""
        return max(1, round((tokens - self.fixed_tokens) / self.tokens_per_word))

    def text(self, words: int, number: int) -> str:
        """`words` words; `number` makes the beginning unique."""
        picked, choice = [], _WORDS.split()
        state = number * 2654435761 % 2**32
        for _ in range(words):
            state = (state * 1664525 + 1013904223) % 2**32
            picked.append(choice[(state >> 16) % len(choice)])
        return " ".join(picked)


async def run_load(
    target: BenchTarget,
    requests: Sequence[PlannedRequest],
    writer: PromptWriter,
    on_progress: Callable[[Sequence[RequestResult]], None] | None = None,
    enough: asyncio.Event | None = None,
    records: list[RequestResult] | None = None,
) -> list[RequestResult]:
    """Sends every planned request at its time and returns the records in the same order.

    Once `enough` is set nothing more is sent, and what is open comes to its end. A cancelled run returns nothing; its
    connections are closed, and a list given as `records` holds what there was until then.
    """
    prompts = [writer.text(writer.words_for(request.prompt_tokens), number) for number, request in enumerate(requests)]
    records = [] if records is None else records
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=target.timeout, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        start = time.monotonic()
        reporter = group.create_task(_report(records, on_progress)) if on_progress else None
        tasks = []
        for request, prompt in zip(requests, prompts, strict=True):
            if await _told_in(start + request.at - time.monotonic(), enough):
                break
            record = RequestResult(request, sent=time.monotonic() - start)
            records.append(record)
            tasks.append(group.create_task(_send(session, target, prompt, record, start)))
        if tasks:
            await asyncio.wait(tasks)
        if reporter:
            reporter.cancel()
    if on_progress:
        on_progress(records)
    return records


async def _told_in(seconds: float, enough: asyncio.Event | None) -> bool:
    """Waits for `seconds`, less when it is told that it is enough, and says so."""
    if enough is None:
        await asyncio.sleep(max(0.0, seconds))
        return False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await enough.wait()
    return enough.is_set()


async def _report(records: list[RequestResult], on_progress: Callable[[Sequence[RequestResult]], None]) -> None:
    while True:
        await asyncio.sleep(1.0)
        on_progress(records)


async def _send(
    session: aiohttp.ClientSession, target: BenchTarget, prompt: str, record: RequestResult, start: float
) -> None:
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": record.planned.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if record.planned.service_tier:
        body["service_tier"] = record.planned.service_tier
    if target.ignore_eos:
        body["ignore_eos"] = True
    try:
        async with session.post(
            f"{target.url}/v1/chat/completions", json=body, headers=_headers(target.api_key)
        ) as response:
            record.status = response.status
            if response.status != 200:
                record.shed_reason = response.headers.get("x-headway-shed-reason")
                retry_after = response.headers.get("retry-after", "")
                record.retry_after = int(retry_after) if retry_after.isdigit() else None
                record.error = (await response.text())[:300]
            else:
                await _read_stream(_events(response.content), record, start)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        # Beside failed connections: an event cut in the middle, or one that is no chunk of an answer.
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.monotonic() - start


async def _read_stream(events: AsyncIterator[str], record: RequestResult, start: float) -> None:
    async for data in events:
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            record.error, record.in_band = str(chunk["error"])[:300], True
            return
        if usage := chunk.get("usage"):
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            if choice.get("delta", {}).get("content"):
                now = time.monotonic() - start
                record.first_token = now if record.first_token is None else record.first_token
                record.token_times.append(now)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
    record.error = record.error or "the stream ended without [DONE]"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The data of each server-sent event; comments and other fields are passed over."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


async def learn_prompt_length(target: BenchTarget, writer: PromptWriter) -> None:
    """Asks the server twice how many tokens some words are.

    Raises:
        ConnectionError: the endpoint cannot be reached or refuses; the message says what it answered.
    """
    counts = []
    text = ""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for words in (8, 72):
            body = {
                "model": target.model,
                "messages": [{"role": "user", "content": writer.text(words, words)}],
                "max_tokens": 1,
            }
            try:
                async with session.post(
                    f"{target.url}/v1/chat/completions", json=body, headers=_headers(target.api_key)
                ) as response:
                    text = await _answer(response, "a first request")
                    counts.append((words, int(json.loads(text)["usage"]["prompt_tokens"])))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ConnectionError(f"{target.url} does not answer: {error}") from error
            except _NOT_AN_ANSWER as error:
                reason = f"{target.url} answers a first request without usage.prompt_tokens ({_shown(text)})"
                raise ConnectionError(f"{reason}: is it an OpenAI-compatible endpoint?") from error
    writer.learn(*counts)


async def first_model(url: str, api_key: str | None) -> tuple[str, int | None]:
    """The endpoint's first model and its context length, if it says one.

    Raises:
        ConnectionError: the endpoint cannot be reached, refuses, or lists no model.
    """
    text = ""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(f"{url}/v1/models", headers=_headers(api_key)) as response,
        ):
            text = await _answer(response, "GET /v1/models")
        models = json.loads(text)["data"]
        if not models:
            raise ConnectionError(f"{url}/v1/models lists no model")
        length = models[0].get("max_model_len")
        return str(models[0]["id"]), length if type(length) is int and length > 1 else None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(
            f"{url} does not answer ({error}): is this its address, such as http://127.0.0.1:8000?"
        ) from error
    except _NOT_AN_ANSWER as error:
        raise ConnectionError(
            f"{url}/v1/models gives no list of models ({_shown(text)}): is it an OpenAI-compatible endpoint?"
        ) from error


_NOT_AN_ANSWER = (ValueError, TypeError, LookupError, AttributeError)
"""What reading a document raises that is none, or another one than was asked for."""


async def _answer(response: aiohttp.ClientResponse, what: str) -> str:
    """The text of an answer with status 200. Raises ConnectionError for any other; it says when a key is needed."""
    text = await response.text(errors="replace")
    if response.status == 200:
        return text
    key = ": put the key into the variable that --api-key-env names" if response.status in (401, 403) else ""
    raise ConnectionError(f"{response.url} answered {response.status} to {what}{key}: {_shown(text)}")


def _shown(text: str) -> str:
    """The beginning of what arrived, on one line."""
    line = " ".join(text.split())
    return repr(line[:200] + ("…" if len(line) > 200 else ""))


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
