"""The admission of one pool, put together from queue, fleet, controller and prefix index.

Gateway and simulator drive it with their own clock. It opens no connection and wakes nobody: it returns its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway_core.admission.admission_queue import AdmissionQueue
from headway_core.admission.controller import AdmissionController
from headway_core.admission.fleet import Fleet
from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prefixes import PrefixIndex
from headway_core.admission.request import Admit, Request, Shed, Wait
from headway_core.admission.results import AdmissionResult, Dispatch, PredictionSample
from headway_core.admission.routing import Route, choose
from headway_core.contract.header_names import ShedReason
from headway_core.contract.reports import LoadHint, RuntimeReport
from headway_core.slo import PriorityClass

POLL_SECONDS = 0.01
"""How often to poll while a request waits: a prediction may change without an event."""


@dataclass(frozen=True, slots=True)
class _Sent:
    replica_id: str
    number: int
    expected: float | None
    """Instant at which the first token was predicted at dispatch."""


@dataclass(frozen=True, slots=True)
class _Counterfactual:
    """What the TTFT of a request that was shed would have been: learned from the request that it would have stood
    behind, on the assumption that it would have been as much too early or too late as that one."""

    priority: int
    predicted: float
    """Seconds."""
    expected: float
    """Instant at which the request ahead was predicted to have its first token, from the same load."""


@dataclass(slots=True)
class _KnownRequest:
    """A request that waits or is open on a replica."""

    request: Request
    predicted: float | None = None
    """TTFT predicted at its arrival, until its first token."""
    sent: _Sent | None = None
    """None while it waits."""
    counterfactual: _Counterfactual | None = None
    """Of one that was shed and would have stood behind it, until the first token."""
    tried: frozenset[str] | None = None
    """Replicas that failed it, while it waits for another one."""


class PoolAdmission:
    """Admits requests to one pool. Call `poll` after what frees something, and every `POLL_SECONDS` while one waits."""

    def __init__(
        self,
        classes: Sequence[PriorityClass],
        gateway: str,
        *,
        controller: AdmissionController | None = None,
        queue: AdmissionQueue | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.controller = controller if controller is not None else AdmissionController()
        self.queue = queue if queue is not None else AdmissionQueue()
        self.fleet = fleet if fleet is not None else Fleet(gateway)
        self.prefixes = PrefixIndex()
        self.draining = False
        """Set when this gateway goes away: nothing new comes in, what waits is still served."""
        self._known: dict[int, _KnownRequest] = {}
        """By id; among those that are open, the latest dispatch is the last."""
        self._review_due = False

    # ------------------------------------------------------------ the path of a request

    def submit(self, request: Request, now: float) -> AdmissionResult:
        """A new request: dispatched at once, shed, or kept waiting (then in no list). Others may be shed for it."""
        matches = self.prefixes.matches(request.prefix)
        if matches and request.prefix_chunk_tokens:
            cached = min(request.prompt_tokens - 1, int(max(matches.values()) * request.prefix_chunk_tokens))
            request = replace(request, cached_tokens=cached)
        self.controller.offered(request, now)
        load = self.load(now)
        decision = self.controller.decide(request, load, self.classes, now, matches)
        if isinstance(decision, Shed):
            self._learn_from_shed(request, decision, load, now)
            if decision.contended:
                self.controller.refused(request, load, now)
            return AdmissionResult(shed=(decision,))
        shed = self._shed_waiting(decision.displaced, load, now)
        if isinstance(decision, Wait) and not self.queue.fits(request):
            displaced = self._displace(request, load, now)
            if displaced is None:
                return AdmissionResult(shed=(*shed, self._refuse(request, ShedReason.QUEUE_FULL, load, now)))
            shed += displaced
        known = _KnownRequest(request, decision.prediction.ttft)
        if isinstance(decision, Admit):
            route = Route(decision.replica_id, decision.prediction, request.cached_tokens)
            return AdmissionResult((self._send(known, route, request.priority, now),), tuple(shed))
        self.queue.push(request, decision.expiry)
        self._known[request.request_id] = known
        return AdmissionResult(shed=tuple(shed))

    def poll(self, now: float) -> AdmissionResult:
        """Those that wait and are sent now, and those whose wait ends without that."""
        shed = []
        for request in self.queue.expire(now):
            load = self.load(now)
            del self._known[request.request_id]
            reason = ShedReason.QUEUE_TIME if load.replicas else ShedReason.NO_REPLICA
            shed.append(self._refuse(request, reason, load, now))
        if self._review_due:
            self._review_due = False
            load = self.load(now)
            shed += self._shed_waiting(self.controller.review(load, self.classes, now), load, now)
        dispatches: list[Dispatch] = []
        while (found := self._next_to_send(now)) is not None:
            known, route, priority = found
            request = known.request
            if known.tried is None:  # one that a replica failed was checked before it was sent there
                load = self.load(now)
                refused = self.controller.recheck(request, load, self.classes, now)
                if refused is not None:
                    shed += self._shed_waiting((refused,), load, now)
                    continue
            self.queue.leave(request.request_id)
            known.tried = None
            self.queue.served(request)
            dispatches.append(self._send(known, route, priority, now))
        return AdmissionResult(tuple(dispatches), tuple(shed))

    def first_token(self, request_id: int, now: float) -> tuple[PredictionSample, ...]:
        """Its first content came. Returns what this says about predictions."""
        known = self._known.get(request_id)
        if known is None or known.sent is None:
            return ()
        self.fleet.computed(known.sent.replica_id, known.sent.number)
        found: list[PredictionSample] = []
        if known.predicted is not None:
            priority, arrival = known.request.priority, known.request.arrival
            found.append(PredictionSample(priority, False, known.predicted, now - arrival))
        if (shed := known.counterfactual) is not None:
            found.append(PredictionSample(shed.priority, True, shed.predicted, shed.predicted + now - shed.expected))
        known.predicted = known.counterfactual = None
        for sample in found:
            self.controller.compare(sample.priority, sample.predicted, sample.actual)
        self.fleet.outliers.success(known.sent.replica_id, now)
        return tuple(found)

    def ended(self, request_id: int, now: float, server_error: bool = False) -> None:
        """It is over: answered, refused by the runtime, cancelled or timed out. Calling it twice does no harm.

        `server_error`: the connect failed, the runtime answered 5xx, or the connection broke; never a client's fault.
        """
        known = self._known.pop(request_id, None)
        if known is None:
            return
        if known.sent is None:
            self.queue.leave(request_id)
            return
        self.fleet.end(known.sent.replica_id, known.sent.number)
        if server_error:
            self.fleet.outliers.server_error(known.sent.replica_id, now)

    def resubmit(self, request: Request, now: float, tried: Sequence[str]) -> AdmissionResult:
        """Another replica for a request whose first one failed before any content (after `ended`).

        It is dispatched to one not in `tried`, or waits for one at its old place until its deadline, or is shed.
        """
        load = PoolLoad(self.fleet.loads(now, exclude=tried))
        route = choose(request, load, self.prefixes.matches(request.prefix))
        if route is not None:
            return AdmissionResult((self._send(_KnownRequest(request), route, request.priority, now),))
        if not load.replicas or not self.queue.fits(request):
            reason = ShedReason.QUEUE_FULL if load.replicas else ShedReason.NO_REPLICA
            return AdmissionResult(shed=(self._refuse(request, reason, load, now),))
        self.queue.push(request, request.deadline)
        self._known[request.request_id] = _KnownRequest(request, tried=frozenset(tried))
        return AdmissionResult()

    # ------------------------------------------------------------ what is learned from replicas

    def report(self, report: RuntimeReport, now: float, round_trip: float = 0.0) -> None:
        """A polled load report."""
        if self.fleet.observe(report, now, round_trip):
            self.prefixes.forget(report.replica_id)
        self._review_due = True

    def hint(self, replica_id: str, hint: LoadHint, now: float) -> None:
        """The short report that rode on a response."""
        self.fleet.hint(replica_id, hint, now)

    def remove(self, replica_id: str) -> None:
        """The replica is gone for good."""
        self.fleet.remove(replica_id)
        self.prefixes.forget(replica_id)

    # ------------------------------------------------------------ reading

    def load(self, now: float) -> PoolLoad:
        """The snapshot that decisions are taken from."""
        return PoolLoad(
            replicas=self.fleet.loads(now),
            waiting=self.queue.order(),
            higher_work=self.controller.higher_work(self.classes, now),
            draining=self.draining,
        )

    def predicted(self, request_id: int) -> float | None:
        """The TTFT that was predicted when it was submitted, until its first token; None when that was unknown."""
        known = self._known.get(request_id)
        return None if known is None else known.predicted

    def saturated(self, now: float) -> bool:
        """The rate rule holds: more is offered than the pool can carry."""
        return self.controller.saturated(self.load(now), now)

    def check(self) -> None:
        """For tests. Raises AssertionError where queue, fleet and what is known of requests disagree."""
        self.queue.check()
        waiting = {request_id for request_id, known in self._known.items() if known.sent is None}
        if waiting != {request.request_id for request in self.queue.order()}:
            raise AssertionError(f"known to wait are {waiting}, and {self.queue.order()} do")
        for replica_id in self.fleet:
            sent = sum(known.sent is not None and known.sent.replica_id == replica_id for known in self._known.values())
            if sent < self.fleet.in_flight(replica_id):
                raise AssertionError(f"{sent} were sent to {replica_id}, which has {self.fleet.in_flight(replica_id)}")
        for known in self._known.values():
            if known.sent is not None and known.tried is not None:
                raise AssertionError(f"{known} was sent, and waits for another replica")

    # ------------------------------------------------------------ inside

    def _next_to_send(self, now: float) -> tuple[_KnownRequest, Route, int] | None:
        first = self.queue.next(now)
        if first is None:
            return None
        priority = first.priority
        if self.queue.aged(first, now):
            priority = max(other.priority for other in self.queue.heads(now))
        for request in self.queue.waiting_of(first.priority):
            known = self._known[request.request_id]
            load = PoolLoad(self.fleet.loads(now, exclude=known.tried or ()))
            served_as = request
            if priority != request.priority:
                served_as = replace(request, priority_class=replace(request.priority_class, priority=priority))
            route = choose(served_as, load, self.prefixes.matches(request.prefix))
            if route is not None:
                return known, route, priority
            if known.tried is None:
                return None
            # It waits for a replica that has not failed it; that holds up nobody behind it.
        return None

    def _send(self, known: _KnownRequest, route: Route, priority: int, now: float) -> Dispatch:
        request = known.request
        number = self.fleet.dispatch(route.replica_id, priority, request.prompt_tokens - route.cached_tokens, now)
        ttft = route.prediction.ttft
        known.sent = _Sent(route.replica_id, number, None if ttft is None else now + ttft)
        self._known.pop(request.request_id, None)
        self._known[request.request_id] = known  # the latest dispatch is the last
        self.prefixes.sent(request.prefix, route.replica_id)
        self.controller.admitted(request, now)
        return Dispatch(request, route.replica_id, number, priority, route.prediction)

    def _shed_waiting(self, shed: Sequence[Shed], load: PoolLoad, now: float) -> list[Shed]:
        """Takes these out of the queue; those that had left it already are not answered twice."""
        left = []
        for one in shed:
            request = self.queue.leave(one.request_id)
            if request is not None:
                del self._known[one.request_id]
                self.controller.refused(request, load, now)
                left.append(one)
        return left

    def _refuse(self, request: Request, reason: ShedReason, load: PoolLoad, now: float) -> Shed:
        shed = self.controller.shed(request, reason, load, self.classes, now)
        if shed.contended:
            self.controller.refused(request, load, now)
        return shed

    def _displace(self, request: Request, load: PoolLoad, now: float) -> list[Shed] | None:
        """Sheds waiting lower classes, the lowest and latest first, until `request` fits; None: it never does."""
        lower = [other for other in reversed(self.queue.order()) if other.priority < request.priority]
        count, size, limits = len(self.queue), self.queue.bytes, self.queue.limits
        out: list[Request] = []
        while count >= limits.requests or size + request.size_bytes > limits.bytes:
            if len(out) == len(lower):
                return None
            out.append(lower[len(out)])
            count, size = count - 1, size - out[-1].size_bytes
        for other in out:
            self.queue.leave(other.request_id)
            del self._known[other.request_id]
        return [self._refuse(other, ShedReason.QUEUE_FULL, load, now) for other in out]

    def _learn_from_shed(self, request: Request, shed: Shed, load: PoolLoad, now: float) -> None:
        """Keeps a shed request's counterfactual with the one it would have stood behind, if that has none yet."""
        if shed.prediction.ttft is None:
            return
        ahead = [other for other in load.waiting if other.priority >= request.priority]
        if ahead:
            last = self._known[ahead[-1].request_id]
            expected = self.controller.expected(ahead, load, self.classes, now)
        else:
            latest = next((known for known in reversed(self._known.values()) if known.sent is not None), None)
            if latest is None or latest.sent is None or latest.predicted is None:
                return
            last, expected = latest, latest.sent.expected
        if expected is not None and math.isfinite(expected) and last.counterfactual is None:
            last.counterfactual = _Counterfactual(request.priority, shed.prediction.ttft, expected)
