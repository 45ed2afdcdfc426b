"""The door of one pool, put together: queue, fleet, controller and prefix index, in the order in which a request meets
them.

Gateway and simulator drive this same object with their own clock. It opens no connection and wakes nobody: what it
decides it returns.
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


@dataclass(slots=True)
class _Open:
    request: Request
    replica: str
    number: int
    expected: float | None
    """Instant at which the first token was predicted at dispatch."""


@dataclass(frozen=True, slots=True)
class _Shadow:
    """A request that was shed, compared through the one that it would have stood behind."""

    priority: int
    predicted: float
    expected: float
    """When the one ahead was predicted to have its first token, from the same view of the load."""


class PoolAdmission:
    """One pool's door. Ask `turns` again after every call that frees something, and every few milliseconds while
    anything waits."""

    def __init__(
        self,
        slo: Sequence[PriorityClass],
        gateway: str,
        *,
        controller: AdmissionController | None = None,
        queue: AdmissionQueue | None = None,
        fleet: Fleet | None = None,
        prefixes: PrefixIndex | None = None,
    ) -> None:
        self.slo = tuple(slo)
        self.controller = controller if controller is not None else AdmissionController()
        self.queue = queue if queue is not None else AdmissionQueue()
        self.fleet = fleet if fleet is not None else Fleet(gateway)
        self.prefixes = prefixes if prefixes is not None else PrefixIndex()
        self.draining = False
        """Set when this gateway goes away: nothing new comes in, what waits still has its turn."""
        self._open: dict[int, _Open] = {}
        self._predicted: dict[int, float] = {}
        self._shadows: dict[int, _Shadow] = {}
        self._tried: dict[int, frozenset[str]] = {}
        """Replicas that failed a request which waits for another one."""
        self._review = False

    # ------------------------------------------------------------ the path of a request

    def submit(self, request: Request, now: float) -> AdmissionResult:
        """A new request. It is dispatched at once, kept waiting (in no list of the answer) or shed; others may be shed
        for it."""
        matches = self.prefixes.matches(request.prefix)
        if matches and request.prefix_chunk_tokens:
            cached = min(request.prompt_tokens - 1, int(max(matches.values()) * request.prefix_chunk_tokens))
            request = replace(request, cached_tokens=cached)
        self.controller.offered(request, now)
        load = self.load(now)
        decision = self.controller.decide(request, load, self.slo, now, matches)
        if isinstance(decision, Shed):
            self._remember_shed(request, decision, load, now)
            if decision.contended:
                self.controller.refused(request, load, now)
            return AdmissionResult(shed=(decision,))
        shed = self._shed_waiting(decision.displaced, load, now)
        if isinstance(decision, Wait) and not self.queue.fits(request):
            displaced = self._displace(request, load, now)
            if displaced is None:
                return AdmissionResult(shed=(*shed, self._refuse(request, ShedReason.QUEUE_FULL, load, now)))
            shed += displaced
        if decision.prediction.ttft is not None:
            self._predicted[request.request_id] = decision.prediction.ttft
        if isinstance(decision, Admit):
            route = Route(decision.replica, decision.prediction, request.cached_tokens)
            return AdmissionResult((self._send(request, route, request.priority, now),), tuple(shed))
        self.queue.push(request, decision.expiry)
        return AdmissionResult(shed=tuple(shed))

    def poll(self, now: float) -> AdmissionResult:
        """Whose turn it is now, and whose wait is over without one."""
        shed = []
        for request in self.queue.expire(now):
            load = self.load(now)
            self._forget(request.request_id)
            shed.append(
                self._refuse(request, ShedReason.QUEUE_TIME if load.replicas else ShedReason.NO_REPLICA, load, now)
            )
        if self._review:
            self._review = False
            load = self.load(now)
            shed += self._shed_waiting(self.controller.review(load, self.slo, now), load, now)
        dispatches: list[Dispatch] = []
        while (found := self._next_to_send(now)) is not None:
            request, route, priority = found
            if request.request_id not in self._tried:  # one that a replica failed has had its turn, and has it again
                load = self.load(now)
                refused = self.controller.recheck(request, load, self.slo, now)
                if refused is not None:
                    shed += self._shed_waiting((refused,), load, now)
                    continue
            self.queue.leave(request.request_id)
            self._tried.pop(request.request_id, None)
            self.queue.served(request)
            dispatches.append(self._send(request, route, priority, now))
        return AdmissionResult(tuple(dispatches), tuple(shed))

    def first_token(self, request_id: int, now: float) -> tuple[PredictionSample, ...]:
        """Its first content came. Returns what this says about predictions."""
        opened = self._open.get(request_id)
        if opened is None:
            return ()
        self.fleet.computed(opened.replica, opened.number)
        found: list[PredictionSample] = []
        predicted = self._predicted.pop(request_id, None)
        if predicted is not None:
            found.append(PredictionSample(opened.request.priority, False, predicted, now - opened.request.arrival))
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            found.append(
                PredictionSample(shadow.priority, True, shadow.predicted, shadow.predicted + now - shadow.expected)
            )
        for comparison in found:
            self.controller.compare(comparison.priority, comparison.predicted, comparison.actual)
        self.fleet.outliers.success(opened.replica, now)
        return tuple(found)

    def ended(self, request_id: int, now: float, server_error: bool = False) -> None:
        """It is over, however it ended: answered, refused by the runtime, cancelled, timed out. Asking twice does no
        harm.

        `server_error`: the connect failed, the runtime answered 5xx, or the connection broke. Never for what a client
        did.
        """
        self._forget(request_id)
        if self.queue.leave(request_id) is not None:
            return
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        self.fleet.end(opened.replica, opened.number)
        if server_error:
            self.fleet.outliers.server_error(opened.replica, now)

    def resubmit(self, request: Request, now: float, tried: Sequence[str]) -> AdmissionResult:
        """Another replica for a request whose first one failed before any content (`ended` was told).

        It is dispatched to one that is not in `tried`, or waits for one at its old place until its deadline, or is shed
        when there is none.
        """
        load = PoolLoad(self.fleet.loads(now, exclude=tried))
        route = choose(request, load, self.prefixes.matches(request.prefix))
        if route is not None:
            return AdmissionResult((self._send(request, route, request.priority, now),))
        if not load.replicas or not self.queue.fits(request):
            reason = ShedReason.QUEUE_FULL if load.replicas else ShedReason.NO_REPLICA
            return AdmissionResult(shed=(self._refuse(request, reason, load, now),))
        self._tried[request.request_id] = frozenset(tried)
        self.queue.push(request, request.deadline)
        return AdmissionResult()

    # ------------------------------------------------------------ what is learned from replicas

    def report(self, report: RuntimeReport, now: float, round_trip: float = 0.0) -> None:
        """A polled load report."""
        if self.fleet.observe(report, now, round_trip):
            self.prefixes.forget(report.replica)
        self._review = True

    def hint(self, replica: str, hint: LoadHint, now: float) -> None:
        """The short report that rode on a response."""
        self.fleet.hint(replica, hint, now)

    def remove(self, replica: str) -> None:
        """The replica is gone for good."""
        self.fleet.remove(replica)
        self.prefixes.forget(replica)

    # ------------------------------------------------------------ looking

    def load(self, now: float) -> PoolLoad:
        """The snapshot that decisions are taken from."""
        return PoolLoad(
            replicas=self.fleet.loads(now),
            waiting=self.queue.order(),
            higher_work=self.controller.higher_work(self.slo, now),
            draining=self.draining,
        )

    def predicted(self, request_id: int) -> float | None:
        """The TTFT that was predicted when it was offered, until its first token; None when that was unknown."""
        return self._predicted.get(request_id)

    def saturated(self, now: float) -> bool:
        """The rate rule holds: more is offered than the pool can carry."""
        return self.controller.saturated(self.load(now), now)

    # ------------------------------------------------------------ inside

    def _next_to_send(self, now: float) -> tuple[Request, Route, int] | None:
        first = self.queue.next(now)
        if first is None:
            return None
        priority = first.priority
        if self.queue.aged(first, now):
            priority = max(other.priority for other in self.queue.heads(now))
        for request in self.queue.waiting_of(first.priority):
            load = PoolLoad(self.fleet.loads(now, exclude=self._tried.get(request.request_id, ())))
            served_as = (
                request
                if priority == request.priority
                else replace(request, slo=replace(request.slo, priority=priority))
            )
            route = choose(served_as, load, self.prefixes.matches(request.prefix))
            if route is not None:
                return request, route, priority
            if request.request_id not in self._tried:
                return None
            # It waits for a replica that has not failed it; that holds up nobody behind it.
        return None

    def _send(self, request: Request, route: Route, priority: int, now: float) -> Dispatch:
        number = self.fleet.dispatch(route.replica, priority, request.prompt_tokens - route.cached_tokens, now)
        ttft = route.prediction.ttft
        self._open[request.request_id] = _Open(request, route.replica, number, None if ttft is None else now + ttft)
        self.prefixes.sent(request.prefix, route.replica)
        self.controller.admitted(request, now)
        return Dispatch(request, route.replica, number, priority, route.prediction)

    def _shed_waiting(self, shed: Sequence[Shed], load: PoolLoad, now: float) -> list[Shed]:
        """Takes these out of the queue; those that had left it already are not answered twice."""
        displaced = []
        for one in shed:
            request = self.queue.leave(one.request_id)
            if request is not None:
                self._forget(one.request_id)
                self.controller.refused(request, load, now)
                displaced.append(one)
        return displaced

    def _refuse(self, request: Request, reason: ShedReason, load: PoolLoad, now: float) -> Shed:
        shed = self.controller.shed(request, reason, load, self.slo, now)
        if shed.contended:
            self.controller.refused(request, load, now)
        return shed

    def _forget(self, request_id: int) -> None:
        self._predicted.pop(request_id, None)
        self._shadows.pop(request_id, None)
        self._tried.pop(request_id, None)

    def _displace(self, request: Request, load: PoolLoad, now: float) -> list[Shed] | None:
        """Makes room in a full queue out of lower classes, the lowest and latest first; None when that would not be
        enough."""
        lower = [other for other in reversed(self.queue.order()) if other.priority < request.priority]
        count, size = len(self.queue), self.queue.bytes
        limits = self.queue.limits
        out: list[Request] = []
        while count >= limits.requests or size + request.size_bytes > limits.bytes:
            if len(out) == len(lower):
                return None
            out.append(lower[len(out)])
            count, size = count - 1, size - out[-1].size_bytes
        for other in out:
            self.queue.leave(other.request_id)
            self._forget(other.request_id)
        return [self._refuse(other, ShedReason.QUEUE_FULL, load, now) for other in out]

    def _remember_shed(self, request: Request, shed: Shed, load: PoolLoad, now: float) -> None:
        """Pairs it with the last one that it would have stood behind and that has no pair yet."""
        predicted = shed.prediction.ttft
        if predicted is None:
            return
        ahead = [other for other in load.waiting if other.priority >= request.priority]
        if ahead:
            last, expected = ahead[-1].request_id, self.controller.expected(ahead, load, self.slo, now)
        else:
            last, opened = next(reversed(self._open.items()), (0, None))
            expected = opened.expected if opened is not None and last in self._predicted else None
        if expected is not None and math.isfinite(expected) and last not in self._shadows:
            self._shadows[last] = _Shadow(request.priority, predicted, expected)
