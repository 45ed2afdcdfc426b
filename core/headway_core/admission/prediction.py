"""Predicted TTFT = max(prefill wait, slot wait, block wait) + own uncached tokens / C + one iteration.

* prefill wait: prefill tokens ahead (its class and above, and what higher classes are still expected to send) / C;
* slot wait: max(0, ahead + 1 - free slots) / X, where X = n / W is Little's law, measured: where outputs dominate, this is the wait;
* block wait: likewise from blocks free and blocks released per second.

What an unknown rate would have to divide stays unknown (None); a wait of nothing at all is zero whatever the rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace

from headway_core.admission.load import Load, ReplicaLoad
from headway_core.admission.request import Prediction, Request


def predict(request: Request, replica: ReplicaLoad) -> Prediction:
    """What the request meets if it is sent to this replica now, with `request.cached_tokens` of its prompt in the cache there."""
    ahead = replica.backlog_at(request.priority)
    seats = replica.waiting_at(request.priority) + 1 - replica.slots_at(request.priority)
    blocks = ahead / replica.block_size + replica.blocks(request) - replica.free_blocks
    return Prediction(
        prefill_wait=_over(ahead, replica.prefill_rate),
        slot_wait=_over(seats, replica.completion_rate),
        block_wait=0.0 if replica.idle else _over(blocks, replica.block_release_rate),
        own=_over(request.uncached_tokens, replica.prefill_rate),
        iteration=replica.iteration or 0.0,
    )


class Forecast:
    """Lays waiting requests over the pool, in service order, and says for each when its first token comes.

    Each goes to the replica whose prefill is ready first (list scheduling); slots and blocks are counted over the pool. Feed requests
    with falling priority: what a lower class finds in the engines, a higher one passes by.
    """

    def __init__(self, load: Load, shares: Mapping[int, float]) -> None:
        """`shares`: priority → fraction of the pool guaranteed to that class; it bounds what higher classes can be charged for."""
        self._load = load
        self._shares = shares
        known = [replica for replica in load.replicas if replica.prefill_rate]
        self._known = known
        self._ready = [(0.0, index, 1.0 / (replica.prefill_rate or 1.0)) for index, replica in enumerate(known)]
        self._rate = load.prefill_rate
        self._completions = load.completion_rate
        releases = [replica.block_release_rate for replica in load.replicas if replica.block_release_rate is not None]
        self._releases = sum(releases) if releases else None
        self._free_blocks = sum(replica.free_blocks for replica in load.replicas)
        self._iteration = max((replica.iteration or 0.0 for replica in load.replicas), default=0.0)
        self._idle = any(replica.idle for replica in load.replicas)
        self._block_size = load.replicas[0].block_size if load.replicas else 1
        self._level: int | None = None
        self._seats = 0.0
        self._queued = 0
        self._blocks = 0.0
        self._stretch = 1.0

    def add(self, request: Request) -> Prediction:
        """The prediction for `request`, after all that were added before it."""
        if request.priority != self._level:
            self._descend(request.priority)
        tokens = request.uncached_tokens
        if self._ready:
            ready, index, seconds_per_token = self._ready[0]
            own: float | None = tokens * seconds_per_token
            heapq.heapreplace(self._ready, (ready + tokens * seconds_per_token, index, seconds_per_token))
            prefill: float | None = ready * self._stretch
        else:
            prefill, own = None, None
        self._queued += 1
        self._blocks += -(-(tokens + 1) // self._block_size)
        return Prediction(
            prefill_wait=prefill,
            slot_wait=_over((self._queued - self._seats) * self._stretch, self._completions),
            block_wait=0.0 if self._idle and self._queued == 1 else _over(self._blocks - self._free_blocks, self._releases),
            own=own,
            iteration=self._iteration,
        )

    def _descend(self, priority: int) -> None:
        above = self._level
        replicas = self._load.replicas
        self._ready = [
            (ready + _between(self._known[index].backlog, priority, above) * per_token, index, per_token)
            for ready, index, per_token in self._ready
        ]
        heapq.heapify(self._ready)
        self._seats = sum(replica.slots_at(priority) - replica.waiting_at(priority) for replica in replicas)
        self._blocks += sum(_between(replica.backlog, priority, above) for replica in replicas) / self._block_size
        charged = self._load.higher_work.get(priority, 0.0) / self._rate if self._rate else 0.0
        self._stretch = 1.0 / (1.0 - min(charged, 1.0 - self._shares.get(priority, 1.0)))
        self._level = priority


def forecast(requests: Iterable[Request], load: Load, shares: Mapping[int, float]) -> list[Prediction]:
    """The predictions of `requests`, which are in service order."""
    laid_out = Forecast(load, shares)
    return [laid_out.add(request) for request in requests]


def with_cached(request: Request, tokens: int) -> Request:
    """The request as a replica sees it that holds `tokens` of its prompt."""
    cached = max(0, min(tokens, request.prompt_tokens - 1))
    return request if cached == request.cached_tokens else replace(request, cached_tokens=cached)


def _over(amount: float, rate: float | None) -> float | None:
    """amount / rate: 0 when there is nothing to wait for, None when there is and the rate is unknown or nothing moves."""
    if amount <= 0:
        return 0.0
    return amount / rate if rate else None


def _between(backlog: Mapping[int, float], low: int, above: int | None) -> float:
    return sum(tokens for rank, tokens in backlog.items() if rank >= low and (above is None or rank < above))
