"""What a rule decides from, and what it may decide."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from headway_core.admission.offered_lengths import OfferedLengths
from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prediction import TOLERANCE, Margins, behind
from headway_core.admission.prediction_errors import PredictionErrors
from headway_core.admission.rate_meter import RateMeter
from headway_core.admission.request import Prediction, Request
from headway_core.admission.routing import Route, choose
from headway_core.contract.header_names import ShedReason


@dataclass(slots=True)
class ClassHistory:
    """What was learned about one class."""

    offered_tokens: RateMeter = field(default_factory=RateMeter)
    """Uncached prompt tokens of all that arrived."""
    lengths: OfferedLengths = field(default_factory=OfferedLengths)
    """Likewise, by request."""
    admitted: RateMeter = field(default_factory=RateMeter)
    """Requests sent to a replica."""
    errors: PredictionErrors = field(default_factory=PredictionErrors)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is shed."""

    reason: ShedReason
    late_by: float
    """Seconds by which it would miss its target less the margin; 0 or less: it is not itself late."""
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The request is sent now if there is a `route`, else it waits."""

    prediction: Prediction
    route: Route | None = None
    expiry: float = math.inf
    """The last instant until which it may wait."""
    displaced: tuple[Request, ...] = ()
    """Waiting requests that are shed for it."""


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The pool and its queue at one instant, and what was learned so far."""

    load: PoolLoad
    shares: Mapping[int, float]
    """Priority → fraction of the pool that is guaranteed to the class."""
    now: float
    margin: Margins
    """Seconds before its target that a request's prediction has to keep."""
    history: Mapping[int, ClassHistory]
    """By priority; empty for a class that was not seen yet."""
    matches: Mapping[str, int] | None = None
    """As in `routing.choose`."""

    def split(self, request: Request) -> tuple[Sequence[Request], Sequence[Request]]:
        """Those that wait before and after `request` (new or waiting) in service order: by class, then by arrival."""
        waiting = self.load.waiting
        key = (-request.priority, request.arrival, request.request_id)
        after = len(waiting)
        while after and (-waiting[after - 1].priority, waiting[after - 1].arrival, waiting[after - 1].request_id) > key:
            after -= 1
        ahead = after - 1 if after and waiting[after - 1].request_id == request.request_id else after
        return waiting[:ahead], waiting[after:]

    def predict(self, request: Request) -> tuple[Sequence[Request], Prediction]:
        """Those that wait before `request`, and what is predicted for it behind them."""
        ahead, _ = self.split(request)
        return ahead, behind(ahead, request, self.load, self.shares)

    def late_by(self, request: Request, prediction: Prediction) -> float | None:
        """Seconds by which it would miss its target less the margin; None when that is unknown.

        One wait too long is enough to be late, whatever else is unknown: where outputs dominate, C may stay unmeasured.
        """
        latest = request.deadline - self.margin(request) + TOLERANCE
        ttft = prediction.ttft
        if ttft is not None:
            return self.now + ttft - latest
        late_by = self.now + prediction.at_least - latest
        return late_by if late_by > 0 else None

    def accept(
        self, request: Request, prediction: Prediction, ahead: Sequence[Request], displaced: Sequence[Request] = ()
    ) -> Acceptance:
        """Sent now if none of `ahead` stays and a replica accepts it; else it waits as long as it can be in time."""
        gone = {other.request_id for other in displaced}
        first = all(other.request_id in gone for other in ahead)
        route = choose(request, self.load, self.matches) if first else None
        latest_start = request.deadline - (prediction.own or 0.0) - prediction.iteration
        return Acceptance(prediction, route, latest_start, tuple(displaced))


class AdmissionRule(ABC):
    """Who is admitted. A rule that only looks at newcomers needs `decide` alone."""

    name: ClassVar[str]
    """On the command line and in reports."""

    @abstractmethod
    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """What to do with `request`, new or waiting; replicas exist. Changes nothing and may be repeated."""

    def worth_starting(self, request: Request, view: AdmissionView) -> bool:  # noqa: ARG002
        """Asked once more when `request`, one of those that wait, could be sent; False: it is shed instead."""
        return True

    def overdue(self, view: AdmissionView) -> Sequence[Request]:  # noqa: ARG002
        """Those that wait and are shed now, because replicas were lost or became slower than was predicted."""
        return ()
