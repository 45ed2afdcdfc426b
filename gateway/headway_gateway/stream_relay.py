"""A stream on its way from a replica to a client, piece by piece, each within the loop step in which it arrives.

No task wakes up for a piece, and nothing here waits but the end: what a token costs is what `StreamRelay.piece` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway_gateway.accounting import RequestRecord
from headway_gateway.client_request import ClientRequest, Header
from headway_gateway.sse import EventStream, count_content_events

KEEP_ALIVE = b": waiting for the first token\n"
"""A comment line without an empty line after it: it ends no event, so no client sees an empty one."""


class StreamRelay:
    """Holds everything back until the first content, or until `hold` seconds are spent: then what there is goes out,
    keep-alives after it.

    `status` and `headers` are the replica's; `first_token` is called with the first content. Close it, whatever way it
    ends.
    """

    __slots__ = (
        "_client_request",
        "_events",
        "_first_token",
        "_flows",
        "_headers",
        "_held",
        "_hold",
        "_last",
        "_loop",
        "_record",
        "_status",
        "_timer",
    )

    def __init__(
        self,
        client_request: ClientRequest,
        record: RequestRecord,
        status: int,
        headers: Sequence[Header],
        first_token: Callable[[], None],
        hold: float,
    ) -> None:
        self._client_request = client_request
        self._record = record
        self._status = status
        self._headers = headers
        self._first_token = first_token
        self._hold = hold
        self._events = EventStream()
        self._held: list[bytes] = []
        self._last = b""
        self._flows = False
        """Content has come."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(client_request.arrival + hold, self._hold_is_over)

    @property
    def usage(self) -> dict[str, int] | None:
        """The runtime's counts once they came by."""
        return self._events.usage

    @property
    def broken(self) -> bool:
        """Whether the last event is an error: the replica gave the request up after it had begun."""
        lines = [line for line in self._last.split(b"\n") if line.startswith(b"data:") and line != b"data: [DONE]"]
        return bool(lines) and b'"error"' in lines[-1] and b'"choices"' not in lines[-1]

    def piece(self, data: bytes) -> bool:
        """Passes on what has just arrived, as far as it makes whole events; False when the client is behind."""
        passed = self._events.feed(data)
        if not passed:
            return True
        if self._flows:
            self._last = passed
            self._record.content(self._loop.time(), self._events.data_events)
            return self._client_request.write_now(passed)
        self._look_for_content(passed)
        if self._client_request.started:
            return self._client_request.write_now(passed)
        self._held.append(passed)
        return not self._flows or self._begin()

    async def finish(self, data: bytes) -> None:
        """The end of the stream, and what came with it."""
        passed = self._events.feed(data)
        if passed and self._flows:
            self._last = passed
            self._record.content(self._loop.time(), self._events.data_events)
        elif passed:
            self._look_for_content(passed)
        if not self._client_request.started:
            await self._client_request.start(self._status, self._headers)
        await self._client_request.finish(b"".join([*self._held, passed, self._events.rest()]))

    def close(self) -> None:
        """No keep-alives any more."""
        self._timer.cancel()

    def _look_for_content(self, passed: bytes) -> None:
        self._last = passed
        found = count_content_events(passed)
        if found:
            self._flows = True
            self._timer.cancel()
            self._record.content(self._loop.time(), found)
            self._first_token()

    def _begin(self) -> bool:
        out = b"".join(self._held)
        self._held.clear()
        return self._client_request.begin(self._status, self._headers, out)

    def _hold_is_over(self) -> None:
        self._timer = self._loop.call_later(self._hold, self._hold_is_over)
        if self._client_request.started:
            self._client_request.write_now(KEEP_ALIVE)
        else:
            self._held = self._held or [KEEP_ALIVE]
            self._begin()
