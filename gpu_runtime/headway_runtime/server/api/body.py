"""Reading a request body under limits that count the bytes and the seconds actually spent, whatever the headers
claim."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from headway_runtime.server.api.errors import slow_body, too_large

_LINGER_BYTES = 1 << 20
_LINGER_SECONDS = 0.5


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(receive: Receive, declared: int | None, limit: int, seconds: float) -> bytes:
    """The whole body.

    A body that is declared too long is refused before its first byte is asked for: a client that waits for ``100
    Continue`` never sends it.

    Raises:
        ApiError: 413 past `limit` bytes, 408 past `seconds`.
        ClientGone: the client closed before the end.
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
                    raise ClientGone
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
    """Reads and drops a little of what a refused client still sends.

    Closing a socket with unread input resets it, and the reset may overtake the answer; so the answer gets a moment's
    head start.
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


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection (or the answer is complete)."""
    while (await receive())["type"] != "http.disconnect":
        pass
