"""uvicorn's HTTP protocol, plus:

1. a limit of size and time for the head of a request, and of size for trailers and chunk extensions;
2. a limit for pipelined requests;
3. `Upgrade` headers are ignored;
4. a disconnect cancels the request that is being answered, also when others are pipelined behind it;
5. responses in HTTP/1.0.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from collections.abc import Callable, Sequence

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway_edge.error_body import error_body

Header = tuple[bytes, bytes]

CONNECTION = "headway.connection"
"""Key in the scope's extensions: the `ClientConnection`, which ASGI itself does not show."""
HEAD_SECONDS = 30.0
HEAD_BYTES = 64 * 1024
"""Limit for a head, for the trailers of a body and for an extension of a chunk: for all that the parser reads before it
reports something."""
MAX_PIPELINED = 16
"""Requests that may wait behind the one being answered while reading goes on; only by reading is a disconnect
noticed."""
MAX_UNANSWERED = 1000
"""Requests that may wait at all, since a single read can contain more: the connection of a client that exceeds it is
closed."""

_FRAMING = (b"content-length", b"transfer-encoding")


class ClientConnection(HttpToolsProtocol):
    """One connection of a client."""

    _head_timer: TimerHandle | None = None
    _idle_bytes = 0
    """Bytes read since the last complete head or part of a body."""
    _resuming = False
    """The parser reads a head that was read before."""
    _current: RequestResponseCycle | None = None
    """The request that is answered, or was last; those behind it wait in `pipeline`, the newest first."""
    _lost: Callable[[], None] | None = None

    # ------------------------------------------------------------ what a request may use beside ASGI

    def buffered_body(self) -> bytes | None:
        """The body of the request that is being answered, if all of it has come; None: it has to be received."""
        cycle = self._current
        if cycle is None or cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def begin(self, status: int, headers: Sequence[Header], first: bytes) -> None:
        """Sends the head of a response without a length and the first part of its body: what uvicorn would send, in one
        write instead of two."""
        cycle = self._current
        if cycle is None:
            raise RuntimeError("no request is being answered")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = cycle.scope["http_version"] != "1.0"
        head = [STATUS_LINE[status], *(b"%b: %b\r\n" % field for field in headers)]
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        if cycle.chunked_encoding:
            head.append(b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(first), first))
        else:
            head.append(b"\r\n%b" % first)
        if not self.transport.is_closing():
            self.transport.write(b"".join(head))

    def watch(self, lost: Callable[[], None] | None) -> None:
        """Calls `lost` when the connection closes, at once if it is closed already; None: no longer."""
        self._lost = lost
        if lost is None:
            return
        if self.transport.is_closing():
            lost()
        # Leaving is noticed by reading.
        self._read_on()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # uvicorn narrows it the same way
        """A connection that sends nothing is closed like one that is idle.

        Unlike uvicorn's, it does not look up the addresses: nothing here needs them, and they cost more than an
        admission decision.
        """
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.scheme = "http"
        self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnects the request that is being answered; uvicorn disconnects the newest only. Requests behind it are
        never begun."""
        self._end_of_head()
        super().connection_lost(exc)
        if self._current is not None and not self._current.response_complete:
            self._current.disconnected = True
            self._current.message_event.set()
        if self._lost is not None:
            self._lost()

    def finish(self) -> None:
        """Takes no request after those that are under way: closed at once when it is idle, else behind the last answer.

        A new connection, or one that is sending a head, stays open: its client has begun a request and shall get a
        response.
        """
        if self.pipeline:
            self.pipeline[0][0].keep_alive = False
        elif self._current is not None and not self._current.response_complete:
            self._current.keep_alive = False
        elif self._head_timer is None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Counts the bytes that have not become a request: the parser itself would keep any amount.

        The timer of an idle connection runs on until a request begins: the rest of a body that no request reads does
        not keep the connection open.
        """
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._close_with(
                400,
                f"this is not a valid HTTP request ({error}): check that the client speaks plain HTTP to this port, "
                "and that no proxy changes what it sends",
                "invalid_http_request",
            )
            return
        if self._idle_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._close_with(
                431,
                f"the headers exceed the limit of {HEAD_BYTES} bytes: send fewer or shorter ones",
                "headers_too_large",
            )

    def _close_with(self, status: int, message: str, code: str) -> None:
        """Closes a connection from which no further request can be read. Sends the error, unless the client would take
        it for the response to an earlier request."""
        current = self._current
        own_body = current is not None and current is self.cycle and current.more_body and not current.response_started
        if current is None or current.response_complete or own_body:
            body = error_body(message, "invalid_request_error", code)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        """Feeds the parser; an ``Upgrade`` is ignored (RFC 9110, 7.8), and the bytes behind its head are its body.

        Some clients offer HTTP/2 that way in every request. The parser stops behind such a head, so a new parser goes
        on; it gets the framing headers of that head first.
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
        """A request begins; its head must be complete in time."""
        if self._resuming:
            return
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ASGI: extensions hold anything
        self._end_of_head()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; one behind the body (a trailer) is passed over, or it would pass for one of the head's."""
        if not self._resuming and self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._resuming:
            self._resuming = False
            return
        self._end_of_head()
        if len(self.pipeline) >= MAX_UNANSWERED:
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        if self.pipeline:
            self._read_on()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Begins the next pipelined request. uvicorn would resume reading however many wait."""
        super().on_response_complete()
        if len(self.pipeline) >= MAX_PIPELINED and not self.transport.is_closing():
            self.flow.pause_reading()

    def _read_on(self) -> None:
        if len(self.pipeline) < MAX_PIPELINED and not self.transport.is_closing():
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, _Unframed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        """The request has arrived, unless the parser merely stopped at the offer of an upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _end_of_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._idle_bytes = 0


class _Unframed:
    """An application before a client of HTTP/1.0: a body without a length ends with the connection, where the server
    would chunk it."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        self._app = app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One request."""
        # Without a start, the connection has begun the answer: a stream, which has no length.
        cycle, unframed = self._cycle, True

        async def without_chunks(message: ASGISendEvent) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
                # Decided here, the server does not decide it; what it compares bodies with is then ours to say.
                cycle.chunked_encoding = False if unframed else None
            elif message["type"] == "http.response.body" and unframed:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await self._app(scope, receive, without_chunks)
