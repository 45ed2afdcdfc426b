"""The rules of the door, each by the name that people look for. Pure functions over requests in service order.

`moore` is the default. Moore (1968) finds the largest set of jobs that one machine finishes on time: take them by deadline; when one
would be late, drop the longest so far. At the door the future is not known, so the rule is applied to what waits: when a newcomer means
that a promise would break, give up the waiting request with the most work, of the class of the one that would be late, among those up
to and including it. That is often the newcomer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from headway_core.admission.load import Load
from headway_core.admission.prediction import Forecast
from headway_core.admission.request import Prediction, Request
from headway_core.contract import ShedReason

Lateness = Callable[[Request, Prediction], float | None]
"""Seconds by which a request would miss its target less the margin; not positive: in time; None: unknown."""


class Rule(Enum):
    """What decides who comes in."""

    MOORE = "moore"
    PREDICTION = "prediction"
    """Refuse a newcomer whose own predicted TTFT exceeds its target."""
    LITTLES_LAW = "littles-law"
    """A class may have λ_admitted · (target - service) requests before their first token."""
    QUEUED_TOKENS = "queued-tokens"
    """Cap the prefill tokens ahead at C · target; the newcomer's own prompt is not counted."""
    OPEN = "open"
    """Take everybody."""


def moore(order: Sequence[Request], load: Load, shares: Mapping[int, float], lateness: Lateness, by_tokens: bool = False) -> list[Request]:
    """Whom to give up of `order` (in service order) so that nobody who stays is predicted late.

    `by_tokens`: weigh requests by their tokens: instead of the one with the most work, the smallest that makes room enough.
    """
    kept = list(order)
    dropped: list[Request] = []
    while (found := _first_late(kept, load, shares, lateness)) is not None:
        index, late_by, binding = found
        victim = _victim(kept, index, late_by, binding=binding, load=load, by_tokens=by_tokens)
        if victim != index and _late_alone(kept[index], load, shares, lateness):
            victim = index
        dropped.append(kept.pop(victim))
    return dropped


def _first_late(
    order: Sequence[Request], load: Load, shares: Mapping[int, float], lateness: Lateness
) -> tuple[int, float, ShedReason] | None:
    forecast = Forecast(load, shares)
    for index, request in enumerate(order):
        prediction = forecast.add(request)
        late_by = lateness(request, prediction)
        if late_by is not None and late_by > 0:
            return index, late_by, prediction.binding
    return None


def _late_alone(request: Request, load: Load, shares: Mapping[int, float], lateness: Lateness) -> bool:
    """No sacrifice of others that wait would save it."""
    late_by = lateness(request, Forecast(load, shares).add(request))
    return late_by is not None and late_by > 0


def _victim(order: Sequence[Request], late: int, late_by: float, *, binding: ShedReason, load: Load, by_tokens: bool) -> int:
    """Index of the one to give up: most work in the resource that is short; among equals the one that has waited least."""
    priority = order[late].priority
    # Higher classes stand before, so the class of the late one is the lowest of those that could make room.
    candidates = [index for index in range(late + 1) if order[index].priority == priority]
    if binding is ShedReason.SLOT_WAIT:
        return late  # a slot is a slot: each would make the same room
    if by_tokens and load.prefill_rate:
        enough = [index for index in candidates if order[index].uncached_tokens / load.prefill_rate >= late_by or index == late]
        return min(enough, key=lambda index: (order[index].uncached_tokens, -index))
    return max(candidates, key=lambda index: (order[index].uncached_tokens, index))


def too_many_waiting(ahead: int, admitted_rate: float | None, target: float, service: float) -> bool:
    """Little's law L = λ·W: whether `ahead` requests of the class exceed what λ_admitted serves within target - service.

    An unknown rate binds nobody.
    """
    return admitted_rate is not None and ahead >= 1 and ahead > admitted_rate * max(0.0, target - service)
