"""A stream from a replica to a client: each chunk is relayed within the step of the event loop in which it arrives.

No task wakes up for a chunk, and only the end is awaited: what a token costs is what `StreamRelay.feed` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headway_core.contract.header_names import ShedReason
from headway_edge.client_connection import Header

from headway_gateway.client_request import ClientRequest
from headway_gateway.sse import EventStream, count_content_events

KEEP_ALIVE = b": waiting for the first token\n"
"""A comment line without an empty line after it: it ends no event, so no client sees an empty one."""


class ResponseListener(Protocol):
    """What is told about a response, as far as it comes. Times are the event loop's, seconds."""

    def headers(self, load_hint: str | None) -> None:
        """The head has come. `load_hint` is the replica's load now: at the end of the stream it would be too old."""

    def prompt_tokens(self, count: int) -> None:
        """The exact length of the prompt."""

    def tokens(self, now: float, events: int, /) -> None:
        """`events` events with data have come together. Called for each chunk of a stream from the first content on."""

    def first_token(self, now: float) -> None:
        """The first content of a stream has come; called after `tokens`."""

    def completed(self, now: float, streamed: bool, prompt: int | None, output: int | None) -> None:
        """The response is a success, and complete. `prompt`, `output`: its token counts, None where it has none."""

    def failed(self, outcome: str, reason: ShedReason | None = None) -> None:
        """The response is an error, or a stream that ends with one. `outcome` is one of `metric_names.OUTCOMES`."""


class StreamRelay:
    """Holds everything back until the first content, but at most `first_byte_hold` seconds, then sends keep-alives.

    `status` and `headers` are the replica's. Close it, however the stream ends.
    """

    __slots__ = (
        "_client_request",
        "_clock",
        "_events",
        "_first_byte_hold",
        "_first_token",
        "_flows",
        "_headers",
        "_held",
        "_last",
        "_loop",
        "_status",
        "_timer",
        "_tokens",
    )

    def __init__(
        self,
        client_request: ClientRequest,
        listener: ResponseListener,
        status: int,
        headers: Sequence[Header],
        first_byte_hold: float,
        clock: Callable[[], float],
    ) -> None:
        self._client_request = client_request
        # Bound once: each chunk calls it.
        self._tokens = listener.tokens
        self._first_token = listener.first_token
        self._status = status
        self._headers = headers
        self._first_byte_hold = first_byte_hold
        self._clock = clock
        self._events = EventStream()
        self._held: list[bytes] = []
        self._last = b""
        self._flows = False
        """Content has come."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(client_request.arrival + first_byte_hold, self._end_hold)

    @property
    def usage(self) -> dict[str, int] | None:
        """The runtime's token counts once they have come."""
        return self._events.usage

    @property
    def broken(self) -> bool:
        """Whether the last event is an error: the replica failed after the stream had begun."""
        lines = [line for line in self._last.split(b"\n") if line.startswith(b"data:") and line != b"data: [DONE]"]
        return bool(lines) and b'"error"' in lines[-1] and b'"choices"' not in lines[-1]

    def feed(self, data: bytes) -> bool:
        """Relays the whole events in what has just arrived. Returns False when the client is behind."""
        passed = self._events.feed(data)
        if not passed:
            return True
        if self._flows:
            self._last = passed
            self._tokens(self._clock(), self._events.data_events)
            return self._client_request.write_now(passed)
        self._find_content(passed)
        if self._client_request.started:
            return self._client_request.write_now(passed)
        self._held.append(passed)
        return not self._flows or self._begin()

    async def finish(self, data: bytes) -> None:
        """Ends the stream; `data` came with the end."""
        passed = self._events.feed(data)
        if passed and self._flows:
            self._last = passed
            self._tokens(self._clock(), self._events.data_events)
        elif passed:
            self._find_content(passed)
        if not self._client_request.started:
            await self._client_request.start(self._status, self._headers)
        await self._client_request.finish(b"".join([*self._held, passed, self._events.rest()]))

    def close(self) -> None:
        """Sends no more keep-alives."""
        self._timer.cancel()

    def _find_content(self, passed: bytes) -> None:
        self._last = passed
        found = count_content_events(passed)
        if found:
            self._flows = True
            self._timer.cancel()
            now = self._clock()
            self._tokens(now, found)
            self._first_token(now)

    def _begin(self) -> bool:
        out = b"".join(self._held)
        self._held.clear()
        return self._client_request.begin(self._status, self._headers, out)

    def _end_hold(self) -> None:
        self._timer = self._loop.call_later(self._first_byte_hold, self._end_hold)
        if self._client_request.started:
            self._client_request.write_now(KEEP_ALIVE)
        else:
            self._held = self._held or [KEEP_ALIVE]
            self._begin()
