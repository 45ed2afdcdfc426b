"""Two listening ports in one process, and their drain: not ready, no new requests, finish what runs and waits, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection
from typing import cast

from headway_edge.client_connection import ClientConnection
from headway_edge.listener import HttpServer, listen

from headway_gateway.app import Gateway
from headway_gateway.client_request import StopCause
from headway_gateway.settings import Settings

log = logging.getLogger("headway.gateway")

FINAL_SECONDS = 3.0
"""For sending errors to the requests that are not finished at the end of the drain."""


@contextlib.asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[tuple[Gateway, int, int]]:
    """A gateway that serves while the context lasts, with its serving and control ports.

    Raises:
        PortTaken: before anything else is begun.
        InvalidInput, OSError: the keys cannot be read.
    """
    unacknowledged = settings.stall_timeout + 1.0
    sockets = [listen(settings.host, port, unacknowledged) for port in (settings.port, settings.control_port)]
    gateway = Gateway(settings)
    servers = [HttpServer(app, settings.keep_alive, FINAL_SECONDS) for app in (gateway.front, gateway.control)]
    gateway.connections = cast(Collection[ClientConnection], servers[0].server_state.connections)
    async with gateway.running():
        tasks = [asyncio.create_task(server.serve([sock])) for server, sock in zip(servers, sockets, strict=True)]
        for server in servers:
            await server.listening.wait()
        try:
            yield gateway, sockets[0].getsockname()[1], sockets[1].getsockname()[1]
        finally:
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)


async def serve(settings: Settings, started: Callable[[Gateway, int, int], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `started` is called with the gateway and its two ports once both
    listen.

    A second signal ends the drain at once. Raises like `listening`.
    """
    ending = asyncio.Event()
    now = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (now if ending.is_set() else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with listening(settings) as (gateway, port, control_port):
        _tune_garbage_collection()
        started(gateway, port, control_port)
        await ending.wait()
        await drain(gateway, now)


def _tune_garbage_collection() -> None:
    """Exempts what exists by now from garbage collection, and collects less often. A request makes hundreds of objects
    that reference counting frees: a collection after every second request was a fifteenth of the request's cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


async def drain(gateway: Gateway, now: asyncio.Event) -> None:
    """Sheds new requests, lets what runs and waits finish within `drain_seconds`, and ends the rest with an error each.

    Idle client connections are closed at once, others behind their last response, since the next request would be shed.
    Once `now` is set, nothing is waited for.
    """
    pipeline, budget = gateway.pipeline, gateway.settings.drain_seconds
    log.info("going away: %d requests are under way and have %g s", len(pipeline.active), budget)
    gateway.pools.drain()
    for client_request in pipeline.active:
        client_request.closing = True
    for connection in list(gateway.connections):
        connection.finish()
    waits = [asyncio.ensure_future(event.wait()) for event in (pipeline.idle, now)]
    await asyncio.wait(waits, timeout=budget, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if pipeline.active:
        log.warning("the drain is over: %d requests end with an error", len(pipeline.active))
    for client_request in list(pipeline.active):
        client_request.stop(StopCause.DRAIN)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINAL_SECONDS):
            await pipeline.idle.wait()
