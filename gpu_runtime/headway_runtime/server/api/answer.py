"""What both endpoints' answers share: the envelope, usage, and how a finished or growing choice is laid out in either
of them."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from headway_runtime.text.text_delta import Candidate, TextDelta, TokenEntry


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: the prompt once (however many choices), all completions summed."""

    prompt: int
    completion: int
    cached: int

    def document(self) -> dict[str, Any]:
        """As the API spells it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ResponseLayout(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that comes before any content; None when the endpoint has none."""

    def empty(self, index: int) -> dict[str, Any]:
        """A choice that says nothing: keeps a connection alive in a way every SDK reads."""

    def growing(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """A choice in a chunk."""

    def whole(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """A finished choice."""


class ChatLayout:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def empty(self, index: int) -> dict[str, Any]:
        """A delta without text."""
        return self._chunk(index, {"content": ""})

    def growing(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """A delta with the new text; the last one has only the reason unless text was held back."""
        delta = {"content": piece.text} if piece.text or piece.entries else {}
        return self._chunk(index, delta, self._logprobs(piece) if logprobs and piece.entries else None, piece.finish)

    def whole(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """The message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece) if logprobs else None,
            "finish_reason": piece.finish,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, piece: TextDelta) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in piece.entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        return {**self._candidate(entry.token), "top_logprobs": [self._candidate(one) for one in entry.top]}

    def _candidate(self, one: Candidate) -> dict[str, Any]:
        return {"token": one.name.decode("utf-8", errors="replace"), "logprob": one.logprob, "bytes": list(one.raw)}


class CompletionLayout:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 -- the other endpoint needs it
        """Completions have no role to tell."""
        return None

    def empty(self, index: int) -> dict[str, Any]:
        """A choice without text."""
        return self.growing(index, TextDelta(), logprobs=False)

    def growing(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """The new text."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if logprobs and (piece.entries or not piece.finish) else None,
            "finish_reason": piece.finish,
        }

    def whole(self, index: int, piece: TextDelta, logprobs: bool) -> dict[str, Any]:
        """The whole text."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if logprobs else None,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, piece: TextDelta) -> dict[str, Any]:
        return {
            "tokens": [entry.token.label for entry in piece.entries],
            "token_logprobs": [entry.token.logprob for entry in piece.entries],
            # The chosen token is always among them, so there may be one more than was asked for.
            "top_logprobs": [{one.label: one.logprob for one in (*entry.top, entry.token)} for entry in piece.entries],
            "text_offset": [entry.offset for entry in piece.entries],
        }


class ResponseFormatter:
    """The envelope of one answer: the same id, time and model in all of its chunks."""

    def __init__(self, layout: ResponseLayout, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self.layout = layout
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._envelope = {"id": layout.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, pieces: list[TextDelta], usage: Usage) -> bytes:
        """The body of an answer without streaming: one finished piece for each choice."""
        choices = [self.layout.whole(index, piece, self._logprobs) for index, piece in enumerate(pieces)]
        return _line(
            {**self._envelope, "object": self.layout.whole_object, "choices": choices, "usage": usage.document()}
        )

    def opening(self, index: int) -> bytes:
        """The record before a choice's first content; empty where the endpoint has none."""
        choice = self.layout.opening(index)
        return b"" if choice is None else self._record([choice])

    def keep_alive(self, index: int) -> bytes:
        """A record that says nothing."""
        return self._record([self.layout.empty(index)])

    def growing(self, index: int, piece: TextDelta) -> bytes:
        """The record of a choice's gain."""
        return self._record([self.layout.growing(index, piece, self._logprobs)])

    def usage(self, usage: Usage) -> bytes:
        """The record after the last choice, when the client asked for it; else empty."""
        return self._record([], usage.document()) if self._include_usage else b""

    def _record(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        document: dict[str, Any] = {**self._envelope, "object": self.layout.chunk_object, "choices": choices}
        if self._include_usage:
            document["usage"] = usage
        return b"data: " + _line(document) + b"\n\n"


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
