"""One request in flight: its choices, and the error or disconnect that ended it early.

Used on the server's event loop only. Knows no HTTP beyond the error that its client gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headway_runtime.ipc.messages import Ended, EndReason, TokenOut
from headway_runtime.server.api.errors import ApiError, engine_died
from headway_runtime.server.api.response_encoder import Usage
from headway_runtime.server.metrics import RuntimeMetrics
from headway_runtime.text.text_delta import TextDelta
from headway_runtime.text.text_stream import TextStream


class Generation:
    """One request's choices. The route waits for `changed`, takes their deltas, checks `error` and `disconnected`."""

    def __init__(self, prompt_tokens: int, arrival: float, metrics: RuntimeMetrics, class_label: str) -> None:
        self.choices: list[Choice] = []
        self.prompt_tokens = prompt_tokens
        self.changed = asyncio.Event()
        self.error: ApiError | None = None
        """What the client gets instead of the rest of its response."""
        self.disconnected = False
        """The client closed the connection: nothing more is sent."""
        self.cached_tokens: int | None = None
        """Prompt tokens that came from the prefix cache; None before the first token."""
        self._arrival = arrival
        self._metrics = metrics
        self._class_label = class_label
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        """No more tokens will come."""
        return self.disconnected or self.error is not None or all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.prompt_tokens, sum(choice.num_tokens for choice in self.choices), self.cached_tokens or 0)

    def fail(self, error: ApiError) -> None:
        """Ends it with an error for the client. The first error stays."""
        if not self.done:
            self.error = error
        self.changed.set()

    def disconnect(self) -> None:
        """The client has closed the connection."""
        self.disconnected = True
        self.changed.set()

    def disconnect_unless_cancelled(self, waiting: asyncio.Task[None]) -> None:
        """The done-callback of the task that waits for the disconnect."""
        if not waiting.cancelled():
            self.disconnect()

    def expire_after(self, seconds: float, error: ApiError) -> None:
        """Fails it with `error` when it is not done within `seconds`."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def close(self) -> None:
        """Stops the time-out: the response is complete or has no reader."""
        if self._timer is not None:
            self._timer.cancel()

    def count_token(self, choice: Choice, cached: int | None, now: float) -> None:
        """Counts a token of one of its choices. `cached`: prompt tokens from the prefix cache, with a first token."""
        if choice.last_token_at is not None:
            self._metrics.observe_itl(self._class_label, now - choice.last_token_at)
        if cached is not None and choice.first_of_prompt:
            if self.cached_tokens is None:
                self._metrics.observe_ttft(self._class_label, now - self._arrival)
            self.cached_tokens = (self.cached_tokens or 0) + cached


class Choice:
    """One of a request's completions: the listener of one sequence, whose tokens it turns into text.

    `first_of_prompt`: the first of the choices that share a prompt; its cached tokens count, since the prompt counts
    once. `cancel` is called with `seq_id` when a stop string has ended the text while the engine still generates.
    """

    def __init__(
        self,
        generation: Generation,
        seq_id: int,
        index: int,
        text: TextStream,
        *,
        first_of_prompt: bool,
        cancel: Callable[[int], None],
    ) -> None:
        self.seq_id = seq_id
        self.index = index
        self.first_of_prompt = first_of_prompt
        self.last_token_at: float | None = None
        self.held_by_engine = True
        self._generation = generation
        self._text = text
        self._cancel_sequence = cancel

    @property
    def num_tokens(self) -> int:
        """Tokens generated, without those after a stop string."""
        return self._text.num_tokens

    @property
    def finished(self) -> bool:
        """Whether its finish reason is known."""
        return self._text.finish is not None

    def on_token(self, out: TokenOut, hidden: bool) -> None:
        """A token from the engine. A token after a stop string is dropped: the engine has not read the cancel yet."""
        if self.finished:
            return
        now = time.monotonic()
        self._generation.count_token(self, out.cached, now)
        self.last_token_at = now
        if hidden:
            self._text.count_end_token()
        else:
            self._text.feed(out.token, out.logprobs)
            if self.finished:
                self._cancel_sequence(self.seq_id)
        self._generation.changed.set()

    def on_ended(self, ended: Ended) -> None:
        """The engine has freed the sequence."""
        self.held_by_engine = False
        if ended.reason is EndReason.ERROR:
            self._generation.fail(ApiError(400, f"this request cannot go on: {ended.message}", code="sampling_failed"))
        self._text.end("stop" if ended.reason is EndReason.STOP else "length")
        self._generation.changed.set()

    def on_engine_died(self) -> None:
        """The engine process has ended."""
        self.held_by_engine = False
        self._generation.fail(engine_died())

    def take_delta(self) -> TextDelta | None:
        """Its new text since the last call; None without any."""
        return self._text.take()

    def take_whole(self) -> TextDelta:
        """The whole text of a finished choice."""
        return self._text.take() or TextDelta(finish="length")
