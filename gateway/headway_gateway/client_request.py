"""One request's client side: reading its body within limits, answering, and knowing at once when the client has gone.

The ASGI callables live here and nowhere else. Everything that can end a request from outside (the client left, took
nothing, the time or the drain budget is spent) is one call: `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

from headway_core.contract.header_names import REQUEST_ID, REQUEST_ID_PATTERN
from headway_edge.client_connection import CONNECTION, ClientConnection, Header

from headway_gateway import error_responses
from headway_gateway.body_budget import BodyReservation
from headway_gateway.error_responses import ErrorResponse, RequestFailed
from headway_gateway.http_connection import UpstreamFailure

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_JSON = b"application/json"
_LINGER_BYTES = 1 << 20
_LINGER_SECONDS = 1.0
_SLOWEST_UPLOAD = 1024.0
"""Bytes per second that an upload must reach in all, beyond the first seconds that any upload has."""


class StopCause(Enum):
    """Why a request was stopped from outside."""

    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"
    TIMEOUT = "timeout"
    DRAIN = "drain"


class RequestStopped(Exception):
    """Something outside ended the request."""

    def __init__(self, cause: StopCause) -> None:
        super().__init__(cause.value)
        self.cause = cause


class ClientRequest:
    """One request and its response.

    `arrival`: when its last byte came, since a slow upload is not the server's time. `started`: the status line is out.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))
        given = self.headers.get(REQUEST_ID.encode(), b"")
        self.request_id = given if REQUEST_ID_PATTERN.fullmatch(given) else f"req-{secrets.token_hex(12)}".encode()
        self.arrival = 0.0
        self.started = False
        self.finished = False
        self.cause: StopCause | None = None
        self.closing = False
        """The connection ends with this response: this gateway is going away."""
        self.sending_since: float | None = None
        """Since when the client has taken nothing although something is there for it."""
        self._connection: ClientConnection = scope["extensions"][CONNECTION]
        self._transport: asyncio.WriteTransport = self._connection.transport
        self._flow = self._connection.flow
        self._loop = asyncio.get_running_loop()
        self._chunked = scope["http_version"] != "1.0"
        self._receive = receive
        self._send = send
        self._body_read = False
        self._task: asyncio.Task[Any] | None = None
        self.failed_attempts: list[tuple[str, UpstreamFailure]] = []
        """Replicas that failed this request, and how."""
        self._unsent = 0

    # ------------------------------------------------------------ the request

    async def read_body(self, limit: int, idle_timeout: float, reservation: BodyReservation) -> bytes:
        """The whole body; sets `arrival`. No time is lost on a body that announces itself too large.

        Raises:
            RequestFailed: 413 beyond `limit` bytes actually read, 408 when `idle_timeout` seconds pass without progress
                or the upload crawls, 429 when `reservation` cannot grow as the body does.
            RequestStopped: the connection closed first.
        """
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise RequestFailed(error_responses.too_large(limit))
        body = self._connection.buffered_body()
        if body is None:
            body = await self._upload(limit, idle_timeout, reservation)
        elif len(body) > limit:
            raise RequestFailed(error_responses.too_large(limit))
        else:
            reservation.grow(len(body))
        self.arrival = self._loop.time()
        self._body_read = True
        return body

    async def _upload(self, limit: int, idle_timeout: float, reservation: BodyReservation) -> bytes:
        loop = self._loop
        begun = loop.time()
        parts: list[bytes] = []
        size = 0
        while True:
            left = min(idle_timeout, begun + idle_timeout + size / _SLOWEST_UPLOAD - loop.time())
            try:
                async with asyncio.timeout(left):
                    message = await self._receive()
            except TimeoutError:
                raise RequestFailed(error_responses.too_slow(idle_timeout)) from None
            if message["type"] == "http.disconnect":
                raise RequestStopped(StopCause.CLIENT_GONE)
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise RequestFailed(error_responses.too_large(limit))
            reservation.grow(size)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    # ------------------------------------------------------------ being stopped

    @contextlib.contextmanager
    def stoppable(self, limit: float) -> Iterator[None]:
        """What runs inside ends at once on `stop`, when the client disconnects, or `limit` seconds after arrival.

        Raises:
            RequestStopped: one of them happened.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request runs in a task")
        before = task.cancelling()
        self._task = task
        # A callback, since a task that waits for the disconnect would cost more than everything else here.
        self._connection.watch(lambda: self.stop(StopCause.CLIENT_GONE))
        timer = self._loop.call_at(self.arrival + limit, self.stop, StopCause.TIMEOUT)
        try:
            yield
        except asyncio.CancelledError:
            # Taken back only if it was ours and nothing else cancelled this task.
            if self.cause is None or task.uncancel() > before:
                raise
            raise RequestStopped(self.cause) from None
        finally:
            self._task = None
            timer.cancel()
            self._connection.watch(None)

    def stop(self, cause: StopCause) -> None:
        """Ends what runs, from outside: `RequestStopped` is raised where the context ends. The first cause counts."""
        if self.cause is None and self._task is not None and not self.finished:
            self.cause = cause
            self._task.cancel()

    def is_stalled(self, now: float, limit: float) -> bool:
        """Whether the client took nothing for `limit` seconds while something waits for it. Call it every second."""
        if self.sending_since is None:
            return False
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self.sending_since = now
        self._unsent = unsent
        return now - self.sending_since >= limit

    async def abort(self) -> None:
        """Drops the connection without waiting for what the client never took."""
        self._transport.abort()
        await asyncio.sleep(0)

    # ------------------------------------------------------------ the response

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Sends the status line; `x-request-id` is added, once."""
        await self._send({"type": "http.response.start", "status": status, "headers": self._fields(headers)})

    def begin(self, status: int, headers: Iterable[Header], first: bytes) -> bool:
        """`start` and the first part of a body without a length, in this very step of the loop: see `write_now`."""
        self._connection.begin(status, self._fields(headers), first)
        return not self._flow.write_paused

    def _fields(self, headers: Iterable[Header]) -> list[Header]:
        self.started = True
        fields = [*headers, (REQUEST_ID.encode(), self.request_id)]
        if self.closing:
            fields.append((b"connection", b"close"))
        return fields

    async def write(self, data: bytes) -> None:
        """Sends a part of the body; returns when the client is not too far behind."""
        self.sending_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.sending_since = None

    def write_now(self, data: bytes) -> bool:
        """Writes a part of a body without a length, past the framework, in this step; False: the client is behind.

        Then `caught_up` must have returned before the next call.
        """
        transport = self._transport
        if not transport.is_closing():
            # As the server does for a body without a length: chunked, but plain in HTTP/1.0, which has no chunks.
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._flow.write_paused

    async def caught_up(self) -> None:
        """Returns when the client has taken enough of what was written."""
        await self.write(b"")

    async def finish(self, data: bytes = b"") -> None:
        """Sends the last part of the body."""
        self.finished = True
        self.sending_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self.sending_since = None

    async def send_error(self, response: ErrorResponse) -> None:
        """Sends an error of the gateway's own: as the response if none has begun, else as the stream's last event."""
        if self.finished:
            return
        if self.started:
            await self.finish(response.event())
            return
        body = response.body()
        headers = [(name.encode(), value.encode()) for name, value in response.headers.items()]
        headers += [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
        self.closing = self.closing or response.close or not self._body_read
        await self.start(response.status, headers)
        if self._body_read:
            await self.finish(body)
            return
        await self.write(body)
        await self._linger()
        await self.finish()

    async def _linger(self) -> None:
        """Reads a little of what still comes: closing on unread bytes resets the connection and loses the response."""
        taken = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while taken < _LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    taken += len(message.get("body", b""))
