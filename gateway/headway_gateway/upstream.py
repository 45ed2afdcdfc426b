"""Requests to replicas: persistent connections, raw bytes both ways, and failures sorted by their remedy.

It knows nothing of admission, pools or objectives. The pipeline decides which replica, and whether to try another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType

from headway_core.contract.header_names import INTERNAL_HEADERS, REQUEST_ID

from headway_gateway.http_connection import Header, HttpConnection, UpstreamError, UpstreamFailure

POOL_IDLE = 4.0
"""Seconds that an idle connection is kept: less than the 5 s after which some servers close theirs."""
CONNECT_TIMEOUT = 2.0

_FORWARDED = (b"content-type", b"accept", b"user-agent", b"traceparent", b"tracestate", b"x-stainless-retry-count")
"""All that a runtime learns of a client's headers: never Authorization, Host or cookies."""

_CONNECTION_SCOPED = frozenset(
    b"connection content-length date keep-alive proxy-authenticate proxy-connection server set-cookie te trailer"
    b" transfer-encoding upgrade".split()
)
_DROPPED = _CONNECTION_SCOPED | {name.encode() for name in INTERNAL_HEADERS} | {REQUEST_ID.encode()}
"""Not passed on to clients: headers of the runtime's connection, those the gateway's server writes, internal ones."""

HostPort = tuple[str, int]
"""IP address and port."""


class UpstreamResponse:
    """A replica's answer: status and headers now, the body as it comes. Leaving the context frees the connection."""

    def __init__(self, connection: HttpConnection, done: Callable[[], None]) -> None:
        self._connection = connection
        self._done = done
        self._first = {name: value.decode("latin-1") for name, value in reversed(connection.headers)}
        self.status = connection.status

    @property
    def is_stream(self) -> bool:
        """Server-sent events whose records can be read: not compressed."""
        kind = self.header("content-type") or ""
        return kind.partition(";")[0].strip().lower() == "text/event-stream" and self.header("content-encoding") is None

    def header(self, name: str) -> str | None:
        """One header of the answer, by its lower-case name, the first of several; None when absent."""
        return self._first.get(name.encode())

    def passed_on(self) -> list[Header]:
        """The headers that a client may see, as they came."""
        headers = self._connection.headers
        named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
        return [(name, value) for name, value in headers if name not in _DROPPED and name not in named]

    async def read_all(self) -> bytes:
        """The whole body. Raises UpstreamError like `read`."""
        parts: list[bytes] = []
        while part := await self._connection.read():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def pump(self, sink: Callable[[bytes], bool], caught_up: Callable[[], Awaitable[None]]) -> bytes:
        """The body: each chunk goes to `sink` as it arrives, the last is returned: see `HttpConnection.pump`."""
        return await self._connection.pump(sink, caught_up)

    async def __aenter__(self) -> UpstreamResponse:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done()


class Upstream:
    """The connections to all replicas. Make it inside a running event loop; `close` it at the end."""

    def __init__(self) -> None:
        self._idle: dict[HostPort, list[HttpConnection]] = {}
        self._all: set[HttpConnection] = set()

    async def post(self, address: HostPort, path: str, body: bytes, headers: Mapping[str, str]) -> UpstreamResponse:
        """Sends the request and waits for the head of the answer. Raises UpstreamError: there was none."""
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {_authority(address)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "\r\n"]).encode("latin-1")
        return await self._send(address, (head, body))

    async def get(self, address: HostPort, path: str, timeout_seconds: float) -> tuple[int, bytes]:
        """A control port's document: status and body. Raises UpstreamError; TimeoutError after `timeout_seconds`."""
        async with asyncio.timeout(timeout_seconds):
            request = (
                f"GET {path} HTTP/1.1\r\nhost: {_authority(address)}\r\naccept-encoding: identity\r\n\r\n".encode()
            )
            async with await self._send(address, (request,)) as response:
                return response.status, await response.read_all()

    async def close(self) -> None:
        """Drops every connection."""
        for connection in list(self._all):
            connection.close()
        self._idle.clear()
        # The transports close in the next step of the loop.
        await asyncio.sleep(0)

    async def _send(self, address: HostPort, data: tuple[bytes, ...]) -> UpstreamResponse:
        connection = self._take(address) or await self._connect(address)
        try:
            await connection.request(data)
        except BaseException as error:
            connection.close()
            if isinstance(error, UpstreamError) and error.failure is UpstreamFailure.STALE:
                # The other idle connections are as old: the next attempt shall use a new one.
                for idle in self._idle.pop(address, ()):
                    idle.close()
            raise
        return UpstreamResponse(connection, lambda: self._give_back(address, connection))

    async def _connect(self, address: HostPort) -> HttpConnection:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: HttpConnection(self._lost), *address
                )
        except OSError as error:
            late = f"took no connection within {CONNECT_TIMEOUT:g} s"
            why = late if isinstance(error, TimeoutError) else f"takes no connection: {error}"
            raise UpstreamError(UpstreamFailure.UNREACHABLE, f"{_authority(address)} {why}") from error
        self._all.add(connection)
        return connection

    def _take(self, address: HostPort) -> HttpConnection | None:
        """The idle connection that was used last: the least likely to have been closed meanwhile."""
        idle = self._idle.get(address)
        if not idle:
            return None
        connection = idle.pop()
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        return connection

    def _give_back(self, address: HostPort, connection: HttpConnection) -> None:
        if connection.done():
            connection.idle_timer = asyncio.get_running_loop().call_later(POOL_IDLE, connection.close)
            self._idle.setdefault(address, []).append(connection)

    def _lost(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
        for address, idle in list(self._idle.items()):
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[address]


def forwarded(headers: Iterable[Header], request_id: bytes, extra: Mapping[str, str]) -> dict[str, str]:
    """What a runtime gets to see: a few of the client's headers (names in lower case), and the gateway's own."""
    selected = {name.decode(): value.decode("latin-1") for name, value in headers if name in _FORWARDED}
    selected.setdefault("content-type", "application/json")
    # The gateway reads what it relays, so it must come uncompressed.
    return {**selected, "accept-encoding": "identity", REQUEST_ID: request_id.decode("latin-1"), **extra}


def _authority(address: HostPort) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
