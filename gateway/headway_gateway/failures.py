"""What the log says of replicas that fail: a line when it begins, a count while it lasts, a line when it is over.

A dead replica under load fails hundreds of requests a second, and a line for each would bury whatever else the log has
to say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger("headway.gateway.replicas")

COUNT_SECONDS = 10.0
"""Between two counts while it lasts."""
QUIET_SECONDS = 5.0
"""Without a failure for this long, the next success says that it is over: one that comes and goes is one trouble, not
many."""


@dataclass(slots=True)
class _Trouble:
    since: float
    said: float
    last: float
    count: int = 1
    unsaid: int = 0
    """Failures since the last line."""


class FailureLog:
    """The failures of one pool's replicas. Times in seconds, passed in."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._troubles: dict[str, _Trouble] = {}

    def failed(self, replica: str, reason: object, request_id: str, now: float) -> None:
        """A try at this replica came to nothing."""
        trouble = self._troubles.get(replica)
        if trouble is None:
            self._troubles[replica] = _Trouble(since=now, said=now, last=now)
            log.warning("pool %s: replica %s fails: %s (request %s)", self._pool, replica, reason, request_id)
            return
        trouble.count += 1
        trouble.unsaid += 1
        trouble.last = now
        if now - trouble.said >= COUNT_SECONDS:
            log.warning(
                "pool %s: replica %s still fails: %d more in %.0f s, the last: %s",
                self._pool,
                replica,
                trouble.unsaid,
                now - trouble.said,
                reason,
            )
            trouble.said, trouble.unsaid = now, 0

    def succeeded(self, replica: str, now: float) -> None:
        """It served a request."""
        trouble = self._troubles.get(replica)
        if trouble is not None and now - trouble.last >= QUIET_SECONDS:
            self._over(replica, "serves again")

    def gone(self, replica: str) -> None:
        """It is no longer looked for."""
        if replica in self._troubles:
            self._over(replica, "is gone")

    def _over(self, replica: str, what: str) -> None:
        trouble = self._troubles.pop(replica)
        lasted = trouble.last - trouble.since
        log.warning(
            "pool %s: replica %s %s, after %d failures in %.0f s", self._pool, replica, what, trouble.count, lasted
        )
