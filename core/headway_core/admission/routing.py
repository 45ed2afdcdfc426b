"""Which replica serves: the least predicted TTFT, where a prompt head that the replica holds counts as computed.

That is all there is to affinity: a warm replica wins as long as what it saves exceeds what it makes one wait, so no
threshold has to be tuned. Only replicas whose dispatch window is open are sent to (`pool_load.ReplicaLoad.accepts`).
That window, not the choice, limits how many requests go at once to a replica that has just come up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway_core.admission.pool_load import PoolLoad, ReplicaLoad
from headway_core.admission.prediction import predict, with_cached
from headway_core.admission.request import Prediction, Request


@dataclass(frozen=True, slots=True)
class Route:
    """Where to send it, and what is predicted there."""

    replica_id: str
    prediction: Prediction
    cached_tokens: int


def choose(request: Request, load: PoolLoad, matches: Mapping[str, int] | None = None) -> Route | None:
    """The replica to send `request` to now; None while every window is closed.

    `matches`: replica → leading elements of `request.prefix` that it holds (`prefixes.PrefixIndex.matches`). Replicas
    without a measured rate come last, but first when idle: without a request the rate stays unknown for ever.
    """
    matches = matches or {}
    best: tuple[tuple[float, ...], Route] | None = None
    for replica in load.replicas:
        seen = with_cached(request, int(matches.get(replica.replica_id, 0) * request.prefix_chunk_tokens))
        if not replica.accepts(seen):
            continue
        prediction = predict(seen, replica)
        key = _preference(replica, prediction.ttft)
        if best is None or key < best[0]:
            best = (key, Route(replica.replica_id, prediction, seen.cached_tokens))
    return best[1] if best is not None else None


def _preference(replica: ReplicaLoad, ttft: float | None) -> tuple[float, ...]:
    """Sort key: unmeasured idle replicas, then by predicted TTFT, then unmeasured busy ones; ties: fewer in flight."""
    if ttft is not None:
        return (1.0, ttft, replica.in_flight)
    return (0.0 if replica.in_flight == 0 and replica.prefill_rate is None else 2.0, replica.in_flight, 0.0)
