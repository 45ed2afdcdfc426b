"""Rules that only look at the newcomer: open admission; limits by queued tokens, predicted TTFT and Little's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.request import UNKNOWN, Prediction, Request
from headway_core.admission.routing import choose
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView, Refusal
from headway_core.contract.header_names import ShedReason


@dataclass(frozen=True, slots=True)
class OpenAdmission(AdmissionRule):
    """Refuses nobody: requests wait as long as the queue allows. Predicts nothing."""

    name: ClassVar[str] = "open"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance:
        """Sent if nobody waits, else queued."""
        route = None if view.load.waiting else choose(request, view.load, view.matches)
        return Acceptance(UNKNOWN if route is None else route.prediction, route)


@dataclass(frozen=True, slots=True)
class QueuedTokens(AdmissionRule):
    """Limits the prefill tokens ahead to C · target; the newcomer's own prompt is not counted."""

    name: ClassVar[str] = "queued-tokens"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """Refused when the prefill wait alone is longer than the target less the margin."""
        ahead, prediction = view.predict(request)
        if prediction.prefill_wait is not None:
            late_by = view.now + prediction.prefill_wait - request.deadline + view.margin(request)
            if late_by > 0:
                return Refusal(ShedReason.PREFILL_WAIT, late_by, prediction)
        return view.accept(request, prediction, ahead)


@dataclass(frozen=True, slots=True)
class PredictedTtft(AdmissionRule):
    """Refuses a newcomer whose own predicted TTFT exceeds its target."""

    name: ClassVar[str] = "prediction"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """By the prediction; by Little's law where there is none."""
        ahead, prediction = view.predict(request)
        late_by = view.late_by(request, prediction)
        if late_by is None:
            return limit_waiting(request, view, ahead, prediction)
        if late_by > 0:
            return Refusal(prediction.binding, late_by, prediction)
        return view.accept(request, prediction, ahead)


@dataclass(frozen=True, slots=True)
class LittlesLaw(AdmissionRule):
    """Little's law L = λ·W: a class may have λ_admitted · (target - service) requests before their first token."""

    name: ClassVar[str] = "littles-law"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """Refused when more are ahead."""
        return limit_waiting(request, view, *view.predict(request))


def limit_waiting(
    request: Request, view: AdmissionView, ahead: Sequence[Request], prediction: Prediction
) -> Acceptance | Refusal:
    """The decision by Little's law, also for a rule that cannot predict yet: the admitted rate is known even then.

    An unknown rate limits nobody.
    """
    if request.target is not None:
        count = len(ahead) + sum(replica.waiting_at(request.priority) for replica in view.load.replicas)
        service = (prediction.own or 0.0) + prediction.iteration
        rate = view.history[request.priority].admitted.rate(view.now)
        if rate is not None and count > rate * max(0.0, request.deadline - view.now - service):
            return Refusal(prediction.binding, view.late_by(request, prediction) or 0.0, prediction)
    return view.accept(request, prediction, ahead)
