"""Requests to replicas: aiohttp's client, raw bytes both ways, and failures sorted by what may be done about them.

It knows nothing of admission, pools or promises. Which replica, and whether to try another, is the pipeline's to decide.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from enum import Enum
from types import SimpleNamespace, TracebackType
from typing import Any

import aiohttp
from headway_core.contract import INTERNAL_HEADERS, REQUEST_ID

Header = tuple[bytes, bytes]

POOL_IDLE = 4.0
"""Seconds that an idle connection is kept: under the 5 s after which the most hasty servers close theirs."""
CONNECT_TIMEOUT = 2.0
_BUFFER = 64 * 1024
"""Reading from a replica pauses when twice this much waits for a client."""

_FORWARDED = ("content-type", "accept", "user-agent", "traceparent", "tracestate", "x-stainless-retry-count")
"""All that a runtime learns of a client's headers: never Authorization, Host or cookies."""

_DROPPED = INTERNAL_HEADERS | {
    REQUEST_ID,
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "server",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
"""Of a runtime's headers: what belongs to that connection, what the gateway's own server writes, and what is internal."""


class Failure(Enum):
    """How a try came to nothing, before a byte of an answer was passed on."""

    CONNECT = "connect"
    """Nothing was sent: any other replica may try."""
    STALE = "stale"
    """A kept connection was closed under the request, and no byte came back: the usual race, worth one more try anywhere."""
    RESET = "reset"
    """The replica broke off: one other may try; a request that kills replicas must not meet them all."""


class UpstreamError(Exception):
    """A try that failed."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


class Response:
    """A replica's answer: status and headers now, the body as it comes. Leave the context to give the connection back or drop it."""

    def __init__(self, inner: aiohttp.ClientResponse) -> None:
        self._inner = inner
        self.status = inner.status

    @property
    def is_stream(self) -> bool:
        """Server-sent events whose records can be read: not compressed."""
        kind = self.header("content-type") or ""
        return kind.partition(";")[0].strip().lower() == "text/event-stream" and self.header("content-encoding") is None

    def header(self, name: str) -> str | None:
        """One header of the answer, whatever its case; None when absent."""
        return self._inner.headers.get(name)

    def passed_on(self) -> list[Header]:
        """The headers that a client may see, as they came."""
        named = {name.strip().lower() for value in self._inner.headers.getall("connection", []) for name in value.split(",")}
        return [
            (name, _printable(value))
            for name, value in self._inner.raw_headers
            if (lower := name.decode("latin-1").lower()) not in _DROPPED and lower not in named
        ]

    async def read(self) -> bytes:
        """All that has arrived since the last call, at least one byte; empty at the end.

        Raises:
            UpstreamError: the replica broke off.
        """
        try:
            return await self._inner.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.RESET, _words(error)) from error

    async def read_all(self) -> bytes:
        """The whole body. Raises UpstreamError like `read`."""
        try:
            return await self._inner.read()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.RESET, _words(error)) from error

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._inner.content.at_eof():
            self._inner.release()
        else:
            # Closing the socket is how a runtime learns that nobody waits for the answer any more.
            self._inner.close()


class Upstream:
    """The connections to all replicas. Make it inside a running event loop; `close` it at the end."""

    def __init__(self) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=_BUFFER,
            max_field_size=65_536,
            trace_configs=[trace],
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Sends the request and waits for the head of the answer.

        Raises:
            UpstreamError: there was none.
        """
        seen = SimpleNamespace(reused=False)
        try:
            inner = await self._session.post(
                url,
                data=body if len(body) < _BUFFER else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=seen,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(Failure.CONNECT, _words(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.STALE if seen.reused else Failure.RESET, _words(error)) from error
        return Response(inner)

    async def get(self, url: str, patience: float) -> tuple[int, bytes]:
        """A small document from a control port: status and body. Raises UpstreamError; TimeoutError after `patience` seconds."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=patience), allow_redirects=False) as inner:
                return inner.status, await inner.read()
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(Failure.CONNECT, _words(error)) from error
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(Failure.RESET, _words(error)) from error

    async def close(self) -> None:
        """Closes every connection."""
        await self._session.close()


def forwarded(headers: Iterable[Header], request_id: bytes, extra: Mapping[str, str]) -> dict[str, str]:
    """What a runtime gets to see: a few of the client's headers, and the gateway's own."""
    kept = {lower: value.decode("latin-1") for name, value in headers if (lower := name.decode("latin-1").lower()) in _FORWARDED}
    kept.setdefault("content-type", "application/json")
    # The gateway reads what it relays, so it must come uncompressed.
    return {**kept, "accept-encoding": "identity", REQUEST_ID: request_id.decode("latin-1"), **extra}


async def _mark_reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True


def _printable(value: bytes) -> bytes:
    """A header value without control characters: no server would send it on, and one odd header must not lose the answer."""
    return bytes(byte for byte in value if byte >= 0x20 and byte != 0x7F) if any(byte < 0x20 or byte == 0x7F for byte in value) else value


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
