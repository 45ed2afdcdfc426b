"""Requests that wait at the door: bounded in number, bytes and seconds; classes with shares and ageing, so that none
starves.

Turns go to the highest class that waits, with one exception. A class that is passed over earns credit: its share of the
tokens that others were given. When its oldest request has waited for `ageing` seconds and the credit pays for that
request, it has the next turn. So a request of class k that c_k tokens of its own class stand before waits at most

    ageing + (c_k + its own tokens) · (Σ shares / shares_k) / C    plus the dispatch that is under way

seconds, whatever higher classes send, where Σ goes over the classes that wait. Within a class the order is that of
arrival, always.

Every request leaves exactly once: by `leave` (its turn, given up, cancelled) or by `expire`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway_core.admission.request import Request

AGEING = 5.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at once, over all classes; `seconds` is the longest wait of a class without a `max_queue_time` of
    its own."""

    requests: int = 2048
    bytes: int = 256 * 1024 * 1024
    seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.bytes < 1 or not self.seconds > 0:
            raise ValueError(f"queue limits must be positive, not {self}")


@dataclass(slots=True)
class _Line:
    """The waiting requests of one class, oldest first, and the credit that it earned by being passed over (tokens)."""

    entries: dict[int, Request]
    credit: float = 0.0

    @property
    def oldest(self) -> Request:
        return next(iter(self.entries.values()))


class AdmissionQueue:
    """The queue. `push`, then `order` or `next` to look, `leave` to take out; `now` in seconds is always passed in."""

    def __init__(self, limits: QueueLimits = QueueLimits(), ageing: float = AGEING) -> None:
        self.limits = limits
        self.ageing = ageing
        self.bytes = 0
        self._lines: dict[int, _Line] = {}
        self._entries: dict[int, Request] = {}
        self._expiries: list[tuple[float, int]] = []
        self._expiry_of: dict[int, float] = {}
        self._order: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def depth(self, priority: int) -> int:
        """Requests of this class that wait."""
        line = self._lines.get(priority)
        return len(line.entries) if line else 0

    def fits(self, request: Request) -> bool:
        """Whether there is room for one more of this size."""
        return len(self._entries) < self.limits.requests and self.bytes + request.size_bytes <= self.limits.bytes

    def latest(self, request: Request) -> float:
        """The instant after which it may not wait any longer, whatever is predicted."""
        longest = request.slo.max_queue_time
        return request.arrival + (self.limits.seconds if longest is None else longest)

    def push(self, request: Request, expiry: float = math.inf) -> None:
        """Takes it in, at its place by arrival. It expires at `expiry`, or at `latest` if that comes first.

        Raises:
            ValueError: it waits already, or there is no room (`fits` says so beforehand).
        """
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id} waits already")
        if not self.fits(request):
            raise ValueError("the queue is full: ask `fits` first")
        line = self._lines.setdefault(request.priority, _Line({}))
        late = not line.entries or next(reversed(line.entries.values())).arrival <= request.arrival
        line.entries[request.request_id] = request
        if not late:  # back from a replica that failed: it keeps its place
            line.entries = dict(sorted(line.entries.items(), key=lambda entry: (entry[1].arrival, entry[0])))
        self._entries[request.request_id] = request
        self._order = None
        self.bytes += request.size_bytes
        self.renew(request.request_id, expiry)

    def renew(self, request_id: int, expiry: float) -> None:
        """Replaces the expiry of a waiting request; unknown ids are passed over."""
        request = self._entries.get(request_id)
        if request is None:
            return
        expiry = min(expiry, self.latest(request))
        if self._expiry_of.get(request_id) == expiry:
            return
        self._expiry_of[request_id] = expiry
        heapq.heappush(self._expiries, (expiry, request_id))
        if len(self._expiries) > 2 * len(self._entries) + 64:
            self._expiries = [(when, which) for which, when in self._expiry_of.items()]
            heapq.heapify(self._expiries)

    def leave(self, request_id: int) -> Request | None:
        """Takes it out; None when it had left before: whoever gets the request, and nobody else, answers for it."""
        request = self._entries.pop(request_id, None)
        if request is None:
            return None
        self._order = None
        self.bytes -= request.size_bytes
        del self._expiry_of[request_id]
        line = self._lines[request.priority]
        del line.entries[request_id]
        if not line.entries:
            del self._lines[request.priority]  # credit is for waiting: it ends with the wait
        return request

    def expire(self, now: float) -> list[Request]:
        """Takes out all whose time has passed, the most overdue first."""
        out: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now:
            when, request_id = heapq.heappop(self._expiries)
            if self._expiry_of.get(request_id) == when:
                request = self.leave(request_id)
                if request is not None:
                    out.append(request)
        return out

    def next_expiry(self) -> float | None:
        """The earliest expiry of those that wait."""
        while self._expiries and self._expiry_of.get(self._expiries[0][1]) != self._expiries[0][0]:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def order(self) -> Sequence[Request]:
        """All that wait, highest class first, then by arrival: the order that predictions are laid out in. Not to be
        changed."""
        if self._order is None:
            self._order = [
                request for rank in sorted(self._lines, reverse=True) for request in self._lines[rank].entries.values()
            ]
        return self._order

    def turns(self, now: float) -> Iterator[Request]:
        """The oldest of each class, in the order in which they have their turn now."""
        for priority in self._classes(now):
            yield self._lines[priority].oldest

    def next(self, now: float) -> Request | None:
        """Whose turn it is; it stays until `leave`."""
        return next(self.turns(now), None)

    def line(self, priority: int) -> Iterator[Request]:
        """Those of one class, oldest first; take nobody out meanwhile."""
        line = self._lines.get(priority)
        return iter(line.entries.values()) if line else iter(())

    def served(self, request: Request) -> None:
        """Books a turn that `request` (which has left) was given: it pays from its own class's credit, the others
        earn."""
        own = self._lines.get(request.priority)
        if own is not None:
            own.credit = max(0.0, own.credit - request.uncached_tokens)
        shares = {rank: line.oldest.slo.shares for rank, line in self._lines.items()}
        shares[request.priority] = request.slo.shares
        total = sum(shares.values())
        for rank, line in self._lines.items():
            if rank != request.priority:
                line.credit += request.uncached_tokens * shares[rank] / total

    def aged(self, request: Request, now: float) -> bool:
        """Whether it has the turn by its credit, before higher classes."""
        line = self._lines.get(request.priority)
        return line is not None and self._entitled(line, now)

    def _classes(self, now: float) -> list[int]:
        entitled = [priority for priority, line in self._lines.items() if self._entitled(line, now)]
        # The longest wait first among those whose credit has come due; then strictly by class.
        entitled.sort(key=lambda priority: (self._lines[priority].oldest.arrival, -priority))
        return entitled + sorted((priority for priority in self._lines if priority not in entitled), reverse=True)

    def _entitled(self, line: _Line, now: float) -> bool:
        oldest = line.oldest
        return line.credit >= oldest.uncached_tokens and now - oldest.arrival >= self.ageing
