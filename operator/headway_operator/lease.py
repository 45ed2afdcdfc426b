"""Leader election with a coordination.k8s.io Lease, as in Kubernetes' own controllers. The clocks of other operators
are never compared: what counts is when this one saw the Lease change.

The holder renews every 2 s and stops acting when it could not for 10 s; another takes over when it saw no renewal for
15 s. The gap is for writes begun in time. Another duration than 15 s changes all three by the same factor.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from headway_operator.kube import Kube, KubeError
from headway_operator.metrics import LEADING

DURATION = 15.0
"""Seconds by default."""

log = logging.getLogger(__name__)


class Lease:
    """One operator's hold on the lease. `run` it; ask `held` before every write."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        duration: float = DURATION,
    ) -> None:
        self._kube = kube
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._name = name
        self.identity = identity
        self._duration, self._deadline, self._period = duration, duration * 2 / 3, duration * 2 / 15
        self._clock = clock
        self._renewed_at: float | None = None
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self.term = 0
        """Grows each time the lease is taken anew: what was remembered before may be out of date."""
        LEADING.set_function(lambda: float(self.held))
        self.trouble: str | None = None
        """Why the last attempt failed."""

    @property
    def held(self) -> bool:
        """Whether this operator may act now."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < self._deadline

    async def run(self) -> None:
        """Takes and renews the lease until cancelled."""
        while True:
            was = self.held
            try:
                await self.attempt()
                self.trouble = None
            except KubeError as error:
                if self.trouble is None:
                    log.warning("lease: %s", error)
                self.trouble = str(error)
            if self.held != was:
                what = "holding" if self.held else "no longer holding"
                log.info("%s the lease %s as %s", what, self._path, self.identity)
            await asyncio.sleep(self._period)

    async def release(self) -> None:
        """Gives it back, so that another need not wait. Failing is no harm: it runs out."""
        if not self.held:
            return
        self._renewed_at = None
        try:
            current = await self._kube.get(self._path)
            if current.get("spec", {}).get("holderIdentity") == self.identity:
                current["spec"] |= {"holderIdentity": "", "renewTime": _now(), "leaseDurationSeconds": 1}
                await self._kube.replace(self._path, current)
        except KubeError as error:
            log.info("lease not given back, it runs out in %.0fs: %s", self._duration, error)

    async def attempt(self) -> None:
        """Takes the lease, renews it, or sees that it is another's. Raises KubeError."""
        asked_at = self._clock()
        try:
            current = await self._kube.get(self._path)
        except KubeError as error:
            if not error.missing:
                raise
            await self._create(asked_at)
            return
        spec = current.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        mark = (holder, str(spec.get("renewTime")))
        if mark != self._seen:
            self._seen, self._seen_at = mark, asked_at
        mine = holder == self.identity
        if not mine and holder and asked_at - self._seen_at < float(spec.get("leaseDurationSeconds") or self._duration):
            self._renewed_at = None
            return
        await self._hold(self._kube.replace(self._path, {**current, "spec": self._spec(spec, mine)}), asked_at, mine)

    async def _create(self, asked_at: float) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec({}, False),
        }
        await self._hold(self._kube.create(self._collection, body, repeat=False), asked_at, False)

    async def _hold(self, write: Awaitable[object], asked_at: float, mine: bool) -> None:
        """Holds the lease as of `asked_at` when the write succeeds; a conflict changes nothing. Raises KubeError."""
        try:
            await write
        except KubeError as error:
            if not error.conflict:
                raise
            return
        if not mine:
            self.term += 1
        self._renewed_at = asked_at

    def _spec(self, before: dict[str, Any], mine: bool) -> dict[str, Any]:
        now = _now()
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self._duration),
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if mine else 1),
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
