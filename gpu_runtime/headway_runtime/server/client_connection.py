"""uvicorn's HTTP protocol, cured of its faults: it loses the body of a request that offers another protocol, tells only
the newest of several requests that their client has left, keeps any amount of head, trailers and waiting requests, and
lets a byte now and then of a body that nobody waits for keep a connection open."""

from __future__ import annotations

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway_runtime.server.api import errors
from headway_runtime.server.api.errors import ApiError

HEAD_BYTES = 64 * 1024
"""Of a head, of the trailers of a body, of an extension of a chunk: of whatever the parser keeps or skips until it
makes sense."""
MOST_PIPELINED = 16
"""Requests that may wait behind the one being answered while reading goes on, which is how a client's leaving is
noticed."""
MOST_UNANSWERED = 1000
"""Requests that may wait at all, since a single read can hold that many and more: a client that sends on is cut off."""

_FRAMING = (b"content-length", b"transfer-encoding")


class ClientConnection(HttpToolsProtocol):
    """One connection of a client."""

    _resuming = False
    """The parser reads a head that was read before."""
    _in_head = False
    _idle_bytes = 0
    """Read since a head or a piece of a body was complete."""
    _current: RequestResponseCycle | None = None
    """The request that is answered, or was last; those behind it wait in `pipeline`, the newest first."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The request that is answered is told, and not the newest alone; what waits behind it is never begun."""
        super().connection_lost(exc)
        if self._current is not None and not self._current.response_complete:
            self._current.disconnected = True
            self._current.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests. The timer of an idle connection runs on, unless a request begins."""
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._cut_off(errors.not_http(str(error)))
            return
        if self._idle_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._cut_off(errors.head_too_large(HEAD_BYTES))

    def _cut_off(self, error: ApiError) -> None:
        """Ends a connection that no request can be read from any more. Its client is told why, unless it would take
        that for the answer to an earlier request."""
        current = self._current
        own_body = current is not None and current is self.cycle and current.more_body and not current.response_started
        if current is None or current.response_complete or own_body:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        """An offer of another protocol may be passed over: then what follows the head is read for what it is.

        The parser stops at such a head as if it had no body, so a fresh one takes over, which is given the framing of
        the same head.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            framing = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._resuming = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._resuming:
            self._in_head = True
            self._unset_keepalive_if_required()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one behind the body (a trailer) is passed over, or it would pass for one of the head's."""
        if not self._resuming and self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._resuming:
            self._resuming = False
            return
        self._in_head = False
        self._idle_bytes = 0
        if len(self.pipeline) >= MOST_UNANSWERED:
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        if 0 < len(self.pipeline) < MOST_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """The next one's turn. The server would read on at each, however many wait."""
        super().on_response_complete()
        if len(self.pipeline) >= MOST_PIPELINED and not self.transport.is_closing():
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """The request has arrived, unless the parser merely stopped at the offer of another protocol."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
