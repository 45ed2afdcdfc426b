"""The server process from start to exit: sockets, the two HTTP servers, signals, drain.

After SIGTERM or SIGINT:

1. `/ready` answers 503 and new requests are rejected;
2. running requests may finish within `--drain-seconds`;
3. the others get an error;
4. connections close;
5. the engine process ends, then this one.

A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from headway_core.errors import EngineDied
from headway_edge.listener import HttpServer, PortTaken, listen

from headway_runtime.server.app import control_app, serving_app
from headway_runtime.server.metrics import RuntimeMetrics
from headway_runtime.server.prompts import PromptEncoder
from headway_runtime.server.replica import Replica
from headway_runtime.settings import Settings, SettingsError
from headway_runtime.text.tokenizer import Tokenizer

CLOSING_SECONDS = 5.0
"""How long responses and connections may take to end once nothing is computed any more."""

log = logging.getLogger("headway.runtime")


class Server:
    """One replica's server process. `run` returns the exit status."""

    def __init__(self, settings: Settings) -> None:
        """Opens tokenizer and sockets. Raises CheckpointError, SettingsError."""
        self._settings = settings
        prompts = PromptEncoder(Tokenizer.open(settings.engine.model_path))
        self._serving = _listen(settings.host, settings.port, "--port", settings.stalled_client_seconds)
        self._control = _listen(
            settings.control_host, settings.control_port, "--control-port", settings.stalled_client_seconds
        )
        self._replica = Replica(settings, prompts, RuntimeMetrics())
        self._stop_requested = asyncio.Event()
        self._abort_requested = asyncio.Event()
        self._signal: int | None = None

    async def run(self) -> int:
        """Serves until a signal (returns 0), a second one (128 + its number) or the end of the engine (its status, at
        least 1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        log.info("listening on %s, control on %s", _url(self._serving), _url(self._control))
        servers = [
            HttpServer(app, self._settings.keep_alive_seconds, CLOSING_SECONDS)
            for app in (serving_app(self._replica), control_app(self._replica))
        ]
        serving = [
            asyncio.create_task(server.serve(sockets=[sock]))
            for server, sock in zip(servers, (self._serving, self._control), strict=True)
        ]
        try:
            return await self._run_until_stopped()
        finally:
            for server in servers:
                server.should_exit = True
                server.force_exit = self._abort_requested.is_set()
            await asyncio.gather(*serving)
            await self._replica.stop()

    async def _run_until_stopped(self) -> int:
        replica = self._replica
        if not await self._start_replica():
            return 0 if self._stop_requested.is_set() else (await replica.stop() or 1)
        log.info("ready: %s serves %s", _url(self._serving), replica.model_name)
        if self._settings.engine.pace is not None:
            log.warning(
                "this is an emulated accelerator (--pace %s): its speed says nothing about this machine",
                self._settings.engine.pace,
            )
        watching = asyncio.create_task(replica.watch_policy())
        await _wait_for_first(self._stop_requested.wait(), replica.engine.died.wait())
        watching.cancel()
        if self._stop_requested.is_set():
            replica.begin_drain()
            log.info(
                "shutting down: %d requests in flight, at most %g s", replica.in_flight, self._settings.drain_seconds
            )
            await _wait_for_first(
                replica.wait_until_drained(self._settings.drain_seconds),
                self._abort_requested.wait(),
                replica.engine.died.wait(),
            )
        if replica.engine.died.is_set():
            log.error("the engine process ended; this process ends too, to be restarted")
            replica.engine_failed()
        replica.fail_all()
        await _wait_for_first(replica.wait_until_idle(CLOSING_SECONDS), self._abort_requested.wait())
        if self._abort_requested.is_set():
            return 128 + (self._signal or 0)
        return (await replica.stop() or 1) if replica.engine.died.is_set() else 0

    async def _start_replica(self) -> bool:
        """Whether the engine became ready before a signal."""
        starting = asyncio.create_task(self._replica.start())
        await _wait_for_first(asyncio.shield(starting), self._stop_requested.wait())
        if not starting.done():
            starting.cancel()
            return False
        try:
            starting.result()
        except EngineDied as error:
            log.error("%s", error)
            self._replica.engine_failed()
            return False
        return True

    def _on_signal(self, number: int) -> None:
        if self._stop_requested.is_set():
            self._signal = number
            self._abort_requested.set()
        self._stop_requested.set()


async def _wait_for_first(*waits: object) -> None:
    """Returns when one of the awaitables is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listen(host: str, port: int, flag: str, stalled_seconds: float) -> socket.socket:
    """A listening socket. Raises SettingsError when the address cannot be bound."""
    try:
        return listen(host, port, stalled_seconds + 5.0)
    except PortTaken as error:
        raise SettingsError(str(error), flag) from None


def _url(sock: socket.socket) -> str:
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
