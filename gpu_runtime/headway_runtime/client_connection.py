"""uvicorn's HTTP protocol, cured of two faults: it loses the body of a request that offers another protocol, and when a client leaves
with several requests on one connection it tells only the last of them."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_PIPELINED = 16
"""Requests that may wait behind the one being answered while reading goes on, which is how a client's leaving is noticed."""

_FRAMING = (b"content-length", b"transfer-encoding")


class ClientConnection(HttpToolsProtocol):
    """One connection of a client."""

    _resuming = False
    """The parser reads a head that was read before."""
    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests whose answers are not complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Every request under way is told."""
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests. An offer of another protocol may be passed over: then what follows the head is read for what it is.

        The parser stops at such a head as if it had no body, so a fresh one takes over, which is given the framing of the same head.
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            framing = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
            self.parser = httptools.HttpRequestParser(self)
            self._resuming = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._resuming:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if not self._resuming:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._resuming:
            self._resuming = False
            return
        super().on_headers_complete()
        self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)
        if 1 < len(self._cycles) <= MOST_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The request has arrived, unless the parser merely stopped at the offer of another protocol."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
