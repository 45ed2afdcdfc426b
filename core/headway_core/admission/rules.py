"""The rules of the door, each by the name that people look for. Pure functions over requests in service order.

`moore` is the default. Moore (1968) finds the largest set of jobs that one machine finishes on time: take them by
deadline; when one would be late, drop the longest so far. At the door the future is not known, so the rule is applied
to what waits: when a newcomer means that a promise would break, give up the waiting request with the most work, of the
class of the one that would be late, among those up to and including it. That is often the newcomer itself.

Among those that wait this loses nothing against somebody who decides later. What it cannot take back is a long request
that has started, so that is asked once more when a waiting request has its turn (`not_worth_starting`). It is the one
place at which a request is given up although every promise made so far holds: the promises that would break are those
of arrivals that are expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prediction import Forecast, Margins
from headway_core.admission.request import Request
from headway_core.contract.header_names import ShedReason

RETURN_WEIGHT = 0.25
"""Of its length, what a request counts for under Moore's rule that was turned away before and came back. The longest
are turned away first, so that they, come back as they were told, would be again, by the queue that an overload leaves
(`docs/decisions/0017`)."""


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


def moore(
    order: Sequence[Request],
    load: PoolLoad,
    shares: Mapping[int, float],
    now: float,
    margins: Margins,
    *,
    newcomer: int | None = None,
    by_tokens: bool = False,
) -> list[Request]:
    """Whom to give up of `order` (in service order) so that nobody who stays is predicted late.

    `newcomer`: the id of the one in `order` that does not wait yet. `by_tokens`: weigh requests by their tokens:
    instead of the one with the most work, the smallest that makes room enough.

    Where the wait is for a slot, one that waits already stays, late or not: a slot is a slot, so that giving it up
    makes no more room than refusing the newcomer, and when an answer ends, and a slot with it, is the vaguest of all
    predictions. Its expiry ends its wait.
    """
    kept = list(order)
    dropped: list[Request] = []
    laid_out, begin = Forecast(load, shares), 0
    while (late := laid_out.first_late(kept[begin:], now, margins)) is not None:
        place = begin + late.place
        if late.prediction.binding is ShedReason.SLOT_WAIT:
            if kept[place].request_id != newcomer:
                begin = place + 1
                continue
            victim = place
        else:
            victim = _victim(kept, place, late.late_by, load, by_tokens)
            # No sacrifice of others would save one that would be late even alone.
            if victim != place and Forecast(load, shares).first_late(kept[place : place + 1], now, margins) is not None:
                victim = place
        dropped.append(kept.pop(victim))
        laid_out, begin = Forecast(load, shares), 0
    return dropped


def not_worth_starting(tokens: int, carried: int | None, fullness: float) -> bool:
    """Whether a waiting request, at its turn, should rather make room for the shorter ones that are expected behind it.

    `carried`: the length up to which the pool can carry what is offered (`lengths.OfferedLengths.carried`); None: all
    of it. `fullness`: the wait of one more like it as a fraction of the target. When the queue is full, whoever starts
    costs tokens / `carried` others, each of the greatest length that is still worth serving; whether it will be full is
    the chance taken as fullness². So it is given up when it is expected to cost more than the one that it is. Never
    while all that is offered can be carried, nor one that is not longer than `carried`. Why the square:
    `docs/decisions/0016`.
    """
    return carried is not None and tokens * min(1.0, fullness) ** 2 > carried


def _victim(order: Sequence[Request], place: int, late_by: float, load: PoolLoad, by_tokens: bool) -> int:
    """Index of the one to give up: most prefill work, that of those who came back at `RETURN_WEIGHT`; among equals the
    latest to come."""
    priority = order[place].priority
    # Higher classes stand before, so the class of the late one is the lowest of those that could make room.
    candidates = [(order[index], index) for index in range(place + 1) if order[index].priority == priority]
    if by_tokens and load.prefill_rate:
        need = late_by * load.prefill_rate
        _, index = min(
            (one.uncached_tokens, -index) for one, index in candidates if one.uncached_tokens >= need or index == place
        )
        return -index
    return max((one.uncached_tokens * (RETURN_WEIGHT if one.retry else 1.0), index) for one, index in candidates)[1]


def too_many_waiting(ahead: int, admitted_rate: float | None, target: float, service: float) -> bool:
    """Little's law L = λ·W: whether `ahead` requests of the class exceed what λ_admitted serves within target -
    service.

    An unknown rate binds nobody.
    """
    return admitted_rate is not None and ahead >= 1 and ahead > admitted_rate * max(0.0, target - service)
