"""Retry-After: whole seconds until the request would fit, with jitter so that clients do not come back together."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

SHORTEST = 1
LONGEST = 60
"""Official SDKs ignore a Retry-After above 60 s."""
SPREAD = 0.5
"""The jitter: up to this much of the wait is added."""
SPREAD_AT_BOUND = 5.0
"""Seconds of jitter below the bound, so that not all return in one instant after a long outage. More would be in vain:
whoever has to wait longer than the bound allows is told to come back too early."""
RETURN_SHARE = 0.33
"""Of the pool's capacity, set aside in thought for those who were told to come back."""


def retry_after(excess: float, jitter: float) -> int:
    """Whole seconds, rounded up, in [`SHORTEST`, `LONGEST`], never falling when `excess` grows.

    `excess`: seconds until the backlog has shrunk so far that the request would fit (infinite: nobody knows).
    `jitter`: uniform in [0, 1), from `spread` or a random generator.
    """
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter lies in [0, 1), not {jitter}")
    if math.isnan(excess):
        raise ValueError("excess is a number of seconds, not NaN")
    return max(SHORTEST, math.ceil(min(max(0.0, excess) * (1 + SPREAD * jitter), LONGEST - SPREAD_AT_BOUND * jitter)))


@dataclass(slots=True)
class RetrySchedule:
    """When the next one that is told to come back would be served, if all that were told before do come back.

    Capacity serves fresh requests first, so those who return get `RETURN_SHARE` of it: their work is a queue before a
    server of that speed. Without this, all who are refused in an overload return at once, into the same overload.
    """

    _until: float = -math.inf

    def add(self, work: float, now: float) -> None:
        """One more was told to come back; `work` in seconds of the whole pool."""
        self._until = min(max(self._until, now) + work / RETURN_SHARE, now + LONGEST)

    def wait(self, now: float) -> float:
        """Seconds until the earlier ones have been served."""
        return max(0.0, self._until - now)


def spread(seed: int, request_id: int) -> float:
    """A number in [0, 1), always the same for the same arguments: deciding stays free of side effects."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
