"""The decision at the door: `decide(request, load, slo, now)` → `Admit`, `Wait` or `Shed`.

Deciding changes nothing and may be repeated. What the controller knows beside its arguments it learned through
`offered`, `admitted` and `compare`: arrival rates and lengths per class and how wrong its predictions were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headway_core.admission.offered_lengths import OfferedLengths
from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prediction import TOLERANCE, Forecast, behind, left_for
from headway_core.admission.prediction_errors import PredictionErrors
from headway_core.admission.rate_meter import RateMeter
from headway_core.admission.request import UNKNOWN, Admit, Decision, Prediction, Request, Shed, Wait
from headway_core.admission.retry_after import RetrySchedule, retry_after, spread
from headway_core.admission.routing import choose
from headway_core.admission.rules import Rule, moore, not_worth_starting, too_many_waiting
from headway_core.contract.header_names import ShedReason
from headway_core.slo import PriorityClass

RHO_MAX = 0.95
"""Queueing headroom only: C is measured with decoders running, so it already pays for decoding."""


class AdmissionController:
    """One pool's door.

    `margin`: a fixed fraction of the target to keep free; None: learned from past errors. `by_tokens`: weigh requests
    by their tokens. `anticipate`: under Moore's rule, ask again at a request's turn whether those expected behind it
    are worth more (`turn`); not where requests are weighed by their tokens, since then a long one is worth as much as
    the short ones that take its place.
    """

    def __init__(
        self,
        rule: Rule = Rule.MOORE,
        *,
        margin: float | None = None,
        by_tokens: bool = False,
        anticipate: bool = True,
        rho_max: float = RHO_MAX,
        seed: int = 0,
    ) -> None:
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"margin is a fraction of the target in [0, 1), not {margin}")
        if not 0 < rho_max <= 1:
            raise ValueError(f"rho_max lies in (0, 1], not {rho_max}")
        self.rule = rule
        self.by_tokens = by_tokens
        self._anticipates = anticipate and rule is Rule.MOORE and not by_tokens
        self._fixed_margin = margin
        self._rho_max = rho_max
        self._seed = seed
        self._errors: dict[int, PredictionErrors] = {}
        self._offered_tokens: dict[int, RateMeter] = {}
        self._lengths: dict[int, OfferedLengths] = {}
        self._admitted: dict[int, RateMeter] = {}
        self._appointments = RetrySchedule()

    # ------------------------------------------------------------ learning

    def offered(self, request: Request, now: float) -> None:
        """A request arrived, whatever becomes of it: demand, unless it repeats an earlier one."""
        if request.retry:
            return
        self._offered_tokens.setdefault(request.priority, RateMeter()).add(request.uncached_tokens, now)
        self._lengths.setdefault(request.priority, OfferedLengths()).add(request.uncached_tokens, now)

    def admitted(self, request: Request, now: float) -> None:
        """A request was sent to a replica."""
        self._admitted.setdefault(request.priority, RateMeter()).add(1, now)

    def refused(self, request: Request, load: PoolLoad, now: float) -> None:
        """A request was told to come back: whoever is told so next comes after it."""
        if load.prefill_rate:
            self._appointments.book(request.uncached_tokens / load.prefill_rate, now)

    def compare(self, priority: int, predicted: float, actual: float) -> None:
        """A TTFT that was predicted at arrival against what happened, or would have, to a request of this class;
        seconds."""
        self._errors.setdefault(priority, PredictionErrors()).compare(predicted, actual)

    def errors(self, priority: int) -> PredictionErrors:
        """What was learned about the predictions for this class."""
        return self._errors.get(priority) or PredictionErrors()

    def margin(self, request: Request) -> float:
        """Seconds before its target that a prediction has to keep."""
        target = request.target
        if target is None:
            return 0.0
        return (
            self._fixed_margin * target
            if self._fixed_margin is not None
            else self.errors(request.priority).margin(target)
        )

    def higher_work(self, slo: Sequence[PriorityClass], now: float) -> dict[int, float]:
        """For `PoolLoad.higher_work`: the prefill tokens per second that classes above each one offer.

        A class that was seen for too short a time to have a rate is not charged for yet.
        """
        rates = {known.priority: self._tokens_per_second(known.priority, now) for known in slo}
        return {known.priority: sum(rate for rank, rate in rates.items() if rank > known.priority) for known in slo}

    def saturated(self, load: PoolLoad, now: float) -> bool:
        """The rate rule λ·s̄ > C·ρ_max: TTFT will break although no queue need be visible yet. A signal to scale, never
        a reason to shed."""
        capacity = load.prefill_rate
        if capacity is None:
            return False
        return sum(self._tokens_per_second(rank, now) for rank in self._offered_tokens) > capacity * self._rho_max

    def _tokens_per_second(self, priority: int, now: float) -> float:
        meter = self._offered_tokens.get(priority)
        return (meter.rate(now) or 0.0) if meter else 0.0

    # ------------------------------------------------------------ deciding

    def decide(
        self,
        request: Request,
        load: PoolLoad,
        slo: Sequence[PriorityClass],
        now: float,
        matches: Mapping[str, int] | None = None,
    ) -> Decision:
        """What to do with `request`, which may be new or waiting already.

        `slo`: the classes in force, whose shares count. `matches`: as in `routing.choose`.
        """
        if load.draining:
            return self._shed(request, ShedReason.DRAINING, 0.0, now)
        if not load.replicas:
            return self._shed(request, ShedReason.NO_REPLICA, 0.0, now)
        if self.rule is Rule.OPEN:
            route = choose(request, load, matches) if not load.waiting else None
            return Admit(route.replica, route.prediction) if route is not None else Wait(math.inf, UNKNOWN)
        if not load.waiting and self.rule is Rule.MOORE and not load.higher_work.get(request.priority):
            # Nobody stands before it and nobody behind: what the replica that takes it now would make of it is all
            # there is to know.
            route = choose(request, load, matches)
            if route is not None and self._in_time(request, route.prediction, now):
                return Admit(route.replica, route.prediction)
        order = list(load.waiting)
        place = _place(order, request)
        if place and order[place - 1].request_id == request.request_id:
            place -= 1
        else:
            order.insert(place, request)
        shares = _shares(slo)
        prediction, all_in_time = self._look(order, place, load, shares, now)
        verdict = self._verdict(order, place, prediction, all_in_time=all_in_time, load=load, shares=shares, now=now)
        if isinstance(verdict, Shed):
            return verdict
        gone = {shed.request_id for shed in verdict}
        route = None if any(other.request_id not in gone for other in order[:place]) else choose(request, load, matches)
        if route is not None:
            return Admit(route.replica, route.prediction, verdict)
        return Wait(self._expiry(request, prediction), prediction, verdict)

    def recheck(self, request: Request, load: PoolLoad, slo: Sequence[PriorityClass], now: float) -> Shed | None:
        """Asked when `request`, one of `load.waiting`, could be sent: its refusal if it should not start, None to send
        it.

        One that was refused before and came back is not refused for arrivals that are only expected. A gateway that
        sees only part of what is offered refuses too few here, never too many.
        """
        if not self._anticipates or load.draining or request.retry or request.target is None or len(load.waiting) < 2:
            return None
        lengths = self._lengths.get(request.priority)
        if lengths is None or load.prefill_rate is None:
            return None
        shares = _shares(slo)
        carried = lengths.carried(load.prefill_rate * left_for(request.priority, load, shares), now)
        if carried is None or request.uncached_tokens <= carried:
            return None
        wait = behind(
            [other for other in load.waiting if other.priority >= request.priority], request, load, shares
        ).prefill_wait
        if wait is None or not not_worth_starting(request.uncached_tokens, carried, wait / request.target):
            return None
        return self._shed(request, ShedReason.OUTRANKED, 0.0, now)

    def review(self, load: PoolLoad, slo: Sequence[PriorityClass], now: float) -> tuple[Shed, ...]:
        """Those that wait whose promise can no longer be kept, since replicas were lost or became slower than was
        predicted."""
        if self.rule is not Rule.MOORE or not load.replicas:
            return ()
        displaced = moore(load.waiting, load, _shares(slo), now, self.margin, by_tokens=self.by_tokens)
        return tuple(self._shed(one, ShedReason.OUTRANKED, 0.0, now) for one in displaced)

    def shed(
        self, request: Request, reason: ShedReason, load: PoolLoad, slo: Sequence[PriorityClass], now: float
    ) -> Shed:
        """The answer for a request that cannot stay for `reason`, with a Retry-After for the backlog of this
        instant."""
        ahead = [
            other
            for other in load.waiting
            if other.priority >= request.priority and other.request_id != request.request_id
        ]
        backlog = behind(ahead, request, load, _shares(slo))
        if not load.replicas:
            return self._shed(request, reason, 0.0, now)
        # As if it came now: what counts is when a repetition would fit, not how late this one is.
        excess = (
            math.inf if backlog.ttft is None else backlog.ttft - (request.target or math.inf) + self.margin(request)
        )
        return self._shed(request, reason, excess, now, backlog)

    def expected(
        self, order: Sequence[Request], load: PoolLoad, slo: Sequence[PriorityClass], now: float
    ) -> float | None:
        """The instant at which the last of `order` (in service order) is predicted to have its first token."""
        ttft = behind(order[:-1], order[-1], load, _shares(slo)).ttft
        return None if ttft is None else now + ttft

    def _look(
        self, order: Sequence[Request], place: int, load: PoolLoad, shares: Mapping[int, float], now: float
    ) -> tuple[Prediction, bool]:
        """What the request at `place` meets, and (for Moore's rule) whether nobody in `order` would be late."""
        request = order[place]
        if self.rule is not Rule.MOORE:
            return behind(order[:place], request, load, shares), True
        laid_out = Forecast(load, shares)
        if laid_out.first_late(order[:place], now, self.margin) is not None:
            return behind(order[:place], request, load, shares), False
        prediction = laid_out.add(request)
        return prediction, self._in_time(request, prediction, now) and laid_out.first_late(
            order[place + 1 :], now, self.margin
        ) is None

    def _verdict(
        self,
        order: Sequence[Request],
        place: int,
        prediction: Prediction,
        *,
        all_in_time: bool,
        load: PoolLoad,
        shares: Mapping[int, float],
        now: float,
    ) -> tuple[Shed, ...] | Shed:
        """Refusal of the newcomer, which is in `order` at `place`, or whom to give up for it."""
        request = order[place]
        if request.target is None:
            return ()
        late_by = self._late_by(request, prediction, now)
        if self.rule is Rule.QUEUED_TOKENS:
            wait = prediction.prefill_wait
            excess = None if wait is None else now + wait - request.deadline + self.margin(request)
            return (
                self._shed(request, ShedReason.PREFILL_WAIT, excess, now, prediction)
                if excess is not None and excess > 0
                else ()
            )
        if self.rule is Rule.LITTLES_LAW or late_by is None:
            # Also where no prediction is possible: what was admitted so far is known even then.
            ahead = place + sum(replica.waiting_at(request.priority) for replica in load.replicas)
            meter = self._admitted.get(request.priority)
            service = (prediction.own or 0.0) + prediction.iteration
            if too_many_waiting(ahead, meter.rate(now) if meter else None, request.deadline - now, service):
                return self._shed(request, prediction.binding, late_by or 0.0, now, prediction)
            return ()
        if self.rule is Rule.PREDICTION:
            if late_by is not None and late_by > 0:
                return self._shed(request, prediction.binding, late_by, now, prediction)
            return ()
        if all_in_time:
            return ()
        displaced = moore(order, load, shares, now, self.margin, newcomer=request.request_id, by_tokens=self.by_tokens)
        if any(one.request_id == request.request_id for one in displaced):
            late = late_by is not None and late_by > 0
            return self._shed(
                request, prediction.binding if late else ShedReason.OUTRANKED, late_by or 0.0, now, prediction
            )
        return tuple(self._shed(one, ShedReason.OUTRANKED, 0.0, now) for one in displaced)

    def _late_by(self, request: Request, prediction: Prediction, now: float) -> float | None:
        """Seconds by which it would miss its target less the margin; None when that is unknown.

        A wait that alone is too long is reason enough, whatever is unknown beside it: where outputs dominate, C may
        never be measured.
        """
        latest = request.deadline - self.margin(request) + TOLERANCE
        ttft = prediction.ttft
        if ttft is not None:
            return now + ttft - latest
        late_by = now + prediction.at_least - latest
        return late_by if late_by > 0 else None

    def _in_time(self, request: Request, prediction: Prediction, now: float) -> bool:
        """Whether it would not be late, as far as is known."""
        late_by = self._late_by(request, prediction, now)
        return late_by is None or late_by <= 0

    def _expiry(self, request: Request, prediction: Prediction) -> float:
        """The last instant at which sending it can still keep its promise."""
        return request.deadline - (prediction.own or 0.0) - prediction.iteration

    def _shed(
        self, request: Request, reason: ShedReason, excess: float, now: float, prediction: Prediction = UNKNOWN
    ) -> Shed:
        contended = reason not in (ShedReason.NO_REPLICA, ShedReason.DRAINING)
        seconds = max(0.0, excess) + (self._appointments.wait(now) if contended else 0.0)
        return Shed(
            request.request_id, reason, retry_after(seconds, spread(self._seed, request.request_id)), prediction
        )


def _shares(slo: Sequence[PriorityClass]) -> dict[int, float]:
    total = sum(known.shares for known in slo)
    return {known.priority: known.shares / total for known in slo}


def _place(order: Sequence[Request], request: Request) -> int:
    """Where it stands in service order: behind its class's earlier arrivals, before lower classes."""
    key = (-request.priority, request.arrival, request.request_id)
    index = len(order)
    while index and (-order[index - 1].priority, order[index - 1].arrival, order[index - 1].request_id) > key:
        index -= 1
    return index
