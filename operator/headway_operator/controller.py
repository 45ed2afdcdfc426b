"""When to reconcile which object. One loop under the lease: each object once an interval, sooner after a write or edit.

A failing object waits longer each time, and no other waits for it. What is remembered ends with the lease's term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from headway_core.contract.kubernetes import PLURAL

from headway_operator.access import AccessReview
from headway_operator.cache import WATCHED, Cache, Key, Relister
from headway_operator.executor import NotLeading
from headway_operator.kube import Kube, KubeError
from headway_operator.lease import Lease
from headway_operator.metrics import FAILURES, OBJECTS, RECONCILES
from headway_operator.observe import Observer
from headway_operator.reconcile import ObjectState, Reconciler
from headway_operator.schema import SchemaCheck
from headway_operator.settings import Settings

LONGEST_WAIT = 20.0
"""Seconds that a failing object waits at most."""
_PAUSE = 0.25
_HANGS = 60.0

log = logging.getLogger(__name__)


class Controller:
    """The control loop. `run` it; `healthy` says what is wrong."""

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        lease: Lease,
        *,
        observer: Observer,
        make_reconciler: Callable[[Cache], Reconciler],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._lease = lease
        self._observer = observer
        self._clock = clock
        self.cache = Cache(self._changed)
        self._reconciler = make_reconciler(self.cache)
        self._rights = AccessReview(kube, settings.namespaces, clock)
        self._schema = SchemaCheck(kube, clock)
        self._relister = Relister(kube, self.cache, settings.namespaces, clock)
        self._states: dict[Key, ObjectState] = {}
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        self._term = 0
        self._beat = clock()

    def healthy(self) -> str | None:
        """None, or why this process should be started again."""
        silent = self._clock() - self._beat
        return f"the control loop has not run for {silent:.0f}s" if silent > _HANGS else None

    @property
    def ready_to_watch(self) -> bool:
        """Whether rights and schema are known: watching blindly would end in a refusal."""
        return self._rights.known and self._schema.known

    @property
    def watchable(self) -> frozenset[str]:
        """Plurals that exist and may be watched wherever this operator is to work."""
        places = self._settings.namespaces or ("",)
        access = self._rights.access
        permitted = {plural for plural in WATCHED if all(access.may_watch(place, plural) for place in places)}
        return frozenset(permitted if self._schema.served.installed else permitted - {PLURAL})

    async def run(self) -> None:
        """Runs until cancelled; an error of one round is logged and does not end it."""
        try:
            while True:
                self._beat = self._clock()
                try:
                    await self._once()
                except KubeError as error:
                    log.warning("%s", error)
                    await asyncio.sleep(1.0)
                await asyncio.sleep(_PAUSE)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _once(self) -> None:
        await self._rights.refresh()
        await self._schema.refresh()
        if not self._lease.held or not self._schema.served.installed:
            return
        if self._lease.term != self._term:
            self._term = self._lease.term
            self._states.clear()
            self._due.clear()
            self._relister.expire()
        if await self._relister.relist(self._rights.access):
            self._observer.forget(pod.uid for pod in self.cache.pods.values())
        now = self._clock()
        keys = self.cache.slos.keys()
        OBJECTS.set(len(keys))
        await self._forget(keys)
        for key in keys:
            if key not in self._running and self._due.get(key, 0.0) <= now:
                self._running[key] = asyncio.create_task(self._reconcile(key))

    def _changed(self, key: Key) -> None:
        self._due.pop(key, None)

    async def _forget(self, keys: Collection[Key]) -> None:
        for key in self._states.keys() - set(keys):
            if key not in self._running:
                state = self._states.pop(key)
                self._due.pop(key, None)
                self._failures.pop(key, None)
                try:
                    await self._reconciler.forget(key, state)
                except (KubeError, NotLeading) as error:
                    log.warning("%s/%s is gone, and its cordon stays: %s", *key, error)

    async def _reconcile(self, key: Key) -> None:
        state = self._states.setdefault(key, ObjectState(began=self._clock()))
        self._due[key] = self._clock() + self._settings.interval
        try:
            async with self._semaphore:
                began = self._clock()
                complaint = self._schema.served.complaint
                if complaint is None:
                    state.refusal = None
                    wait = await self._reconciler.reconcile(key, state, self._rights.access)
                else:
                    await self._reconciler.complain(key, state, complaint)
                    wait = self._settings.interval
                RECONCILES.observe(self._clock() - began)
            self._failures.pop(key, None)
        except NotLeading:
            wait = self._settings.interval
        except KubeError as error:
            wait = self._postpone(key, "api", error)
        except Exception as error:  # one bad object must not end the others
            log.exception("%s/%s", *key)
            wait = self._postpone(key, "bug", error)
        finally:
            self._running.pop(key, None)
        if key in self._due:  # gone when the object changed meanwhile: then at once
            self._due[key] = self._clock() + wait

    def _postpone(self, key: Key, reason: str, error: Exception) -> float:
        FAILURES.labels(reason).inc()
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(LONGEST_WAIT, 0.5 * 2.0**count)
        log.log(logging.WARNING if count == 1 else logging.DEBUG, "%s/%s: again in %.0fs: %s", *key, wait, error)
        return wait
