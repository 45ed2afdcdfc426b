"""The requests that wait for admission: bounded in number, bytes and seconds; fair between classes.

The next request comes from the highest class that waits, with one exception, so that no class starves. While other
classes are served, a waiting class earns credit: its share of the tokens that they were given. When its oldest request
has waited for `ageing` seconds and the credit covers that request's tokens, it is served next. So a request of class k
with c_k tokens of its own class before it waits at most

    ageing + (c_k + its own tokens) · (Σ shares / shares_k) / C    plus the dispatch that is under way

seconds, whatever higher classes send, where Σ goes over the classes that wait. Within a class the order is by arrival.

Every request leaves exactly once: by `leave` (sent, shed or cancelled) or by `expire`.
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
    """What may wait at once, over all classes; `seconds` bounds the wait of a class without `max_queue_time`."""

    requests: int = 2048
    bytes: int = 256 * 1024 * 1024
    seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.bytes < 1 or not self.seconds > 0:
            raise ValueError(f"queue limits must be positive, not {self}")


@dataclass(slots=True)
class _Waiting:
    request: Request
    expiry: float


@dataclass(slots=True)
class _ClassQueue:
    """The waiting requests of one class, oldest first, and its credit in tokens, earned while others were served."""

    entries: dict[int, Request]
    credit: float = 0.0

    @property
    def oldest(self) -> Request:
        return next(iter(self.entries.values()))


class AdmissionQueue:
    """The queue. `push`, then `order` or `next` to read, `leave` to take out; `now` in seconds is always passed in."""

    def __init__(self, limits: QueueLimits = QueueLimits(), ageing: float = AGEING) -> None:
        self.limits = limits
        self.ageing = ageing
        self.bytes = 0
        self._waiting: dict[int, _Waiting] = {}
        self._classes: dict[int, _ClassQueue] = {}
        self._expiries: list[tuple[float, int]] = []
        """Heap of (expiry, request id); entries whose request has left are passed over."""
        self._order: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def depth(self, priority: int) -> int:
        """Requests of this class that wait."""
        queue = self._classes.get(priority)
        return len(queue.entries) if queue else 0

    def fits(self, request: Request) -> bool:
        """Whether one more of this size can be taken in."""
        return len(self._waiting) < self.limits.requests and self.bytes + request.size_bytes <= self.limits.bytes

    def latest(self, request: Request) -> float:
        """The instant after which it may not wait any longer, whatever is predicted."""
        longest = request.priority_class.max_queue_time
        return request.arrival + (self.limits.seconds if longest is None else longest)

    def push(self, request: Request, expiry: float = math.inf) -> None:
        """Takes it in, at its place by arrival. It expires at `expiry`, or at `latest` if that comes first.

        Raises:
            ValueError: it waits already, or the queue is full (`fits` says so beforehand).
        """
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} waits already")
        if not self.fits(request):
            raise ValueError("the queue is full: ask `fits` first")
        queue = self._classes.setdefault(request.priority, _ClassQueue({}))
        in_order = not queue.entries or next(reversed(queue.entries.values())).arrival <= request.arrival
        queue.entries[request.request_id] = request
        if not in_order:  # back from a replica that failed: it keeps its place
            queue.entries = dict(sorted(queue.entries.items(), key=lambda entry: (entry[1].arrival, entry[0])))
        expiry = min(expiry, self.latest(request))
        self._waiting[request.request_id] = _Waiting(request, expiry)
        self._order = None
        self.bytes += request.size_bytes
        heapq.heappush(self._expiries, (expiry, request.request_id))
        if len(self._expiries) > 2 * len(self._waiting) + 64:
            self._expiries = [(one.expiry, which) for which, one in self._waiting.items()]
            heapq.heapify(self._expiries)

    def leave(self, request_id: int) -> Request | None:
        """Takes it out; None when it had left before: whoever gets the request, and nobody else, answers for it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        request, self._order = waiting.request, None
        self.bytes -= request.size_bytes
        queue = self._classes[request.priority]
        del queue.entries[request_id]
        if not queue.entries:
            del self._classes[request.priority]  # credit is for waiting: it ends with the wait
        return request

    def expire(self, now: float) -> list[Request]:
        """Takes out all whose time has passed, the most overdue first."""
        out: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now:
            expiry, request_id = heapq.heappop(self._expiries)
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.expiry == expiry:
                self.leave(request_id)
                out.append(waiting.request)
        return out

    def order(self) -> Sequence[Request]:
        """All that wait, by class (highest first), then by arrival: the order of predictions. Not to be changed."""
        if self._order is None:
            self._order = [
                request
                for priority in sorted(self._classes, reverse=True)
                for request in self._classes[priority].entries.values()
            ]
        return self._order

    def heads(self, now: float) -> Iterator[Request]:
        """The oldest request of each class, in the order in which the classes are served now."""
        for priority in self._service_order(now):
            yield self._classes[priority].oldest

    def next(self, now: float) -> Request | None:
        """The request to serve next; it stays until `leave`."""
        return next(self.heads(now), None)

    def waiting_of(self, priority: int) -> Iterator[Request]:
        """The waiting requests of one class, oldest first; take nobody out meanwhile."""
        queue = self._classes.get(priority)
        return iter(queue.entries.values()) if queue else iter(())

    def served(self, request: Request) -> None:
        """Accounts for `request` (which has left) being served: its class pays from its credit, the others earn."""
        own = self._classes.get(request.priority)
        if own is not None:
            own.credit = max(0.0, own.credit - request.uncached_tokens)
        shares = {priority: queue.oldest.priority_class.shares for priority, queue in self._classes.items()}
        shares[request.priority] = request.priority_class.shares
        total = sum(shares.values())
        for priority, queue in self._classes.items():
            if priority != request.priority:
                queue.credit += request.uncached_tokens * shares[priority] / total

    def aged(self, request: Request, now: float) -> bool:
        """Whether it is served before higher classes, by its class's credit."""
        queue = self._classes.get(request.priority)
        return queue is not None and self._entitled(queue, now)

    def check(self) -> None:
        """For tests. Raises AssertionError where the queue disagrees with itself."""
        listed = [request for queue in self._classes.values() for request in queue.entries.values()]
        if sorted(request.request_id for request in listed) != sorted(self._waiting):
            raise AssertionError(f"classes list {listed}, and {list(self._waiting)} wait")
        if self.bytes != sum(request.size_bytes for request in listed):
            raise AssertionError(f"{listed} wait, not {self.bytes} bytes")
        if not {(one.expiry, which) for which, one in self._waiting.items()} <= set(self._expiries):
            raise AssertionError("a wait has no end")

    def _service_order(self, now: float) -> list[int]:
        entitled = [priority for priority, queue in self._classes.items() if self._entitled(queue, now)]
        # The longest wait first among those whose credit has come due; then strictly by class.
        entitled.sort(key=lambda priority: (self._classes[priority].oldest.arrival, -priority))
        return entitled + sorted((priority for priority in self._classes if priority not in entitled), reverse=True)

    def _entitled(self, queue: _ClassQueue, now: float) -> bool:
        oldest = queue.oldest
        return queue.credit >= oldest.uncached_tokens and now - oldest.arrival >= self.ageing
