"""Reading a request body: limits in bytes and seconds, counted as the body arrives, whatever Content-Length says."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from headway_runtime.server.api.errors import slow_body, too_large

_LINGER_BYTES = 1 << 20
_LINGER_SECONDS = 0.5


class ClientDisconnected(Exception):
    """The client closed the connection: a response would reach nobody."""


async def read_body(receive: Receive, declared: int | None, limit: int, seconds: float) -> bytes:
    """The whole body. A declared length over `limit` is refused unread: a client awaiting ``100 Continue`` sends none.

    Raises:
        ApiError: 413 past `limit` bytes, 408 past `seconds`.
        ClientDisconnected: the client closed the connection before the end of the body.
    """
    if declared is not None and declared > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise slow_body(seconds) from None


async def linger(receive: Receive) -> None:
    """Reads and drops what a refused client still sends, up to 1 MiB and 0.5 s: nginx's `lingering_close`.

    Closing a socket with unread input resets the connection, and the reset may reach the client before the response.
    """
    size = 0
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while size < _LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
