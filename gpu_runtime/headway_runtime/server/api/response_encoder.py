"""Responses of the two generating endpoints as bytes: envelope, usage, and the choices as each endpoint has them.

Two forms of one response: a JSON object with all choices, or server-sent events, each of which holds one `chunk`.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from headway_runtime.text.text_delta import Candidate, TextDelta, TokenEntry


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: the prompt once (however many choices), all completions summed."""

    prompt: int
    completion: int
    cached: int

    def document(self) -> dict[str, Any]:
        """The `usage` member of the OpenAI API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ResponseEncoder(ABC):
    """One response: the same id, time and model in all of its chunks. The subclasses are the endpoints."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._envelope = {"id": self.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, deltas: list[TextDelta], usage: Usage) -> bytes:
        """The body of a response without streaming: one finished delta for each choice."""
        choices = [self._whole_choice(index, delta) for index, delta in enumerate(deltas)]
        return _json({**self._envelope, "object": self.whole_object, "choices": choices, "usage": usage.document()})

    def first_chunk(self, index: int) -> bytes:
        """The event before a choice's first content; empty where the endpoint has none."""
        choice = self._first_choice(index)
        return b"" if choice is None else self._chunk([choice])

    def empty_chunk(self, index: int) -> bytes:
        """An event without content: keeps a connection alive in a way that every SDK reads."""
        return self._chunk([self._empty_choice(index)])

    def chunk(self, index: int, delta: TextDelta) -> bytes:
        """The event with a choice's new text."""
        return self._chunk([self._delta_choice(index, delta)])

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event after the last choice when the client asked for it; else empty."""
        return self._chunk([], usage.document()) if self._include_usage else b""

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        document: dict[str, Any] = {**self._envelope, "object": self.chunk_object, "choices": choices}
        if self._include_usage:
            document["usage"] = usage
        return b"data: " + _json(document) + b"\n\n"

    @abstractmethod
    def _first_choice(self, index: int) -> dict[str, Any] | None: ...

    @abstractmethod
    def _empty_choice(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_choice(self, index: int, delta: TextDelta) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, index: int, delta: TextDelta) -> dict[str, Any]: ...


class ChatEncoder(ResponseEncoder):
    """`/v1/chat/completions`. The first chunk of a choice has the role."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _first_choice(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, {"role": "assistant", "content": ""})

    def _empty_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, {"content": ""})

    def _delta_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The last delta has only the reason, unless text was held back."""
        content = {"content": delta.text} if delta.text or delta.entries else {}
        return self._choice(index, content, delta if delta.entries else None, delta.finish)

    def _whole_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._chat_logprobs(delta),
            "finish_reason": delta.finish,
        }

    def _choice(
        self, index: int, content: dict[str, Any], with_logprobs: TextDelta | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": content,
            "logprobs": None if with_logprobs is None else self._chat_logprobs(with_logprobs),
            "finish_reason": finish,
        }

    def _chat_logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [self._entry(entry) for entry in delta.entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        return {**self._candidate(entry.token), "top_logprobs": [self._candidate(one) for one in entry.top]}

    def _candidate(self, one: Candidate) -> dict[str, Any]:
        return {"token": one.name.decode("utf-8", errors="replace"), "logprob": one.logprob, "bytes": list(one.raw)}


class CompletionEncoder(ResponseEncoder):
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _first_choice(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 -- the other endpoint needs it
        return None

    def _empty_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, TextDelta(), logprobs=False)

    def _delta_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self._choice(index, delta, logprobs=self._logprobs and bool(delta.entries or not delta.finish))

    def _whole_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self._choice(index, delta, logprobs=self._logprobs)

    def _choice(self, index: int, delta: TextDelta, *, logprobs: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._completion_logprobs(delta) if logprobs else None,
            "finish_reason": delta.finish,
        }

    def _completion_logprobs(self, delta: TextDelta) -> dict[str, Any]:
        return {
            "tokens": [entry.token.label for entry in delta.entries],
            "token_logprobs": [entry.token.logprob for entry in delta.entries],
            # The chosen token is always among them, so there may be one more than was asked for.
            "top_logprobs": [{one.label: one.logprob for one in (*entry.top, entry.token)} for entry in delta.entries],
            "text_offset": [entry.offset for entry in delta.entries],
        }


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
