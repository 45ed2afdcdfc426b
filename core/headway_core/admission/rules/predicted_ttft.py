"""A limit on the predicted TTFT of the newcomer itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.prediction import behind
from headway_core.admission.request import Request
from headway_core.admission.rules.littles_law import limit_waiting
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView, Refusal


@dataclass(frozen=True, slots=True)
class PredictedTtft(AdmissionRule):
    """Refuses a newcomer whose own predicted TTFT exceeds its target."""

    name: ClassVar[str] = "prediction"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """By the prediction; by Little's law where there is none."""
        ahead, _ = view.split(request)
        prediction = behind(ahead, request, view.load, view.shares)
        late_by = view.late_by(request, prediction)
        if late_by is None:
            return limit_waiting(request, view, ahead, prediction)
        if late_by > 0:
            return Refusal(prediction.binding, late_by, prediction)
        return view.accept(request, prediction, ahead)
