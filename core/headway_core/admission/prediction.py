"""Predicted TTFT = max(prefill wait, slot wait, block wait) + own uncached tokens / C + one iteration.

* prefill wait: prefill tokens ahead (its class and above, and what higher classes are still expected to send) / C;
* slot wait: max(0, ahead + 1 - free slots) / X, X = n / W by Little's law, measured: the wait where outputs dominate;
* block wait: likewise from blocks free and blocks released per second.

What an unknown rate would have to divide stays unknown (None); a wait of nothing at all is zero whatever the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import NamedTuple

from headway_core.admission.pool_load import PoolLoad, ReplicaLoad
from headway_core.admission.request import Prediction, Request

TOLERANCE = 1e-9
"""Seconds: what sums of floating-point numbers may be off."""

Margins = Callable[[Request], float]
"""Seconds before its deadline that a request's first token is wanted; equal within a class for equal targets."""


class Late(NamedTuple):
    """A request that would miss its deadline less its margin."""

    place: int
    """Its index among those that were laid out."""
    prediction: Prediction


def predict(request: Request, replica: ReplicaLoad) -> Prediction:
    """What `request` meets if sent to this replica now, which holds `request.cached_tokens` of its prompt."""
    ahead = replica.backlog_at(request.priority)
    slots = replica.waiting_at(request.priority) + 1 - replica.slots_at(request.priority)
    blocks = ahead / replica.block_size + replica.blocks(request) - replica.free_blocks
    return Prediction(
        prefill_wait=_over(ahead, replica.prefill_rate),
        slot_wait=_over(slots, replica.completion_rate),
        block_wait=0.0 if replica.idle else _over(blocks, replica.block_release_rate),
        own=_over(request.uncached_tokens, replica.prefill_rate),
        iteration=replica.iteration or 0.0,
    )


class Forecast:
    """Lays waiting requests over the pool, in service order, and says for each when its first token comes.

    Each goes to the replica whose prefill is ready first (list scheduling); slots and blocks are counted over the pool.
    Feed requests with falling priority: what a lower class finds in the engines, a higher one passes by.
    """

    def __init__(self, load: PoolLoad, shares: Mapping[int, float]) -> None:
        """`shares`: priority → guaranteed fraction of the pool, which bounds what higher classes are charged for."""
        self._load = load
        self._shares = shares
        replicas = load.replicas
        self._known = [replica for replica in replicas if replica.prefill_rate]
        self._ready = [(0.0, index, 1.0 / (replica.prefill_rate or 1.0)) for index, replica in enumerate(self._known)]
        self._completions = load.completion_rate
        releases = [replica.block_release_rate for replica in replicas if replica.block_release_rate is not None]
        self._releases = sum(releases) if releases else None
        self._free_blocks = sum([replica.free_blocks for replica in replicas])
        self._iteration = max([replica.iteration or 0.0 for replica in replicas], default=0.0)
        self._idle = any(replica.idle for replica in replicas)
        self._block_size = replicas[0].block_size if replicas else 1
        self._level: int | None = None
        self._slots = 0.0
        self._queued = 0
        self._blocks = 0.0
        self._slowdown = 1.0
        """By how much higher classes' expected work lengthens a wait: 1 / the fraction of the pool that they leave."""

    def add(self, request: Request) -> Prediction:
        """The prediction for `request`, after all that were added before it."""
        if request.priority != self._level:
            self._descend(request.priority)
        tokens = request.uncached_tokens
        ready, own = None, None
        if self._ready:
            ready, index, per_token = self._ready[0]
            own = tokens * per_token
            heapreplace(self._ready, (ready + own, index, per_token))
        self._queued += 1
        self._blocks += 1 + tokens // self._block_size
        return self._prediction(ready, own)

    def skip(self, requests: Iterable[Request]) -> None:
        """Adds `requests` without asking whether they are late."""
        self.first_late(requests, -math.inf, _no_margin)

    def first_late(self, requests: Iterable[Request], now: float, margins: Margins) -> Late | None:
        """Adds `requests` until one would miss its deadline less its margin; None: all are in time, as far as is known.

        An unknown wait counts as none: the true wait is that or more. The arithmetic is that of `add`, without an
        object for each request, since this is the part of a decision that grows with the queue. The test
        `test_the_first_late_one_is_the_first_whose_own_prediction_is_late` compares it with `add`.
        """
        since = now + self._iteration
        per_slot = 1.0 / self._completions if self._completions else 0.0
        per_block = 1.0 / self._releases if self._releases else 0.0
        size, free = self._block_size, self._free_blocks
        heap, slowdown, slots = self._ready, self._slowdown, self._slots
        idle = self._idle and not self._queued
        level: int | None = None
        target: float | None = None
        margin = ready = own = 0.0
        for index, request in enumerate(requests):
            if request.priority != level or request.target != target:
                if request.priority != self._level:
                    self._descend(request.priority)
                    heap, slowdown, slots = self._ready, self._slowdown, self._slots
                level, target, margin = request.priority, request.target, margins(request)
            tokens = request.uncached_tokens
            if heap:
                ready, replica, per_token = heap[0]
                own = tokens * per_token
                heapreplace(heap, (ready + own, replica, per_token))
            self._queued = queued = self._queued + 1
            self._blocks = blocks = self._blocks + 1 + tokens // size
            wait = ready * slowdown
            if (slot_wait := (queued - slots) * slowdown * per_slot) > wait:
                wait = slot_wait
            if (block_wait := (blocks - free) * per_block) > wait and not idle:
                wait = block_wait
            idle = False
            if since + wait + own - request.deadline + margin > TOLERANCE:
                return Late(index, self._prediction(ready if heap else None, own if heap else None))
        return None

    def _prediction(self, ready: float | None, own: float | None) -> Prediction:
        """Of the request that was added last, which found a replica `ready` after so many seconds."""
        idle = self._idle and self._queued == 1
        return Prediction(
            prefill_wait=None if ready is None else ready * self._slowdown,
            slot_wait=_over((self._queued - self._slots) * self._slowdown, self._completions),
            block_wait=0.0 if idle else _over(self._blocks - self._free_blocks, self._releases),
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
        heapify(self._ready)
        self._slots = sum([replica.slots_at(priority) - replica.waiting_at(priority) for replica in replicas])
        self._blocks += sum([_between(replica.backlog, priority, above) for replica in replicas]) / self._block_size
        self._slowdown = 1.0 / left_for(priority, self._load, self._shares)
        self._level = priority


def left_for(priority: int, load: PoolLoad, shares: Mapping[int, float]) -> float:
    """The fraction of the pool that higher classes leave to this one: its guaranteed share at least."""
    rate = load.prefill_rate
    charged = load.higher_work.get(priority, 0.0) / rate if rate else 0.0
    return 1.0 - min(charged, 1.0 - shares.get(priority, 1.0))


def behind(ahead: Iterable[Request], request: Request, load: PoolLoad, shares: Mapping[int, float]) -> Prediction:
    """The prediction of `request` alone, behind all of `ahead`."""
    forecast = Forecast(load, shares)
    forecast.skip(ahead)
    return forecast.add(request)


def with_cached(request: Request, tokens: int) -> Request:
    """The request as a replica sees it that holds `tokens` of its prompt."""
    cached = max(0, min(tokens, request.prompt_tokens - 1))
    return request if cached == request.cached_tokens else replace(request, cached_tokens=cached)


def _over(amount: float, rate: float | None) -> float | None:
    """amount / rate: 0 when there is nothing to wait for, else None when the rate is unknown or 0."""
    if amount <= 0:
        return 0.0
    return amount / rate if rate else None


def _between(backlog: Mapping[int, float], low: int, above: int | None) -> float:
    return sum(tokens for level, tokens in backlog.items() if level >= low and (above is None or level < above))


def _no_margin(_request: Request) -> float:
    return 0.0
