"""A listening socket and a uvicorn server for it, in a process that handles its signals itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from headway_core.errors import HeadwayError

from headway_edge.client_connection import ClientConnection

_BACKLOG = 4096


class PortTaken(HeadwayError):
    """A port cannot be listened on; the message says which and why."""


def listen(host: str, port: int, unacknowledged_seconds: float) -> socket.socket:
    """A listening socket. A client that acknowledges no bytes for `unacknowledged_seconds` is reset by the kernel.

    Raises PortTaken.
    """
    ipv6 = ":" in host
    try:
        sock = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ipv6 else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Accepted sockets inherit it. To close such a connection would not end it: its last bytes still wait.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unacknowledged_seconds * 1000))
    return sock


class HttpServer(uvicorn.Server):
    """uvicorn for one ASGI application, over `ClientConnection` and without signal handling: two servers share a
    process, and a signal starts a drain there.

    An idle connection is closed after `keep_alive` seconds; when the server ends, responses have `closing_seconds`
    left. `listening` is set once it accepts connections.
    """

    def __init__(self, app: Any, keep_alive: float, closing_seconds: float) -> None:
        config = uvicorn.Config(
            app,
            http=ClientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # handed to call_later, which takes any number
            timeout_graceful_shutdown=int(closing_seconds),
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting connections."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
