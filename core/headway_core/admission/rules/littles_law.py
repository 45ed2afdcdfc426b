"""Little's law L = λ·W as a limit on how many wait: what is left to a rule where no TTFT can be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.prediction import behind
from headway_core.admission.request import Prediction, Request
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView, Refusal


@dataclass(frozen=True, slots=True)
class LittlesLaw(AdmissionRule):
    """A class may have λ_admitted · (target - service) requests before their first token."""

    name: ClassVar[str] = "littles-law"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """Refused when more are ahead."""
        ahead, _ = view.split(request)
        return limit_waiting(request, view, ahead, behind(ahead, request, view.load, view.shares))


def limit_waiting(
    request: Request, view: AdmissionView, ahead: Sequence[Request], prediction: Prediction
) -> Acceptance | Refusal:
    """The decision by Little's law. Also for a rule that predicts, while it cannot: what was admitted so far is known
    even then."""
    if request.target is not None:
        count = len(ahead) + sum(replica.waiting_at(request.priority) for replica in view.load.replicas)
        service = (prediction.own or 0.0) + prediction.iteration
        admitted_rate = view.history[request.priority].admitted.rate(view.now)
        if too_many_waiting(count, admitted_rate, request.deadline - view.now, service):
            return Refusal(prediction.binding, view.late_by(request, prediction) or 0.0, prediction)
    return view.accept(request, prediction, ahead)


def too_many_waiting(ahead: int, admitted_rate: float | None, target: float, service: float) -> bool:
    """Whether `ahead` requests are more than the class's `admitted_rate` (per second) serves within target - service
    seconds. An unknown rate limits nobody."""
    return admitted_rate is not None and ahead >= 1 and ahead > admitted_rate * max(0.0, target - service)
