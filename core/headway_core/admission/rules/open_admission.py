"""Open admission: nobody is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.request import UNKNOWN, Request
from headway_core.admission.routing import choose
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView


@dataclass(frozen=True, slots=True)
class OpenAdmission(AdmissionRule):
    """Takes everybody; they wait as long as the queue allows. Predicts nothing."""

    name: ClassVar[str] = "open"

    def decide(self, request: Request, view: AdmissionView) -> Acceptance:
        """Sent if nobody waits, else queued."""
        route = None if view.load.waiting else choose(request, view.load, view.matches)
        return Acceptance(UNKNOWN if route is None else route.prediction, route)
