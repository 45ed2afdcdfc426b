"""What admission tells its owner to do, and what it learned. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from headway_core.admission.request import Prediction, Request, Shed


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send `request` to `replica_id` now."""

    request: Request
    replica_id: str
    number: int
    """For the header `header_names.DISPATCH`: ``f"{gateway}:{number}"``."""
    priority: int
    """For the header `header_names.PRIORITY`: its class's, or higher when it has aged, lest it starve in the engine."""
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class PredictionSample:
    """A predicted TTFT against what happened; for a shed request, against what would have."""

    priority: int
    shed: bool
    predicted: float
    actual: float

    @property
    def error(self) -> float:
        """predicted - actual, seconds."""
        return self.predicted - self.actual


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """What to do now. A submitted request appears once, in `dispatches` or in `shed`, unless it is cancelled."""

    dispatches: tuple[Dispatch, ...] = ()
    shed: tuple[Shed, ...] = ()
