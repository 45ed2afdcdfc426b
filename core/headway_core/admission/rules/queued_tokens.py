"""A limit on queued tokens: at most as many prefill tokens ahead as the pool computes within the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.prediction import behind
from headway_core.admission.request import Request
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView, Refusal
from headway_core.contract.header_names import ShedReason


@dataclass(frozen=True, slots=True)
class QueuedTokens(AdmissionRule):
    """Limits the prefill tokens ahead to C · target; the newcomer's own prompt is not counted."""

    name: ClassVar[str] = "queued-tokens"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """Refused when the prefill wait alone is longer than the target less the margin."""
        ahead, _ = view.split(request)
        prediction = behind(ahead, request, view.load, view.shares)
        if prediction.prefill_wait is not None:
            late_by = view.now + prediction.prefill_wait - request.deadline + view.margin(request)
            if late_by > 0:
                return Refusal(ShedReason.PREFILL_WAIT, late_by, prediction)
        return view.accept(request, prediction, ahead)
