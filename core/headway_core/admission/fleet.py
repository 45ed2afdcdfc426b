"""The replicas of a pool as one gateway knows them: their last reports, and what it sent that these have not seen.

Every dispatch to a replica has a number that grows by one. A report says the highest number seen from each gateway, so
exactly the later ones are added to what it says. Between reports the backlog drains at the replica's own rate C. Only
this file knows how old what it says is; decisions read `loads`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from headway_core.admission.outliers import Outliers
from headway_core.admission.pool_load import ReplicaLoad
from headway_core.contract.reports import ClassLoad, LoadHint, ReplicaState, RuntimeReport

STALE_INTERVALS = 3
"""A report older than this many poll intervals says nothing about now."""


@dataclass(slots=True)
class _Sent:
    """One request that this gateway has open on the replica."""

    priority: int
    tokens: int
    at: float


@dataclass(slots=True)
class TrackedReplica:
    """One replica: its last report, when it came, and what was sent to it."""

    report: RuntimeReport
    received: float
    round_trip: float = 0.0
    numbers: int = 0
    """The last dispatch number used."""
    sent: dict[int, _Sent] = field(default_factory=dict)
    """Dispatch number → request, from dispatch to its end."""
    ended: int = 0
    """Requests of ours that ended since the last report: slots that are free again."""
    backlog: dict[int, float] = field(default_factory=dict)
    """Priority → prefill tokens not computed yet, as thought at the instant `clock`."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Priority → requests without a slot, what the last report has not seen included."""
    clock: float = 0.0

    def seen(self, gateway: str) -> int:
        """The highest of our dispatch numbers that the last report includes."""
        return self.report.dispatched.get(gateway, 0)

    def recount(self, gateway: str) -> None:
        """Begins again from the report that has just come, and adds what it has not seen."""
        self.backlog = {load.priority: float(load.remaining_prefill_tokens) for load in self.report.classes}
        self.waiting = {load.priority: load.waiting for load in self.report.classes}
        self.clock, seen = self.received, self.seen(gateway)
        unseen = list(itertools.takewhile(lambda entry: entry[0] > seen, reversed(self.sent.items())))
        for _, sent in reversed(unseen):
            self.add(sent)

    def add(self, sent: _Sent) -> None:
        """One more that the last report has not seen."""
        _drain(self.backlog, (self.report.prefill_rate or 0.0) * max(0.0, sent.at - self.clock))
        self.clock = max(self.clock, sent.at)
        self.backlog[sent.priority] = self.backlog.get(sent.priority, 0.0) + sent.tokens
        self.waiting[sent.priority] = self.waiting.get(sent.priority, 0) + 1

    def computed(self, sent: _Sent) -> None:
        """The prompt of one that the last report has not seen is computed, or no longer wanted."""
        self.backlog[sent.priority] = max(0.0, self.backlog[sent.priority] - sent.tokens)


class Fleet:
    """The replicas of one pool. `gateway`: this gateway's boot id. `interval`: seconds between polls of a replica."""

    def __init__(self, gateway: str, interval: float = 1.0, outliers: Outliers | None = None) -> None:
        if not interval > 0:
            raise ValueError(f"interval must be positive, not {interval}")
        self.gateway = gateway
        self.interval = interval
        self.outliers = outliers if outliers is not None else Outliers()
        self.cordoned: frozenset[str] = frozenset()
        """Replica ids that get nothing new, from the policy."""
        self._replicas: dict[str, TrackedReplica] = {}
        self._frozen: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def report(self, replica_id: str) -> RuntimeReport | None:
        """The last report of that replica."""
        known = self._replicas.get(replica_id)
        return known.report if known else None

    def age(self, replica_id: str, now: float) -> float | None:
        """Seconds since its last report or hint came; None when there never was one."""
        known = self._replicas.get(replica_id)
        return now - known.received if known else None

    def longest(self) -> int | None:
        """Tokens that a prompt and its answer may have together where most fit; None while nobody has said so."""
        return max((known.report.limits.max_model_len for known in self._replicas.values()), default=0) or None

    def in_flight(self, replica_id: str) -> int:
        """Requests that this gateway has open there."""
        known = self._replicas.get(replica_id)
        return len(known.sent) if known else 0

    def observe(self, report: RuntimeReport, now: float, round_trip: float = 0.0) -> bool:
        """Takes a polled report, unless a newer one is known; True when the replica is new or lost its cache."""
        known = self._replicas.get(report.replica_id)
        if known is None:
            known = self._replicas[report.replica_id] = TrackedReplica(report, now, round_trip)
            known.recount(self.gateway)
            return True
        restarted = known.report.boot_id != report.boot_id
        if not restarted and report.seq < known.report.seq:
            return False
        if not restarted:
            # A rate that is not reported any more, after a quiet minute, was still measured: better than unknown.
            report = replace(
                report,
                prefill_rate=report.prefill_rate or known.report.prefill_rate,
                completion_rate=report.completion_rate or known.report.completion_rate,
                block_release_rate=report.block_release_rate or known.report.block_release_rate,
            )
        # Requests open on the old process end by themselves, with their connections.
        known.report, known.received, known.ended = report, now, 0
        known.recount(self.gateway)
        known.round_trip = round_trip if restarted else 0.8 * known.round_trip + 0.2 * round_trip
        if restarted:
            self.outliers.forget(report.replica_id)
        return restarted

    def hint(self, replica_id: str, hint: LoadHint, now: float) -> None:
        """Takes the short report of a response; one of another boot, or older than what is known, is passed over."""
        known = self._replicas.get(replica_id)
        if known is None or known.report.boot_id != hint.boot_id or hint.seq < known.report.seq:
            return
        known.report = replace(
            known.report,
            seq=hint.seq,
            running=hint.running,
            waiting=hint.waiting,
            free_slots=hint.free_slots,
            free_blocks=hint.free_blocks,
            classes=_classes(known.report, hint),
            dispatched=hint.dispatched,
            prefill_rate=known.report.prefill_rate if hint.prefill_rate is None else hint.prefill_rate,
            completion_rate=known.report.completion_rate if hint.completion_rate is None else hint.completion_rate,
        )
        known.received, known.ended = now, 0
        known.recount(self.gateway)

    def remove(self, replica_id: str) -> None:
        """The replica is gone for good."""
        self._replicas.pop(replica_id, None)
        self.outliers.forget(replica_id)

    def dispatch(self, replica_id: str, priority: int, uncached_tokens: int, now: float) -> int:
        """Counts a request as sent, served at this priority; the number is for the header `header_names.DISPATCH`."""
        known = self._replicas[replica_id]
        known.numbers += 1
        sent = known.sent[known.numbers] = _Sent(priority, uncached_tokens, now)
        known.add(sent)
        return known.numbers

    def computed(self, replica_id: str, number: int) -> None:
        """The prompt of the request with this number is computed: its first token came."""
        known = self._replicas.get(replica_id)
        if known is not None and number in known.sent:
            if number > known.seen(self.gateway):
                known.computed(known.sent[number])
            known.sent[number].tokens = 0

    def end(self, replica_id: str, number: int) -> None:
        """The request with this number is over on that replica, however it ended. Asking twice does no harm."""
        known = self._replicas.get(replica_id)
        sent = known.sent.pop(number, None) if known is not None else None
        if known is None or sent is None:
            return
        if number <= known.seen(self.gateway):
            known.ended += 1
        else:
            known.computed(sent)
            known.waiting[sent.priority] -= 1

    def loads(self, now: float, exclude: Collection[str] = ()) -> tuple[ReplicaLoad, ...]:
        """Those that may be chosen now, as they are thought to be at this instant.

        Fresh, ready, neither cordoned nor ejected. When fewer than half of the ready replicas are fresh, reporting has
        failed, not the replicas: the last good set stays in force, and what is sent is added to what was last known.
        """
        horizon = now - STALE_INTERVALS * self.interval
        ready = {name: known for name, known in self._replicas.items() if known.report.state is ReplicaState.READY}
        fresh = frozenset([name for name, known in ready.items() if known.received >= horizon])
        if 2 * len(fresh) >= len(ready):
            self._frozen = fresh
        open_to = self._frozen - self.cordoned
        allowed = [name for name, known in ready.items() if name in open_to and not known.report.cordoned]
        out = self.outliers.ejected(allowed, now)
        return tuple([self._load(name, now) for name in allowed if name not in out and name not in exclude])

    def _load(self, name: str, now: float) -> ReplicaLoad:
        known = self._replicas[name]
        report = known.report
        age = min(max(0.0, now - known.received), STALE_INTERVALS * self.interval)
        backlog = dict(known.backlog)
        _drain(backlog, (report.prefill_rate or 0.0) * max(0.0, known.received + age - known.clock))
        finished = max(float(known.ended), (report.completion_rate or 0.0) * age if report.free_slots <= 0 else 0.0)
        return ReplicaLoad(
            replica_id=name,
            backlog=backlog,
            waiting=dict(known.waiting),
            running={load.priority: load.running for load in report.classes},
            free_slots=report.free_slots + finished,
            free_blocks=report.free_blocks,
            block_size=report.limits.block_size,
            budget=report.effective.prefill_token_budget or report.limits.prefill_token_budget,
            prefill_rate=report.prefill_rate or None,
            completion_rate=report.completion_rate or None,
            block_release_rate=report.block_release_rate or None,
            iteration=report.iteration_seconds,
            in_flight=len(known.sent),
            slack=known.round_trip + (report.iteration_seconds or 0.0),
        )


def _classes(report: RuntimeReport, hint: LoadHint) -> tuple[ClassLoad, ...]:
    """The classes of the last full report, with the hint's tokens and totals."""
    waiting = {load.priority: load.waiting for load in report.classes}
    running = {load.priority: load.running for load in report.classes}
    _match_total(waiting, hint.waiting, hint.remaining_prefill_tokens)
    _match_total(running, hint.running, hint.remaining_prefill_tokens)
    priorities = sorted({*waiting, *running, *hint.remaining_prefill_tokens}, reverse=True)
    return tuple(
        ClassLoad(
            priority, waiting.get(priority, 0), running.get(priority, 0), hint.remaining_prefill_tokens.get(priority, 0)
        )
        for priority in priorities
    )


def _match_total(counts: dict[int, int], total: int, present: Collection[int]) -> None:
    """Brings the sum of `counts` to `total`: adds to the highest class with work, takes from the highest first."""
    missing = total - sum(counts.values())
    if missing > 0:
        priority = max(present, default=max(counts, default=0))
        counts[priority] = counts.get(priority, 0) + missing
    for priority in sorted(counts, reverse=True):
        if missing >= 0:
            break
        off = min(counts[priority], -missing)
        counts[priority] -= off
        missing += off


def _drain(backlog: dict[int, float], tokens: float) -> None:
    """Takes computed tokens off, the highest class first, as the engine works."""
    for priority in sorted(backlog, reverse=True):
        if tokens <= 0 or not math.isfinite(tokens):
            return
        done = min(tokens, backlog[priority])
        backlog[priority] -= done
        tokens -= done
