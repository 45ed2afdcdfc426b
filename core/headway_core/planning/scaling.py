"""How many replicas the demand (what arrives, not what queues) needs, and how to lose one without losing a request.

Up: at once (or after `behavior.scaleUp.stabilizationWindow`) when demand exceeds capacity by more than chance explains;
never without load. The decision is a number of replicas, not "one more", so pods that still start are counted already.

Down: to the largest number that was needed within the scale-down window, once everything was known for that long. The
steps can each be found again in the cluster after a crash:

1. The replicas to lose are cordoned in the policy.
2. They become idle, or the drain budget is spent.
3. They get a deletion cost, and the scale is lowered.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway_core.planning.knobs import Estimate
from headway_core.planning.snapshot import ObservedReplica, Phase, Snapshot, Traffic
from headway_core.slo import ServingSLO

UP_BAND = 0.05
"""Demand over what there is by less than this is noise."""
DOWN_BAND = 0.10
"""Fewer replicas must carry the demand with this much to spare."""
DRAIN_BUDGET = 120.0
"""Seconds that a cordoned replica is given to become idle; after that its own termination grace finishes what runs."""
MAX_SILENCE = 60.0
"""Seconds: when demand was unknown for longer, the time for which it was known starts again at zero."""


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What `desired_replicas` and `retire` carry from one call to the next. A fresh one only delays scaling down."""

    known_since: float | None = None
    """Demand has been known, without a break, since then."""
    known_at: float | None = None
    recommendations: tuple[tuple[float, int], ...] = ()
    """(at, replicas) within the longer stabilisation window."""
    rates: tuple[tuple[float, float, float], ...] = ()
    """(at, λ*, cautious λ*) of the last window; at least the last known one."""
    decided: int | None = None
    moved_at: float | None = None
    cordoned_at: float | None = None


@dataclass(frozen=True, slots=True)
class DesiredReplicas:
    """Replicas wanted. `replicas` None: hold what is there. `unbounded`: what the load needs before bounds, or None."""

    replicas: int | None
    message: str
    unbounded: int | None = None


@dataclass(frozen=True, slots=True)
class Retirement:
    """How far a scale-down has come."""

    victims: tuple[str, ...]
    """Every replica to lose, unready ones first, then the emptiest."""
    cordoned: tuple[str, ...]
    """Replicas that must get no new request; those that are being deleted are included until they are gone."""
    ready: bool
    """The scale may be lowered: no running request would be lost."""
    message: str


def desired_replicas(
    snapshot: Snapshot, slo: ServingSLO, found: Estimate, memory: ScaleMemory, now: float
) -> tuple[DesiredReplicas, ScaleMemory]:
    """The number of replicas that the load asks for, stabilised and within bounds."""
    bounds = slo.bounds.replicas
    scale = snapshot.scale
    if bounds is None or bounds.min is None or scale is None:
        return DesiredReplicas(None, "replicas are not managed"), memory
    memory = _remember_rates(found, memory, slo.window, now)
    if scale < bounds.min:
        why = f"{scale} replicas are fewer than spec.bounds.replicas.min {bounds.min}"
        return DesiredReplicas(bounds.min, why), memory
    blocked = _unknown(snapshot)
    traffic = snapshot.traffic
    if blocked or traffic is None:
        return _held(snapshot, slo, scale, blocked or "demand is not known yet"), memory
    memory = _remember_known(snapshot, memory, now)
    need = _needed(traffic, snapshot.saturated, slo, memory, scale)
    if need is None:
        return _held(snapshot, slo, scale, "what one replica carries is not known"), memory
    desired, message = need
    longest = max(slo.window, slo.scale_down_stabilization, slo.scale_up_stabilization)
    kept = tuple(entry for entry in memory.recommendations if entry[0] > now - longest)
    memory = replace(memory, recommendations=(*kept, (now, desired)))
    stable, why = (
        (scale, "; fewer only after the rollout")
        if snapshot.rolling and desired < scale
        else _stabilised(desired, scale, slo, memory, now)
    )
    clipped = bounds.clip(stable)
    return DesiredReplicas(clipped, message + why, unbounded=desired), memory


def _held(snapshot: Snapshot, slo: ServingSLO, scale: int, why: str) -> DesiredReplicas:
    """The present scale, since the load asks for no number; at most the maximum, which may just have been lowered."""
    most = slo.bounds.replicas.max if slo.bounds.replicas else None
    if most is not None and scale > most and not snapshot.rolling:
        return DesiredReplicas(most, f"{scale} replicas are more than spec.bounds.replicas.max {most}")
    return DesiredReplicas(None, f"replicas stay at {scale}: {why}")


def _unknown(snapshot: Snapshot) -> str:
    if not snapshot.trustworthy:
        return f"{len(snapshot.fresh)} of {len(snapshot.serving)} serving replicas report"
    if 2 * snapshot.gateways_reporting < max(1, snapshot.gateways):
        return f"{snapshot.gateways_reporting} of {snapshot.gateways} gateways report"
    return ""


def _remember_rates(found: Estimate, memory: ScaleMemory, window: float, now: float) -> ScaleMemory:
    kept = tuple(entry for entry in memory.rates if entry[0] > now - window)
    if found.capacity is not None:
        rate = found.capacity.rate
        return replace(memory, rates=(*kept, (now, rate, found.cautious_rate or rate)))
    return replace(memory, rates=kept or memory.rates[-1:])


def _remember_known(snapshot: Snapshot, memory: ScaleMemory, now: float) -> ScaleMemory:
    whole = snapshot.gateways_reporting == snapshot.gateways
    since = memory.known_since
    if not whole or since is None or memory.known_at is None or now - memory.known_at > MAX_SILENCE:
        # A silent gateway may carry any load: what is known is a lower bound, good enough for scaling up only.
        since = now if whole else None
    return replace(memory, known_since=since, known_at=now)


def _needed(
    traffic: Traffic, saturated: bool, slo: ServingSLO, memory: ScaleMemory, scale: int
) -> tuple[int, str] | None:
    """(replicas, why) before stabilisation and bounds."""
    demand, recent = traffic.demand, traffic.recent
    if demand.count == 0 and recent.count == 0:
        return min(scale, 1), "no request arrived"
    if not memory.rates:
        return None
    rate = statistics.median(entry[1] for entry in memory.rates)
    cautious = statistics.median(entry[2] for entry in memory.rates)
    # Half a window of counts is a mean; less is weighed for what chance may have added.
    level = demand.rate if demand.seconds >= slo.window / 2 else demand.surely
    band = 0.0 if saturated else UP_BAND
    up = max(level, recent.surely)
    carries = f"{demand.rate:.3g} requests/s arrive, one replica carries {rate:.3g}"
    if up > scale * rate * (1 + band):
        return math.ceil(up / rate - 1e-9), carries
    if saturated:
        return scale, f"{carries}; a gateway is saturated"
    down = max(1, math.ceil(max(demand.rate, recent.surely) / (min(rate, cautious) * (1 - DOWN_BAND)) - 1e-9))
    return min(scale, down), carries


def _stabilised(desired: int, scale: int, slo: ServingSLO, memory: ScaleMemory, now: float) -> tuple[int, str]:
    if desired > scale:
        recent = [count for at, count in memory.recommendations if at > now - slo.scale_up_stabilization]
        return max(scale, min([desired, *recent])), ""
    if desired == scale:
        return scale, ""
    window = max(slo.window, slo.scale_down_stabilization)
    if memory.known_since is None or now - memory.known_since < window:
        return scale, f"; fewer only after {window:.0f}s in which all was known"
    highest = min(scale, max(count for at, count in memory.recommendations if at > now - window))
    return highest, "" if highest == desired else f"; {highest} were needed within the last {window:.0f}s"


def retire(
    snapshot: Snapshot, desired: int, memory: ScaleMemory, now: float, drain_budget: float
) -> tuple[Retirement, ScaleMemory]:
    """Chooses the replicas to lose when `desired` are to stay, and says how far they are drained. Replicas that are
    cordoned already stay chosen, so a restart goes on where it was."""
    before = set(snapshot.policy.cordoned) if snapshot.policy else set()
    staying = sorted(
        (replica for replica in snapshot.replicas if replica.phase is not Phase.LEAVING),
        key=lambda replica: _order(replica, replica.name in before, snapshot.in_flight),
    )
    leaving = {replica.name for replica in snapshot.replicas if replica.phase is Phase.LEAVING}
    scale = snapshot.scale or 0
    if desired < scale:
        victims = staying[: max(0, min(scale - desired, len(staying) - desired))]
    else:
        # Asked for fewer, and not removed by the controller yet: they stay cordoned. Anybody else gets requests again.
        victims = [replica for replica in staying if replica.name in before][: max(0, len(staying) - scale)]
    serving = [replica for replica in victims if replica.phase is Phase.READY]
    cordoned = tuple(sorted({replica.name for replica in serving} | (before & leaving)))
    names = tuple(replica.name for replica in victims)
    if not serving:
        return Retirement(names, cordoned, True, "nothing runs on them"), replace(memory, cordoned_at=None)
    if any(replica.name not in before for replica in serving):
        return Retirement(names, cordoned, False, "cordoned first"), replace(memory, cordoned_at=None)
    since = memory.cordoned_at if memory.cordoned_at is not None else now
    memory = replace(memory, cordoned_at=since)
    busy = [replica.name for replica in serving if not _idle(replica, snapshot)]
    if not busy:
        return Retirement(names, cordoned, True, "idle"), memory
    if now - since >= drain_budget:
        return Retirement(names, cordoned, True, f"the drain budget of {drain_budget:.0f}s is spent"), memory
    return Retirement(names, cordoned, False, f"{', '.join(busy)} still busy"), memory


def _order(replica: ObservedReplica, cordoned: bool, in_flight: Mapping[str, int] | None) -> tuple[int, int, str]:
    """Sorts the replicas to lose first to the front: unready ones (Kubernetes deletes them before it reads any deletion
    cost), then those cordoned already, then those with the fewest requests."""
    if replica.phase is not Phase.READY:
        return (0 if replica.phase is Phase.FAILED else 1, 0, replica.name)
    report = replica.report
    load = report.running + report.waiting if report is not None else 1 << 30
    return (2 if cordoned else 3, max(load, (in_flight or {}).get(replica.name, 0)), replica.name)


def _idle(replica: ObservedReplica, snapshot: Snapshot) -> bool:
    """Whether nothing runs on it, by its own fresh report and by every gateway under the policy that cordons it."""
    if not replica.fresh(snapshot.stale_after) or replica.report is None or snapshot.in_flight is None:
        return False
    return replica.report.running + replica.report.waiting + snapshot.in_flight.get(replica.name, 0) == 0
