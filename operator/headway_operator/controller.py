"""When to reconcile which object. One loop, under the lease: every object once an interval, at once when it changed,
sooner after a write.

An object whose reconciliation fails waits longer each time, and no other object waits for it. What is remembered of
objects ends with the term of the lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from headway_core.contract.kubernetes import GROUP, PLURAL, VERSION
from headway_core.planning.conditions import Condition

from headway_operator import schema, status
from headway_operator.access import NEEDED, Access, review
from headway_operator.cache import Cache, Key
from headway_operator.executor import NotLeading
from headway_operator.handlers import WATCHED
from headway_operator.kube import Kube, KubeError
from headway_operator.lease import Lease
from headway_operator.metrics import FAILURES, MISSING_RIGHTS, OBJECTS, RECONCILES
from headway_operator.observe import Observer
from headway_operator.reconcile import ObjectState, Reconciler
from headway_operator.settings import Settings

LONGEST_WAIT = 20.0
"""Seconds that a failing object waits at most."""
RELIST = 60.0
"""Seconds between whole lists: deletions that a watch has missed."""
ASK_AGAIN = 60.0
"""Seconds between reviews of rights while one is missing."""
CHECK_SCHEMA = (10.0, 600.0)
"""Seconds between checks of the served schema: while it is refused, and while it is good."""
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
        self.access = Access(frozenset())
        self._states: dict[Key, ObjectState] = {}
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        self._term = 0
        self._beat = clock()
        self._when: dict[str, float] = {}
        self._served = schema.Served(False)

    def healthy(self) -> str | None:
        """None, or why this process should be started again."""
        silent = self._clock() - self._beat
        return f"the control loop has not run for {silent:.0f}s" if silent > _HANGS else None

    @property
    def ready_to_watch(self) -> bool:
        """Whether rights and schema are known: watching blindly would end in a refusal."""
        return "rights" in self._when and "schema" in self._when

    @property
    def watchable(self) -> frozenset[str]:
        """Plurals that exist and may be watched wherever this operator is to work."""
        places = self._settings.namespaces or ("",)
        permitted = {plural for plural in WATCHED if all(self.access.may_watch(place, plural) for place in places)}
        return frozenset(permitted if self._served.installed else permitted - {PLURAL})

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
        await self._ask_for_rights()
        await self._check_schema()
        if not self._lease.held or not self._served.installed:
            return
        if self._lease.term != self._term:
            self._term = self._lease.term
            self._states.clear()
            self._due.clear()
            self._when.pop("relist", None)
        await self._relist()
        now = self._clock()
        keys = self.cache.slos.keys()
        OBJECTS.set(len(keys))
        await self._forget(keys)
        for key in keys:
            if key not in self._running and self._due.get(key, 0.0) <= now:
                self._running[key] = asyncio.create_task(self._reconcile(key))

    def _is_time(self, what: str, period: float) -> bool:
        now = self._clock()
        if now - self._when.get(what, float("-inf")) < period:
            return False
        self._when[what] = now
        return True

    async def _ask_for_rights(self) -> None:
        first = "rights" not in self._when
        if not first and not self._kube.denied and not self.access.missing:
            return
        if not self._is_time("rights", ASK_AGAIN):
            return
        try:
            self.access = await review(self._kube, self._settings.namespaces)
        except KubeError:
            self._when.pop("rights")
            raise
        self._kube.denied = False
        MISSING_RIGHTS.set(len(self.access.missing))
        for place, right in sorted(self.access.missing, key=lambda entry: (entry[0], NEEDED.index(entry[1]))):
            log.warning("missing right: %s in %s", right, place or "all namespaces")

    async def _check_schema(self) -> None:
        if not self._is_time("schema", CHECK_SCHEMA[self._served.installed and self._served.complaint is None]):
            return
        try:
            self._served = await schema.served(self._kube)
        except KubeError:
            self._when.pop("schema")
            raise
        if self._served.complaint is not None:
            log.error("%s", self._served.complaint)

    async def _relist(self) -> None:
        """Whole lists, so that an object whose end was missed does not count for ever. What may not be listed is left
        as it is."""
        if not self._is_time("relist", RELIST):
            return
        try:
            for plural, (group, version) in WATCHED.items():
                for place in self._settings.namespaces or ("",):
                    if self.access.may(place, "list", plural):
                        await self._list(plural, group, version, place)
        except KubeError:
            self._when.pop("relist")
            raise
        self._observer.forget(pod.uid for pod in self.cache.pods.values())

    async def _list(self, plural: str, group: str, version: str, place: str) -> None:
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        scope = f"/namespaces/{place}" if place else ""
        answer = await self._kube.get(f"{root}{scope}/{plural}", resourceVersion="0")
        text = str(answer.get("metadata", {}).get("resourceVersion", ""))
        items: Collection[dict[str, Any]] = answer.get("items") or ()
        self.cache.kinds[plural].replace(items, int(text) if text.isdigit() else 0, place)

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
                if self._served.complaint is None:
                    state.refusal = None
                    wait = await self._reconciler.reconcile(key, state, self.access)
                else:
                    wait = await self._complain(key, state, self._served.complaint)
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

    async def _complain(self, key: Key, state: ObjectState, complaint: str) -> float:
        """Says once that the schema is refused: an older one may drop the status, and a watch that broke with it shows
        it late."""
        document = self.cache.slos.get(*key)
        if document is None or state.refusal == complaint:
            return self._settings.interval
        before = document.get("status") or {}
        condition = Condition("Ready", False, "StaleSchema", complaint)
        known: dict[str, Any] = next(
            (entry for entry in before.get("conditions") or () if entry.get("type") == "Ready"), {}
        )
        if (known.get("status"), known.get("reason"), known.get("message")) != ("False", "StaleSchema", complaint):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            listed = status.condition_documents([condition], before, int(document["metadata"].get("generation", 0)), at)
            namespace, name = key
            path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}/status"
            await self._kube.patch(path, {"status": {"conditions": listed}})
        state.refusal = complaint
        return self._settings.interval
