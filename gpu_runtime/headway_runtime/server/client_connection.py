"""uvicorn's HTTP protocol, plus:

1. a size limit for request heads, trailers and chunk extensions;
2. limits for pipelined requests;
3. ``Upgrade`` headers are ignored, and the request's body is kept;
4. a disconnect reaches the request being answered, not only the newest;
5. bytes of a body that nobody reads do not keep an idle connection open.
"""

from __future__ import annotations

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway_runtime.server.api import errors
from headway_runtime.server.api.errors import ApiError

HEAD_BYTES = 64 * 1024
"""Most bytes of a request head, of trailers, of a chunk extension: of what the parser reads before an event."""
MOST_PIPELINED = 16
"""Requests that may wait behind the one being answered while reading goes on; reading is what notices a disconnect."""
MOST_UNANSWERED = 1000
"""Most requests that may wait: a single read can hold more, and such a client's connection is closed."""

_FRAMING = (b"content-length", b"transfer-encoding")


class ClientConnection(HttpToolsProtocol):
    """One connection of a client."""

    _resuming = False
    """The parser reads the framing headers of a head that it has read before."""
    _in_head = False
    _idle_bytes = 0
    """Bytes read since the last complete head or part of a body."""
    _current: RequestResponseCycle | None = None
    """The request being answered, or the last one; those behind it wait in `pipeline`, the newest first."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Passes the disconnect to the request being answered, too; requests behind it never start."""
        super().connection_lost(exc)
        if self._current is not None and not self._current.response_complete:
            self._current.disconnected = True
            self._current.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests. The timer of an idle connection runs on unless a request begins."""
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._close_with(errors.not_http(str(error)))
            return
        if self._idle_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._close_with(errors.head_too_large(HEAD_BYTES))

    def _close_with(self, error: ApiError) -> None:
        """Closes a connection from which no request can be read any more. Sends the error, unless the client would take
        it for the response to an earlier request."""
        current = self._current
        own_body = current is not None and current is self.cycle and current.more_body and not current.response_started
        if current is None or current.response_complete or own_body:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        """Feeds the parser; an ``Upgrade`` is ignored (RFC 9110, 7.8), and the bytes behind its head are its body.

        The parser stops behind such a head, so a new parser goes on; it gets the framing headers of that head first.
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
        """A part of the target."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. A trailer is dropped: it would count as one of the head's."""
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
        """A part of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Starts the next request. uvicorn would resume reading here, however many requests wait."""
        super().on_response_complete()
        if len(self.pipeline) >= MOST_PIPELINED and not self.transport.is_closing():
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """The request is complete, unless the parser stopped at an ``Upgrade``."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
