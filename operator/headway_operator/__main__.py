"""`headway-operator`: the composition root. Flags, credentials, then five things that run until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from typing import Any

from headway_operator.cache import Cache
from headway_operator.controller import Controller
from headway_operator.executor import Executor
from headway_operator.kube import Kube, KubeError
from headway_operator.lease import Lease
from headway_operator.metrics import HealthServer
from headway_operator.observe import Observer
from headway_operator.reconcile import Reconciler
from headway_operator.settings import Settings, parse
from headway_operator.watch import Watch, quieten

log = logging.getLogger("headway_operator")


def main() -> None:
    """Runs until SIGTERM or SIGINT. Exit status 1 when it cannot start, with one line that says why."""
    settings = parse()
    logging.basicConfig(
        level=settings.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    quieten()
    try:
        asyncio.run(run(settings))
    except (KubeError, OSError) as error:
        raise SystemExit(f"headway-operator: {error}") from None


async def run(settings: Settings) -> None:
    """Raises KubeError without credentials, OSError when the port is taken."""
    kube = Kube(settings.concurrency, settings.lease_duration / 3)
    lease = Lease(
        kube, settings.lease_namespace, settings.lease_name, settings.identity, duration=settings.lease_duration
    )
    observer = Observer(settings)
    executor = Executor(kube, lambda: lease.held)

    def make_reconciler(cache: Cache) -> Reconciler:
        return Reconciler(settings, kube, cache, observer=observer, executor=executor, may_write=lambda: lease.held)

    controller = Controller(settings, kube, lease, observer=observer, make_reconciler=make_reconciler)
    server = HealthServer(settings.host, settings.port, controller.healthy)
    places = ", ".join(settings.namespaces) or "all namespaces"
    log.info("serving %s as %s; /metrics and /healthz on port %d", places, settings.identity, server.port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    acting = [asyncio.create_task(work) for work in (lease.run(), controller.run())]
    watching = asyncio.create_task(_watch(settings, controller))
    try:
        await asyncio.wait([asyncio.create_task(stop.wait()), watching, *acting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        results = await _end(*acting)
        await lease.release()  # first: kopf takes seconds to close its watches, and another operator may start at once
        results += await _end(watching)
        await asyncio.to_thread(server.close)
        await kube.close()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _end(*tasks: asyncio.Task[None]) -> list[BaseException | None]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(settings: Settings, controller: Controller) -> None:
    """Keeps kopf running with the permitted watches; starts it again when it ended or when rights changed."""
    here = asyncio.get_running_loop()

    def take(plural: str, kind: str | None, document: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop closed while kopf was still handing over
            here.call_soon_threadsafe(controller.cache.kinds[plural].take, kind, document)

    watch: Watch | None = None
    try:
        while True:
            wanted = controller.watchable
            if watch is not None and (not watch.alive or watch.plurals != wanted):
                await watch.stop()
                watch = None
            if watch is None and wanted and controller.ready_to_watch:
                watch = Watch(take, wanted, settings.namespaces)
                watch.start()
            await asyncio.sleep(2.0)
    finally:
        if watch is not None:
            await watch.stop()


if __name__ == "__main__":
    main()
