"""One persistent HTTP/1.1 connection to a replica: each chunk of a response is handed on in the step it arrives in.

A general HTTP client wakes a task for each chunk, and that costs more than relaying the chunk. Here `pump` takes a
function that gets each chunk at once. It returns False when it is behind; then reading pauses until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import cast

import httptools

Header = tuple[bytes, bytes]

_BUFFER = 128 * 1024
"""Reading pauses while more than this waits to be taken."""


class UpstreamFailure(Enum):
    """How an attempt failed before a byte of the response was passed on."""

    UNREACHABLE = "unreachable"
    """No connection was made, so nothing was sent: any other replica may try."""
    UNAVAILABLE = "unavailable"
    """The replica takes no new request (503), for example because it drains: any other replica may try."""
    STALE = "stale"
    """A kept connection was closed under the request before any byte came back: usual, and worth one more attempt."""
    RESET = "reset"
    """The replica broke off: one other may try; a request that kills replicas must not meet them all."""


class UpstreamError(Exception):
    """A failed attempt."""

    def __init__(self, failure: UpstreamFailure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


class HttpConnection(asyncio.Protocol):
    """One connection; one request at a time. `lost` is called when it can no longer be used."""

    def __init__(self, lost: Callable[[HttpConnection], None]) -> None:
        self.status = 0
        self.headers: list[Header] = []
        """Names in lower case."""
        self.complete = False
        """The answer has wholly arrived."""
        self.reusable = False
        self.idle_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._lost = lost
        self._busy = False
        self._used_before = False
        self._received = False
        self._failure: str | None = None
        self._waiting = 0
        """Bytes read since the body was last taken."""
        self._paused = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._behind = False
        self._chunks: list[bytes] = []
        # Bound once, the list's own method: the parser calls it for every chunk of every stream.
        self.on_body = self._chunks.append
        self._parser = httptools.HttpResponseParser(self)

    # ------------------------------------------------------------ a request and its answer

    async def request(self, data: tuple[bytes, ...]) -> None:
        """Sends a whole request and waits for the head of its answer.

        Raises:
            UpstreamError: there was none.
        """
        self.status, self.headers, self.complete, self.reusable = 0, [], False, False
        self._busy = True
        self._received = False
        self._transport.writelines(data)
        while not self.status and self._failure is None:
            await self._wait()
        if not self.status:
            stale = self._used_before and not self._received
            raise UpstreamError(UpstreamFailure.STALE if stale else UpstreamFailure.RESET, self._failure or "no answer")

    async def read(self) -> bytes:
        """What has arrived of the body since the last call, at least one byte; empty at the end.

        Raises:
            UpstreamError: the replica broke off.
        """
        while not self._chunks and not self.complete:
            self._check()
            await self._wait()
        return self._take()

    async def pump(self, sink: Callable[[bytes], bool], caught_up: Callable[[], Awaitable[None]]) -> bytes:
        """Gives each chunk of the body to `sink` in the loop step it arrives in; returns what came with the end.

        When `sink` returns False it is behind: reading pauses until `caught_up` has returned.

        Raises:
            UpstreamError: the replica broke off.
        """
        self._sink = sink
        try:
            while True:
                if self._chunks and not self.complete:
                    self._behind = not sink(self._take())
                if self._behind:
                    await caught_up()
                    self._behind = False
                elif self.complete:
                    return self._take()
                else:
                    self._check()
                    await self._wait()
        finally:
            self._sink = None
            self._behind = False

    def done(self) -> bool:
        """Ends the use of the connection. Returns True if it can be reused; else it is closed and the replica stops."""
        self._busy = False
        self._used_before = True
        if self.complete and self.reusable and self._failure is None and not self._chunks:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Drops the connection at once."""
        self._transport.abort()

    # ------------------------------------------------------------ what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        # uvloop's transports are not subclasses of asyncio's, so only a cast can say it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Part of an answer; without a question it is the end of the connection."""
        if not self._busy or self._failure is not None:
            self.close()
            return
        self._received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._failure = f"what it answers is not HTTP: {error}"
            self.close()
        chunks = self._chunks
        if self._sink is not None and chunks and not self._behind and not self.complete:
            self._behind = not self._sink(chunks.pop() if len(chunks) == 1 else self._take())
            if not self._behind and self._failure is None:
                return
        self._waiting += len(data)
        if self._waiting > _BUFFER:
            self._pause()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed: the proper end of an answer without a length, a failure of any other."""
        if self.status and not self.complete and error is None and self._until_closed():
            self.complete = True
        if self._failure is None:
            self._failure = f"it closed the connection ({error})" if error else "it closed the connection"
        self._lost(self)
        self._wake()

    # ------------------------------------------------------------ what the parser says

    def on_message_begin(self) -> None:
        """A head begins."""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of it."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete; an interim one (1xx) is passed over."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self.status:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()

    # ------------------------------------------------------------ inside

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._waiting = 0
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        return data

    def _check(self) -> None:
        if self._failure is not None:
            raise UpstreamError(UpstreamFailure.RESET, self._failure)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _until_closed(self) -> bool:
        """Whether the body ends with the connection, because nothing else says where it ends."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
