"""The wire between the server process and the engine process: length-prefixed msgpack maps over a local stream socket.

Both ends send at most one message a step. Neither ever waits for the other while it has work: the engine's end
(`EngineChannel`) buffers what the socket does not take at once and declares the server dead when that grows past a
bound; the server's end (`read_messages`, `frame`) is asyncio's. What a message says is in
`headway_runtime.ipc.messages`; nothing here knows.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgpack  # type: ignore[import-untyped]  # ships no type information

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""A longer frame can only come from a broken stream; the reader gives up instead of allocating it."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Output that the server may leave unread. A step writes some kilobytes: only minutes without reading get here."""

_PREFIX = 4
_READ_BYTES = 1 << 18


class ChannelClosed(Exception):
    """The other process is gone, or as good as gone."""


def frame(message: dict[str, Any]) -> bytes:
    """One message as it goes over the socket: four bytes of length, big-endian, then msgpack."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return len(body).to_bytes(_PREFIX, "big") + body


class FrameDecoder:
    """Cuts a byte stream back into messages, however the socket split it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes. Raises ChannelClosed when the stream cannot be one of ours."""
        self._buffer += data
        messages = []
        at = 0
        while len(self._buffer) - at >= _PREFIX:
            length = int.from_bytes(self._buffer[at : at + _PREFIX], "big")
            if length > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"the stream is broken: a message of {length} bytes, above {MAX_MESSAGE_BYTES}")
            if len(self._buffer) - at - _PREFIX < length:
                break
            at += _PREFIX
            with memoryview(self._buffer) as view:
                messages.append(msgpack.unpackb(view[at : at + length], raw=False, strict_map_key=False))
            at += length
        del self._buffer[:at]
        return messages


async def read_messages(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Every message until the other end closes."""
    decoder = FrameDecoder()
    while data := await reader.read(_READ_BYTES):
        for message in decoder.feed(data):
            yield message


class EngineChannel:
    """The engine's end: reads what is there without waiting, writes without ever blocking."""

    def __init__(self, sock: socket.socket, max_unsent: int = MAX_UNSENT_BYTES) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = FrameDecoder()
        self._unsent = bytearray()
        self._max_unsent = max_unsent

    def receive(self, wait: bool) -> list[dict[str, Any]]:
        """Messages that have arrived; `wait` waits for at least one, and flushes pending output meanwhile. Raises
        ChannelClosed when the server's end is closed."""
        messages: list[dict[str, Any]] = []
        while True:
            self._flush()
            messages += self._read_available()
            if messages or not wait:
                return messages
            select.select([self._socket], [self._socket] if self._unsent else [], [])

    def send(self, message: dict[str, Any]) -> None:
        """Hands over one message. Raises ChannelClosed when the server is gone or leaves `max_unsent` bytes unread."""
        self._unsent += frame(message)
        self._flush()
        if len(self._unsent) > self._max_unsent:
            raise ChannelClosed(f"the server has left {len(self._unsent)} bytes unread: it is taken for dead")

    def _read_available(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the server closed the channel")
            messages += self._decoder.feed(data)
            if len(data) < _READ_BYTES:
                return messages

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            del self._unsent[:sent]
