"""From a validated request to token ids that fit: chat template, tokenizer, and the limits of this model and pool.

Runs in worker threads; reads shared state only.
"""

from __future__ import annotations

import numpy as np
from headway_core.errors import RequestError

from headway_runtime.ipc.messages import Ready, TokenIds
from headway_runtime.server.api.generation_request import GenerationRequest, Prompt
from headway_runtime.text.text_stream import TextStream
from headway_runtime.text.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes requests for one model. `set_model` comes first, once the engine has said what it has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_token = max(
            (len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1
        )
        self._vocab_size = tokenizer.vocab_size
        self._limit = 0

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens that the tokenizer names."""
        return self._tokenizer.eos_ids

    def set_model(self, ready: Ready) -> None:
        """The engine is up: these are its limits."""
        self._vocab_size = ready.vocab_size
        self._limit = min(ready.capacity.max_model_len, ready.capacity.total_blocks * ready.capacity.block_size)

    def encode(self, request: GenerationRequest) -> list[TokenIds]:
        """The ids of each prompt. Raises RequestError when one is not expressible, empty, or can never fit."""
        request.params.check_vocabulary(self._vocab_size)
        if request.messages is not None:
            text = self._tokenizer.chat_template.render(request.messages)
            self._check_bytes(text, "messages", request)
            encoded = [self._tokenizer.encode_chat(text)]
        else:
            encoded = [self._encode(prompt, request) for prompt in request.prompts]
        field = "messages" if request.chat else "prompt"
        for ids in encoded:
            self._check_length(len(ids), field, request)
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        """How many tokens may follow: what was asked for, or the endpoint's default, capped to what fits.

        Raises RequestError when that default is less than the minimum asked for.
        """
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        room = self._limit - prompt_tokens
        most = room if request.default_max_tokens is None else min(room, request.default_max_tokens)
        if request.params.min_tokens > most:
            raise RequestError(
                f"is {request.params.min_tokens}, more than the {most} tokens generated unless told: set the maximum",
                "min_tokens",
            )
        return most

    def text_stream(self, request: GenerationRequest) -> TextStream:
        """A fresh stream for one of the request's choices."""
        return TextStream(self._tokenizer, request.stop, request.params.min_tokens)

    def _encode(self, prompt: Prompt, request: GenerationRequest) -> list[int]:
        if isinstance(prompt, str):
            self._check_bytes(prompt, "prompt", request)
            return self._tokenizer.encode(prompt)
        for token in prompt:
            if token >= self._vocab_size:
                raise RequestError(
                    f"token id {token} is not in the vocabulary: ids run from 0 to {self._vocab_size - 1}", "prompt"
                )
        return list(prompt)

    def _check_bytes(self, text: str, field: str, request: GenerationRequest) -> None:
        """Refuses what no tokenization could make fit, before time is spent on it."""
        least = len(text.encode("utf-8", "surrogatepass")) // self._longest_token
        if least >= self._limit:
            self._check_length(least, field, request, at_least=True)

    def _check_length(self, count: int, field: str, request: GenerationRequest, *, at_least: bool = False) -> None:
        if count < 1:
            raise RequestError("encodes to no tokens: a prompt has at least one", field)
        shown = f"at least {count}" if at_least else str(count)
        if count + 1 > self._limit:
            raise RequestError(
                f"the prompt has {shown} tokens and this server holds at most {self._limit}, one of them for "
                "the answer: shorten it",
                field,
                "context_length_exceeded",
            )
        wanted = request.params.max_tokens
        if wanted is not None and count + wanted > self._limit:
            raise RequestError(
                f"the prompt has {shown} tokens and {wanted} more were asked for, {count + wanted} in all; this "
                "server holds at most "
                f"{self._limit}: shorten the prompt or lower the maximum",
                "max_completion_tokens" if request.chat else "max_tokens",
                "context_length_exceeded",
            )
