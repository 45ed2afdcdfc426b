"""Increments of counters of many processes, by source, summed over a window; missing is kept apart from zero.

Raw counters never leave this file. The rules, each of which a fleet that restarts will break if it is not kept:

1. A source seen for the first time has no increment: its counter may have grown for days.
2. A counter that fell, or a new boot, starts again from zero: what it shows now was counted since.
3. A source that is gone takes nothing back; what it had counted stays in the window until the window has passed it.
4. A source that is alive but did not answer has an unknown increment, not zero: its next answer covers the gap.

A span in which a source came, went, restarted or stayed silent gives no exact sum, so rates prefer the other spans.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

RESOLUTION = 60
"""A window is kept in about this many spans."""


@dataclass(frozen=True, slots=True)
class CounterReading(Generic[K]):
    """One source's counters as it reported them; `boot_id` changes when they start again from zero."""

    boot_id: str
    counters: Mapping[K, int]


@dataclass(slots=True)
class _Span(Generic[K]):
    """Increments between two polls (start, end], seconds of the caller's clock."""

    start: float
    end: float
    increments: dict[K, int]
    churn: bool
    silent: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return not self.churn and not self.silent


@dataclass(frozen=True, slots=True)
class CounterTotal(Generic[K]):
    """Sums over a window. `seconds` is the time that `increments` cover, at most the window."""

    increments: Mapping[K, int]
    seconds: float

    def get(self, key: K) -> int:
        """The increment of one counter; a counter that nobody reported has not moved."""
        return self.increments.get(key, 0)


class CounterWindow(Generic[K]):
    """The increments of one fleet of counters. Give it each poll with `record`; it keeps `horizon` seconds."""

    def __init__(self, horizon: float) -> None:
        self.horizon = horizon
        self._last: dict[str, tuple[float, CounterReading[K]]] = {}
        self._spans: list[_Span[K]] = []
        self._polled_at: float | None = None

    def record(self, readings: Mapping[str, CounterReading[K]], alive: Collection[str], now: float) -> None:
        """Takes one poll: what answered, and which sources exist now (those that did not answer included)."""
        if self._polled_at is not None and now > self._polled_at:
            gone = self._last.keys() - set(alive)
            newborn = (readings.keys() & set(alive)) - self._last.keys()
            silent = {name for name in alive if name in self._last and name not in readings}
            span = _Span[K](self._polled_at, now, {}, churn=bool(gone or newborn), silent=silent)
            self._spans.append(span)
            for name, reading in readings.items():
                if name in self._last:
                    self._add(name, reading)
        for name in self._last.keys() - set(alive):
            del self._last[name]
        for name in readings.keys() & set(alive):
            self._last[name] = (now, readings[name])
        self._polled_at = now
        self._coalesce()
        self._spans = [span for span in self._spans if span.end > now - self.horizon]

    def _add(self, name: str, reading: CounterReading[K]) -> None:
        before_at, before = self._last[name]
        restarted = reading.boot_id != before.boot_id or any(
            reading.counters.get(key, 0) < count for key, count in before.counters.items()
        )
        self._merge_since(before_at, name)
        span = self._spans[-1]
        span.churn = span.churn or restarted
        for key, count in reading.counters.items():
            grown = count if restarted else count - before.counters.get(key, 0)
            if grown:
                span.increments[key] = span.increments.get(key, 0) + grown

    def _coalesce(self) -> None:
        """Makes one of the last two spans while both are complete and short: an hour needs no span for each poll."""
        if len(self._spans) < 2:
            return
        earlier, last = self._spans[-2:]
        if earlier.complete and last.complete and last.end - earlier.start <= self.horizon / RESOLUTION:
            for key, count in last.increments.items():
                earlier.increments[key] = earlier.increments.get(key, 0) + count
            earlier.end = last.end
            self._spans.pop()

    def _merge_since(self, start: float, name: str) -> None:
        """Makes one span of all that began at `start` or later: the source's increment cannot be split among them."""
        merged = self._spans.pop()
        while self._spans and self._spans[-1].start >= start:
            earlier = self._spans.pop()
            for key, count in earlier.increments.items():
                merged.increments[key] = merged.increments.get(key, 0) + count
            merged.start = earlier.start
            merged.churn = merged.churn or earlier.churn
            merged.silent |= earlier.silent
        merged.silent.discard(name)
        self._spans.append(merged)

    def total(self, window: float, now: float) -> CounterTotal[K] | None:
        """Everything counted in the spans of the last `window` seconds; None before the second poll of any source."""
        return _sum([span for span in self._spans if span.end > now - window])

    def steady_total(self, window: float, now: float) -> CounterTotal[K] | None:
        """As `total`, over spans in which no source came, went, restarted or stayed silent; over all without one."""
        recent = [span for span in self._spans if span.end > now - window]
        return _sum([span for span in recent if span.complete] or recent)


def _sum(spans: list[_Span[K]]) -> CounterTotal[K] | None:
    if not spans:
        return None
    increments: dict[K, int] = {}
    for span in spans:
        for key, count in span.increments.items():
            increments[key] = increments.get(key, 0) + count
    return CounterTotal(increments, sum(span.end - span.start for span in spans))
