"""One GET of a report on a short connection of its own. When a thousand pods are asked one after the other, and none
twice in a second, the connection pool of a general client costs more than the rest of a reconciliation.

HTTP/1.0 is asked for on purpose: such an answer has one plain body, and ends with it.
"""

from __future__ import annotations

import asyncio

from headway_core.errors import DocumentError

LARGEST_HEAD = 1 << 14
"""Bytes of status line and headers."""
LONGEST_NUMBER = 12
"""Digits of a Content-Length that is believed."""
_OK = 200


async def get(host: str, port: int, path: str, *, longest: int) -> bytes:
    """The body, `longest` bytes at most.

    Raises OSError or EOFError when the connection fails, DocumentError for a bad answer. The caller bounds the time.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=LARGEST_HEAD)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {name}:{port}\r\nAccept: application/json\r\n\r\n".encode())
        try:
            status, length = _head(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            raise DocumentError(f"has a head longer than {LARGEST_HEAD} bytes") from None
        if status != _OK:
            raise DocumentError(f"its {path} answers {status}")
        if length is not None and length <= longest:
            return await reader.readexactly(length)
        body = bytearray()
        while len(body) <= longest and (part := await reader.read(1 << 16)):
            body += part
        if len(body) > longest:
            raise DocumentError(f"is longer than {longest} bytes")
        return bytes(body)
    finally:
        writer.close()


def _head(head: bytes) -> tuple[int, int | None]:
    """(status, Content-Length or None). Raises DocumentError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise DocumentError(f"is no HTTP: {first[:60]!r}")
    for line in lines:
        name, _, value = line.partition(":")
        value = value.strip()
        if name.lower() == "content-length" and value.isdecimal() and len(value) <= LONGEST_NUMBER:
            return int(status), int(value)
    return int(status), None
