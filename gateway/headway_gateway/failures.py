"""What is logged of replicas that fail: a line when it begins, a count while it lasts, a line when it is over.

A dead replica under load fails hundreds of requests a second, and a line for each would bury all other lines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger("headway.gateway.replicas")

COUNT_SECONDS = 10.0
"""Between two counts while the outage lasts."""
QUIET_SECONDS = 5.0
"""A success this long after the last failure ends the outage, so that an intermittent one counts once."""


@dataclass(slots=True)
class _Outage:
    since: float
    logged_at: float
    last: float
    count: int = 1
    unlogged: int = 0
    """Failures since the last line."""


class FailureLog:
    """The failures of one pool's replicas. Times in seconds, passed in."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._outages: dict[str, _Outage] = {}

    def failed(self, replica_id: str, reason: object, request_id: str, now: float) -> None:
        """An attempt at this replica failed."""
        outage = self._outages.get(replica_id)
        if outage is None:
            self._outages[replica_id] = _Outage(since=now, logged_at=now, last=now)
            log.warning("pool %s: replica %s fails: %s (request %s)", self._pool, replica_id, reason, request_id)
            return
        outage.count += 1
        outage.unlogged += 1
        outage.last = now
        if now - outage.logged_at >= COUNT_SECONDS:
            log.warning(
                "pool %s: replica %s still fails: %d more in %.0f s, the last: %s",
                self._pool,
                replica_id,
                outage.unlogged,
                now - outage.logged_at,
                reason,
            )
            outage.logged_at, outage.unlogged = now, 0

    def succeeded(self, replica_id: str, now: float) -> None:
        """The replica served a request."""
        outage = self._outages.get(replica_id)
        if outage is not None and now - outage.last >= QUIET_SECONDS:
            self._over(replica_id, "serves again")

    def gone(self, replica_id: str) -> None:
        """The replica was forgotten."""
        if replica_id in self._outages:
            self._over(replica_id, "is gone")

    def _over(self, replica_id: str, what: str) -> None:
        outage = self._outages.pop(replica_id)
        lasted = outage.last - outage.since
        log.warning(
            "pool %s: replica %s %s, after %d failures in %.0f s", self._pool, replica_id, what, outage.count, lasted
        )
