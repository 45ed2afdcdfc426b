"""One request while the engine works on it: its choices, and why it ended when it did not end well.

Lives on the server's event loop, which is the only one to touch it. Knows no HTTP beyond the error that its client is
to be told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headway_runtime.ipc.messages import Ended, EndReason, TokenOut
from headway_runtime.server.api.answer import Usage
from headway_runtime.server.api.errors import ApiError, engine_died
from headway_runtime.server.metrics import RuntimeMetrics
from headway_runtime.text.text_delta import TextDelta
from headway_runtime.text.text_stream import TextStream


class Generation:
    """`choices` of one request. Whoever answers waits for `changed`, takes pieces from the choices, and looks at
    `failure` and `gone`."""

    def __init__(self, prompt_tokens: int, arrival: float, metrics: RuntimeMetrics, class_label: str) -> None:
        self.choices: list[Choice] = []
        self.prompt_tokens = prompt_tokens
        self.changed = asyncio.Event()
        self.failure: ApiError | None = None
        """What the client is told instead of the rest of its answer."""
        self.gone = False
        """The client closed the connection: nobody is to be told anything."""
        self.cached_tokens: int | None = None
        """Prompt tokens that came from the prefix cache; None before the first token."""
        self._arrival = arrival
        self._metrics = metrics
        self._class_label = class_label
        self._timer: asyncio.TimerHandle | None = None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.gone or self.failure is not None or all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self.prompt_tokens, sum(choice.num_tokens for choice in self.choices), self.cached_tokens or 0)

    def fail(self, error: ApiError) -> None:
        """Ends it for a reason that the client is told. The first reason stays."""
        if not self.done:
            self.failure = error
        self.changed.set()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.changed.set()

    def leave_unless_cancelled(self, waiting: asyncio.Task[None]) -> None:
        """For the task that waits for the client's going, when it is done."""
        if not waiting.cancelled():
            self.leave()

    def expire_after(self, seconds: float, error: ApiError) -> None:
        """Fails it when it is not done by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def close(self) -> None:
        """Nobody looks at it any more."""
        if self._timer is not None:
            self._timer.cancel()

    def count_token(self, choice: Choice, cached: int | None, now: float) -> None:
        """Books a token of one of its choices."""
        if choice.last_token_at is not None:
            self._metrics.token_gap(self._class_label, now - choice.last_token_at)
        if cached is not None and choice.leads:
            if self.cached_tokens is None:
                self._metrics.first_token(self._class_label, now - self._arrival)
            self.cached_tokens = (self.cached_tokens or 0) + cached


class Choice:
    """One of a request's completions: it listens to one sequence of the engine and turns its tokens into text.

    `leads`: of the choices that share a prompt, the one whose cached tokens count, since the prompt counts once.
    `give_up` is called with the sequence's number when a stop string has ended the text and the engine goes on.
    """

    def __init__(
        self,
        generation: Generation,
        seq_id: int,
        index: int,
        text: TextStream,
        *,
        leads: bool,
        give_up: Callable[[int], None],
    ) -> None:
        self.seq_id = seq_id
        self.index = index
        self.leads = leads
        self.last_token_at: float | None = None
        self.held_by_engine = True
        self._generation = generation
        self._text = text
        self._give_up = give_up

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return self._text.num_tokens

    @property
    def finished(self) -> bool:
        """Its reason to end is known."""
        return self._text.finish is not None

    def token(self, out: TokenOut, hidden: bool) -> None:
        """A token from the engine. One that comes after a stop string is neither text nor counted: the engine just does
        not know yet."""
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
                self._give_up(self.seq_id)
        self._generation.changed.set()

    def ended(self, ended: Ended) -> None:
        """The engine holds the sequence no more."""
        self.held_by_engine = False
        if ended.reason is EndReason.ERROR:
            self._generation.fail(ApiError(400, f"this request cannot go on: {ended.message}", code="sampling_failed"))
        self._text.end("stop" if ended.reason is EndReason.STOP else "length")
        self._generation.changed.set()

    def engine_died(self) -> None:
        """The engine is gone."""
        self.held_by_engine = False
        self._generation.fail(engine_died())

    def take_news(self) -> TextDelta | None:
        """What it gained since this was asked last; None when nothing."""
        return self._text.take()

    def take_all(self) -> TextDelta:
        """The finished choice as one piece."""
        return self._text.take() or TextDelta(finish="length")
