"""Ejection of failing replicas: after consecutive server errors, for a time that grows, at most half of them at once.

A server error is a failed connect, a 5xx answer, a reset. What a client did wrong (4xx) or undid (a closed connection)
proves nothing about the replica and is never reported here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ERRORS = 5
FIRST_EJECTION = 5.0
LONGEST_EJECTION = 120.0


@dataclass(slots=True)
class _Health:
    consecutive: int = 0
    ejections: int = 0
    until: float = 0.0
    """End of the ejection; it is out while this lies ahead."""


class Outliers:
    """Consecutive server errors by replica. Times in seconds, passed in."""

    def __init__(self, errors: int = ERRORS) -> None:
        if errors < 1:
            raise ValueError(f"errors must be at least 1, not {errors}")
        self._errors = errors
        self._health: dict[str, _Health] = {}

    def success(self, replica_id: str, now: float) -> None:
        """An answer came (any status under 500): the run of errors ends, and the next ejection is a first one again.

        While it is out it stays out: what answers then was sent before.
        """
        health = self._health.get(replica_id)
        if health is not None and now >= health.until:
            del self._health[replica_id]

    def server_error(self, replica_id: str, now: float) -> bool:
        """Counts one; True when it ejects the replica. The n-th ejection in a row lasts 2^(n-1) times the first."""
        health = self._health.setdefault(replica_id, _Health())
        if now < health.until:
            return False  # the last of those that were on their way when it was ejected
        health.consecutive += 1
        # After its return one error is enough: it has not recovered.
        if health.consecutive < (1 if health.ejections else self._errors):
            return False
        health.until = now + min(LONGEST_EJECTION, FIRST_EJECTION * 2**health.ejections)
        health.ejections += 1
        health.consecutive = 0
        return True

    def forget(self, replica_id: str) -> None:
        """It restarted or went away."""
        self._health.pop(replica_id, None)

    def ejected(self, replicas: Collection[str], now: float) -> frozenset[str]:
        """Those of `replicas` that are out now: at most half, the latest offenders first; never a lone replica."""
        out = [replica_id for replica_id in replicas if (health := self._health.get(replica_id)) and now < health.until]
        out.sort(key=lambda replica_id: (-self._health[replica_id].until, replica_id))
        return frozenset(out[: len(replicas) // 2])
