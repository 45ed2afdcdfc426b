"""Moore's rule, the default: when somebody would be late, shed the longest prompt: most requests stay in time.

Moore (1968) finds the largest set of jobs that one machine finishes on time: take them by deadline; when one would be
late, drop the longest so far. At admission the future is not known, so the rule is applied to what waits: when a
newcomer would make some request late, shed the one with the most prefill work, of the late one's class, among those up
to and including it. Often that is the newcomer itself.

Among those that wait this loses nothing against somebody who decides later. What it cannot take back is a long request
that has started. So a waiting request is checked once more before it starts (`not_worth_starting`). Only there is a
request shed although every target would be met so far: arrivals that are expected would miss theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headway_core.admission.prediction import Forecast, behind, left_for
from headway_core.admission.request import Request
from headway_core.admission.routing import choose
from headway_core.admission.rules.newcomer_rules import limit_waiting
from headway_core.admission.rules.rule import Acceptance, AdmissionRule, AdmissionView, Refusal
from headway_core.contract.header_names import ShedReason

RETURN_WEIGHT = 0.25
"""The part of its length that counts for a request that was shed and came back. Without it the longest would be shed
again on their return, by the queue that an overload leaves (`docs/decisions/0017`)."""


@dataclass(frozen=True, slots=True)
class Moore(AdmissionRule):
    """Sheds the request with the most work when one would be late.

    `anticipate`: check again before a waiting request starts whether those expected behind it are worth more.
    """

    name: ClassVar[str] = "moore"
    anticipate: bool = True

    def decide(self, request: Request, view: AdmissionView) -> Acceptance | Refusal:
        """Accepted, alone or in place of others, or refused: whichever leaves nobody late at the least cost."""
        load = view.load
        if not load.waiting and not load.higher_work.get(request.priority):
            # Nobody stands before it and nobody behind: the replica that takes it now gives the whole prediction.
            route = choose(request, load, view.matches)
            if route is not None and (view.late_by(request, route.prediction) or 0.0) <= 0:
                return Acceptance(route.prediction, route)
        ahead, after = view.split(request)
        forecast = Forecast(load, view.shares)
        late = forecast.first_late(ahead, view.now, view.margin)
        if late is not None:
            forecast.skip(ahead[late.place + 1 :])
        prediction = forecast.add(request)
        if request.target is None:
            return view.accept(request, prediction, ahead)
        late_by = view.late_by(request, prediction)
        if late_by is None:
            return limit_waiting(request, view, ahead, prediction)
        if late is None and late_by <= 0 and forecast.first_late(after, view.now, view.margin) is None:
            return view.accept(request, prediction, ahead)
        displaced = to_displace([*ahead, request, *after], view, newcomer=request.request_id)
        if any(other.request_id == request.request_id for other in displaced):
            return Refusal(prediction.binding if late_by > 0 else ShedReason.OUTRANKED, late_by, prediction)
        return view.accept(request, prediction, ahead, displaced)

    def worth_starting(self, request: Request, view: AdmissionView) -> bool:
        """False for a long request that would displace more than one of those that are expected.

        One that came back is not shed for arrivals that are only expected. A gateway that sees only part of what is
        offered sheds too few here, never too many.
        """
        load, rate = view.load, view.load.prefill_rate
        if not self.anticipate or request.retry or request.target is None or len(load.waiting) < 2 or rate is None:
            return True
        share = left_for(request.priority, load, view.shares)
        carried = view.history[request.priority].lengths.carried(rate * share, view.now)
        if carried is None or request.uncached_tokens <= carried:
            return True
        others = [other for other in load.waiting if other.priority >= request.priority]
        wait = behind(others, request, load, view.shares).prefill_wait
        return wait is None or not not_worth_starting(request.uncached_tokens, carried, wait / request.target)

    def overdue(self, view: AdmissionView) -> Sequence[Request]:
        """Those whom the rule would shed if they came now."""
        return to_displace(view.load.waiting, view)


def to_displace(order: Sequence[Request], view: AdmissionView, *, newcomer: int | None = None) -> list[Request]:
    """Whom to shed of `order` (in service order) so that nobody who stays is predicted late.

    `newcomer`: the id of the one in `order` that does not wait yet.

    If the bottleneck is a free slot, a waiting request is never shed for a newcomer; it leaves only when it expires.
    Shedding it frees no more than refusing the newcomer, and when a slot becomes free is predicted poorly.
    """
    kept = list(order)
    displaced: list[Request] = []
    forecast, begin = Forecast(view.load, view.shares), 0
    while (late := forecast.first_late(kept[begin:], view.now, view.margin)) is not None:
        place = begin + late.place
        if late.prediction.binding is ShedReason.SLOT_WAIT:
            if kept[place].request_id != newcomer:
                begin = place + 1
                continue
            victim = place
        else:
            victim = _longest(kept, place)
            # One that would be late even alone is not saved by displacing others.
            if victim != place and _late_alone(kept[place], view):
                victim = place
        displaced.append(kept.pop(victim))
        forecast, begin = Forecast(view.load, view.shares), 0
    return displaced


def not_worth_starting(tokens: int, carried: int | None, fullness: float) -> bool:
    """Whether a waiting request of `tokens` should give way to the shorter ones that are expected behind it.

    `carried`: the length up to which the pool can carry what is offered (`OfferedLengths.carried`); None: all of it.
    `fullness`: the wait of one more like it, as a fraction of the target.

    If the queue fills up, starting it displaces about tokens / `carried` requests of the length `carried`. The
    probability of that is estimated as fullness² (`docs/decisions/0016`). The request gives way when the expected
    number of displaced requests is greater than one.
    """
    return carried is not None and tokens * min(1.0, fullness) ** 2 > carried


def _longest(order: Sequence[Request], place: int) -> int:
    """Index of the most prefill work up to `place`, of the class there, weighed by `RETURN_WEIGHT`; last of equals."""
    priority = order[place].priority
    # Higher classes stand before, so the class of the late one is the lowest of those that could make way.
    return max(
        (one.uncached_tokens * (RETURN_WEIGHT if one.retry else 1.0), index)
        for index, one in enumerate(order[: place + 1])
        if one.priority == priority
    )[1]


def _late_alone(request: Request, view: AdmissionView) -> bool:
    return Forecast(view.load, view.shares).first_late((request,), view.now, view.margin) is not None
