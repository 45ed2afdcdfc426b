"""The admission decision: `decide(request, load, classes, now)` → `Admit`, `Wait` or `Shed`.

Deciding changes nothing and may be repeated. What the controller knows beside its arguments it learned through
`offered`, `admitted`, `refused` and `compare`: arrival rates and lengths per class, how wrong its predictions were, and
how much work was told to come back. The decision itself is a rule's (`rules`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prediction import behind
from headway_core.admission.request import UNKNOWN, Admit, Decision, Prediction, Request, Shed, Wait
from headway_core.admission.retry_after import RetrySchedule, retry_after, spread
from headway_core.admission.rules.moore import Moore
from headway_core.admission.rules.rule import AdmissionRule, AdmissionView, ClassHistory, Refusal
from headway_core.contract.header_names import ShedReason
from headway_core.slo import PriorityClass

RHO_MAX = 0.95
"""Queueing headroom only: C is measured with decoders running, so it already pays for decoding."""


class AdmissionController:
    """Decides for one pool, by one rule.

    `margin`: a fixed fraction of the target to keep free; None: learned from errors. `seed`: of Retry-After's jitter.
    """

    def __init__(self, rule: AdmissionRule = Moore(), *, margin: float | None = None, seed: int = 0) -> None:
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"margin is a fraction of the target in [0, 1), not {margin}")
        self.rule = rule
        self._fixed_margin = margin
        self._seed = seed
        self._history: defaultdict[int, ClassHistory] = defaultdict(ClassHistory)
        """By priority."""
        self._retries = RetrySchedule()
        self._shares_of: tuple[Sequence[PriorityClass], dict[int, float]] = ((), {})
        """The classes in force and their shares, which every decision needs: they change with the policy alone."""

    # ------------------------------------------------------------ learning

    def offered(self, request: Request, now: float) -> None:
        """A request arrived, whatever becomes of it: demand, unless it repeats an earlier one."""
        if request.retry:
            return
        history = self._history[request.priority]
        history.offered_tokens.add(request.uncached_tokens, now)
        history.lengths.add(request.uncached_tokens, now)

    def admitted(self, request: Request, now: float) -> None:
        """A request was sent to a replica."""
        self._history[request.priority].admitted.add(1, now)

    def refused(self, request: Request, load: PoolLoad, now: float) -> None:
        """A request was told to come back: whoever is told so next comes after it."""
        if load.prefill_rate:
            self._retries.add(request.uncached_tokens / load.prefill_rate, now)

    def compare(self, priority: int, predicted: float, actual: float) -> None:
        """A TTFT predicted at arrival against what happened, or would have, to a request of this class; seconds."""
        self._history[priority].errors.compare(predicted, actual)

    def margin(self, request: Request) -> float:
        """Seconds before its target that a prediction has to keep."""
        target = request.target
        if target is None:
            return 0.0
        if self._fixed_margin is not None:
            return self._fixed_margin * target
        return self._history[request.priority].errors.margin(target)

    def higher_work(self, classes: Sequence[PriorityClass], now: float) -> dict[int, float]:
        """For `PoolLoad.higher_work`: prefill tokens per second offered above each class, as far as rates are known."""
        rates = {known.priority: self._history[known.priority].offered_tokens.rate(now) or 0.0 for known in classes}
        return {
            known.priority: sum(rate for priority, rate in rates.items() if priority > known.priority)
            for known in classes
        }

    def saturated(self, load: PoolLoad, now: float) -> bool:
        """The rate rule λ·s̄ > C·ρ_max: TTFT will break, even if no queue shows yet. A reason to scale, not to shed."""
        capacity = load.prefill_rate
        if capacity is None:
            return False
        offered = sum(history.offered_tokens.rate(now) or 0.0 for history in self._history.values())
        return offered > capacity * RHO_MAX

    # ------------------------------------------------------------ deciding

    def decide(
        self,
        request: Request,
        load: PoolLoad,
        classes: Sequence[PriorityClass],
        now: float,
        matches: Mapping[str, int] | None = None,
    ) -> Decision:
        """What to do with `request`, which may be new or waiting already.

        `classes`: those in force, whose shares count. `matches`: as in `routing.choose`.
        """
        if load.draining:
            return self._shed(request, ShedReason.DRAINING, 0.0, now)
        if not load.replicas:
            return self._shed(request, ShedReason.NO_REPLICA, 0.0, now)
        decided = self.rule.decide(request, self._view(load, classes, now, matches))
        if isinstance(decided, Refusal):
            return self._shed(request, decided.reason, decided.late_by, now, decided.prediction)
        displaced = self._outranked(decided.displaced, now)
        if decided.route is not None:
            return Admit(decided.route.replica_id, decided.route.prediction, displaced)
        return Wait(decided.expiry, decided.prediction, displaced)

    def recheck(self, request: Request, load: PoolLoad, classes: Sequence[PriorityClass], now: float) -> Shed | None:
        """Asked before `request`, one of `load.waiting`, is sent: its refusal if it should not start, else None."""
        if load.draining or self.rule.worth_starting(request, self._view(load, classes, now)):
            return None
        return self._shed(request, ShedReason.OUTRANKED, 0.0, now)

    def review(self, load: PoolLoad, classes: Sequence[PriorityClass], now: float) -> tuple[Shed, ...]:
        """Waiting requests whose target cannot be met any more: replicas were lost or are slower than predicted."""
        if not load.replicas:
            return ()
        return self._outranked(self.rule.overdue(self._view(load, classes, now)), now)

    def shed(
        self, request: Request, reason: ShedReason, load: PoolLoad, classes: Sequence[PriorityClass], now: float
    ) -> Shed:
        """The answer for a request that cannot stay for `reason`, with a Retry-After for the backlog now."""
        if not load.replicas:
            return self._shed(request, reason, 0.0, now)
        own, priority = request.request_id, request.priority
        ahead = [other for other in load.waiting if other.priority >= priority and other.request_id != own]
        backlog = behind(ahead, request, load, self._shares(classes))
        # As if it came now: what counts is when a repetition would fit, not how late this one is.
        ttft = math.inf if backlog.ttft is None else backlog.ttft
        excess = ttft - (request.target or math.inf) + self.margin(request)
        return self._shed(request, reason, excess, now, backlog)

    def expected(
        self, order: Sequence[Request], load: PoolLoad, classes: Sequence[PriorityClass], now: float
    ) -> float | None:
        """The instant at which the last of `order` (in service order) is predicted to have its first token."""
        ttft = behind(order[:-1], order[-1], load, self._shares(classes)).ttft
        return None if ttft is None else now + ttft

    def _view(
        self, load: PoolLoad, classes: Sequence[PriorityClass], now: float, matches: Mapping[str, int] | None = None
    ) -> AdmissionView:
        return AdmissionView(load, self._shares(classes), now, self.margin, self._history, matches)

    def _outranked(self, requests: Sequence[Request], now: float) -> tuple[Shed, ...]:
        return tuple([self._shed(one, ShedReason.OUTRANKED, 0.0, now) for one in requests])

    def _shed(
        self, request: Request, reason: ShedReason, excess: float, now: float, prediction: Prediction = UNKNOWN
    ) -> Shed:
        contended = reason not in (ShedReason.NO_REPLICA, ShedReason.DRAINING)
        seconds = max(0.0, excess) + (self._retries.wait(now) if contended else 0.0)
        jitter = spread(self._seed, request.request_id)
        return Shed(request.request_id, reason, retry_after(seconds, jitter), prediction)

    def _shares(self, classes: Sequence[PriorityClass]) -> dict[int, float]:
        known, shares = self._shares_of
        if known is not classes:
            total = sum(one.shares for one in classes)
            shares = {one.priority: one.shares / total for one in classes}
            self._shares_of = classes, shares
        return shares
