"""Conditions about the objectives and their metrics, each with a CamelCase reason and a message that says what to do.

Shared by the operator's status and by `headway up`. True is normal for each; None is unknown, never the same as False.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from headway_core.planning.knobs import KnobPlan
from headway_core.planning.snapshot import ClassTraffic, Phase, Snapshot
from headway_core.slo import PriorityClass, ServingSLO


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. `status` None is Unknown."""

    type: str
    status: bool | None
    reason: str
    message: str


def metrics_available(snapshot: Snapshot, slo: ServingSLO) -> Condition:
    """MetricsAvailable: no replica, no report, stale reports, too few, no gateway, no traffic are different states."""

    def condition(status: bool | None, reason: str, message: str) -> Condition:
        return Condition("MetricsAvailable", status, reason, message)

    serving, fresh = snapshot.serving, snapshot.fresh
    if not serving:
        return condition(
            False, "NoReadyReplicas", f"no replica is ready{_others(snapshot)}: nothing is decided until one is"
        )
    replicas = f"{len(fresh)} of {len(serving)} serving replicas report"
    if not fresh and all(replica.report is None for replica in serving):
        return condition(
            False,
            "NoMetrics",
            f"{replicas}: check that port 8001 of the runtime pods answers GET /load and that no NetworkPolicy "
            "forbids it",
        )
    if not fresh:
        return condition(
            False,
            "StaleMetrics",
            f"{replicas} within {snapshot.stale_after:.0f}s, though they did before: knobs and replicas are "
            "frozen until they report again",
        )
    if not snapshot.trustworthy:
        return condition(
            False, "PartialMetrics", f"{replicas}, fewer than half: knobs and replicas are frozen until more report"
        )
    if snapshot.gateways == 0:
        return condition(
            False,
            "NoGatewayPods",
            f"{replicas}, but no gateway pod is ready: start the gateway that spec.gatewayRef names",
        )
    gateways = f"{snapshot.gateways_reporting} of {snapshot.gateways} gateways report"
    if snapshot.gateways_reporting == 0:
        return condition(
            False,
            "NoGatewayMetrics",
            f"{replicas}, {gateways}: check that port 8001 of the gateway pods answers GET /load",
        )
    if snapshot.traffic is None:
        return condition(None, "FirstReading", f"{replicas}, {gateways}; rates need a second reading")
    if snapshot.traffic.demand.count == 0 and all(known.offered == 0 for known in snapshot.traffic.classes.values()):
        return condition(
            True, "NoTraffic", f"{replicas}, {gateways}; no request arrived in the window of {slo.window:.0f}s"
        )
    return condition(True, "Reporting", f"{replicas}, {gateways}{_others(snapshot)}")


def _others(snapshot: Snapshot) -> str:
    counts = Counter(replica.phase for replica in snapshot.replicas if not replica.serves)
    words = [
        f"{counts[phase]} {phase.value}" for phase in (Phase.STARTING, Phase.FAILED, Phase.LEAVING) if counts[phase]
    ]
    notes = sorted({replica.note for replica in snapshot.replicas if replica.note and replica.phase is Phase.FAILED})
    return (f" ({', '.join(words)}" + (f": {'; '.join(notes)}" if notes else "") + ")") if words else ""


def feasible(plan: KnobPlan) -> Condition:
    """Feasible: whether any setting keeps the targets, and what binds the one chosen."""
    found = plan.estimate
    if found.unreachable is not None:
        return Condition(
            "Feasible",
            False,
            found.unreachable.reason,
            f"{found.unreachable.message}; the last settings stay. Relax the target or serve a smaller model",
        )
    if found.capacity is None:
        return Condition("Feasible", None, "NotEnoughData", found.unknown)
    reason = "BoundBy" + "".join(word[:1].upper() + word[1:] for word in re.split(r"\W+", found.capacity.binding.value))
    return Condition("Feasible", True, reason, plan.message)


def within_bounds(plan: KnobPlan, slo: ServingSLO, unbounded: int | None) -> Condition:
    """WithinBounds: whether `spec.bounds` let the plan have what it asks for."""
    bounds = slo.bounds.replicas
    if unbounded is not None and bounds is not None and bounds.max is not None and unbounded > bounds.max:
        return Condition(
            "WithinBounds",
            False,
            "AtMax",
            f"the load needs {unbounded} replicas and spec.bounds.replicas.max is {bounds.max}: raise it, or "
            "requests will be shed",
        )
    capacity = plan.estimate.capacity
    if capacity is not None and capacity.out_of_bounds is not None:
        return Condition("WithinBounds", False, "KnobsForced", capacity.out_of_bounds)
    return Condition("WithinBounds", True, "WithinBounds", "spec.bounds allow what the plan asks for")


def slo_met(snapshot: Snapshot, slo: ServingSLO, judged_before: bool = False) -> Condition:
    """SLOMet, over what was admitted: every class and objective with enough samples keeps its percentile.

    `judged_before`: half of the samples are enough to go on judging, so that traffic on the edge does not come and go.
    """
    enough = slo.min_samples / 2 if judged_before else slo.min_samples
    traffic = snapshot.traffic
    if traffic is None:
        return Condition("SLOMet", None, "NoMetrics", "the gateways have not been read twice yet")
    missed: list[str] = []
    unsure: list[str] = []
    judged = 0
    for known in slo.classes:
        counted = traffic.classes.get(known.name, ClassTraffic(known.name))
        for objective, percentile in _percentiles(known):
            samples = counted.judged.get(objective, 0)
            if samples < enough:
                unsure.append(f"{samples} of class {known.name} by {objective.upper()}")
                continue
            judged += 1
            share = 100 * counted.attained.get(objective, 0) / samples
            if share < percentile:
                missed.append(
                    f"class {known.name}: {share:.4g}% of {samples} requests kept {objective.upper()}, "
                    f"{percentile:g}% are promised"
                )
    if missed:
        return Condition("SLOMet", False, "Missed", "; ".join(missed))
    if judged:
        return Condition("SLOMet", True, "Kept", f"every objective with at least {slo.min_samples} samples is kept")
    offered = sum(known.offered for known in traffic.classes.values())
    if offered == 0:
        return Condition("SLOMet", None, "NoTraffic", f"no request arrived in the window of {slo.window:.0f}s")
    return Condition(
        "SLOMet",
        None,
        "TooFewSamples",
        f"{offered} requests arrived in the window of {slo.window:.0f}s, and could be judged: "
        f"{', '.join(unsure)}; {slo.min_samples} "
        "of one kind are needed. Answers that do not stream have no first token and no TPOT of their own",
    )


def _percentiles(known: PriorityClass) -> list[tuple[str, float]]:
    objectives = known.objectives
    return [
        (name, objective.percentile)
        for name, objective in (("ttft", objectives.ttft), ("tpot", objectives.tpot))
        if objective is not None
    ]
