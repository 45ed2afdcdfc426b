"""One decision: a snapshot and the object in, actions with reasons and conditions out. Nothing here acts.

Order of the actuators: **knobs first**, and only one of the two moves in a window (`spec.evaluation.window`): after
knobs moved, replicas wait a window to see what the knobs gave, and the other way round; when both want to move again,
the one that moved less recently goes first. The steps of one scale-down (cordon, drain, scale) are one move. An
action that nobody carries out (Recommend) locks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway_core.contract.policy import Knobs
from headway_core.planning.conditions import Condition, feasible, metrics_available, slo_met, within_bounds
from headway_core.planning.knobs import KnobMemory, KnobPlan, estimate, settle
from headway_core.planning.scaling import DRAIN_BUDGET, DesiredReplicas, ScaleMemory, desired_replicas, retire
from headway_core.planning.snapshot import Snapshot
from headway_core.slo import Mode, ServingSLO


@dataclass(frozen=True, slots=True)
class SetKnobs:
    """Write these knobs into the policy."""

    knobs: Knobs
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """Write exactly these replica names as cordoned into the policy; names that are no longer in it get requests
    again."""

    replicas: tuple[str, ...]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Mark `victims` with a deletion cost, then set the scale. `victims` is empty when scaling up."""

    replicas: int
    victims: tuple[str, ...]
    reason: str
    message: str


Action = SetKnobs | Cordon | Scale


@dataclass(frozen=True, slots=True)
class Memory:
    """What one call hands to the next. `Memory()` after a restart is always right; it only delays scaling down by a
    window."""

    knobs: KnobMemory = KnobMemory()
    scaling: ScaleMemory = ScaleMemory()
    judged: bool = False
    """Whether there were samples enough to judge the promise."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be so, what to do about it now, and what can be said."""

    knobs: Knobs
    replicas: int | None
    """Wanted; the present scale while `held`."""
    held: bool
    """Nothing was decided about replicas: unknown, not managed, or knobs moved within the window."""
    replicas_message: str
    """Why this many replicas, with the numbers."""
    actions: tuple[Action, ...]
    conditions: tuple[Condition, ...]
    knob_plan: KnobPlan
    memory: Memory


def plan(snapshot: Snapshot, slo: ServingSLO, memory: Memory, now: float, drain_budget: float = DRAIN_BUDGET) -> Plan:
    """The decision of this moment. Pure and free of side effects: asking twice with the same arguments gives the same
    answer."""
    enforced = slo.mode is Mode.ENFORCE
    written = snapshot.policy.knobs if snapshot.policy is not None else Knobs()
    current = written if enforced else snapshot.recommended or written
    found = estimate(snapshot.replicas, slo, memory.knobs.decided or current, snapshot.stale_after)
    active = scaling_active(snapshot, slo)
    desired, scaling = DesiredReplicas(None, active.message), memory.scaling
    if active.status:
        desired, scaling = desired_replicas(snapshot, slo, found, scaling, now)
    wants_replicas = desired.replicas is not None and desired.replicas != snapshot.scale
    knobs_may_move = not enforced or _knobs_may_move(memory, slo, wants_replicas, now)
    knobs = settle(found, snapshot.replicas, slo, current, memory=memory.knobs, now=now, may_move=knobs_may_move)
    if (
        enforced
        and wants_replicas
        and not _replicas_may_move(knobs.memory.moved_at, _underway(snapshot, scaling, desired), slo, now)
    ):
        desired = replace(
            desired,
            replicas=None,
            message=f"{desired.message}; knobs first, replicas move a window of {slo.window:.0f}s later",
        )
    met = slo_met(snapshot, slo, memory.judged)
    actions: list[Action] = []
    if knobs.knobs != current:
        actions.append(SetKnobs(knobs.knobs, "KnobsChanged", knobs.message))
    if desired.replicas is not None or not active.status:  # else frozen: a scale-down under way stays where it is
        scale_actions, scaling = _scale_actions(snapshot, desired, scaling, now, drain_budget)
        actions += scale_actions
    return Plan(
        knobs=knobs.knobs,
        replicas=desired.replicas if desired.replicas is not None else snapshot.scale,
        held=desired.replicas is None,
        replicas_message=desired.message,
        actions=tuple(actions),
        conditions=(
            metrics_available(snapshot, slo),
            feasible(knobs),
            within_bounds(knobs, slo, desired.unbounded),
            met,
            active,
        ),
        knob_plan=knobs,
        memory=Memory(knobs.memory, scaling, judged=met.status is not None),
    )


def scaling_active(snapshot: Snapshot, slo: ServingSLO) -> Condition:
    """ScalingActive: whether replicas are this plan's to move at all."""
    if slo.bounds.replicas is None:
        return Condition(
            "ScalingActive",
            False,
            "NoReplicaBounds",
            "replicas are left alone: set spec.bounds.replicas {min, max} to have them managed",
        )
    if snapshot.foreign_autoscaler is not None:
        return Condition(
            "ScalingActive",
            False,
            "ForeignAutoscaler",
            f"{snapshot.foreign_autoscaler} scales the target, so only knobs are managed: delete it, or remove "
            "spec.bounds.replicas",
        )
    if snapshot.scale is None:
        return Condition("ScalingActive", False, "ScaleUnknown", "the target's scale cannot be read")
    return Condition("ScalingActive", True, "Scaling", "replicas follow the load within spec.bounds.replicas")


def _knobs_may_move(memory: Memory, slo: ServingSLO, wants_replicas: bool, now: float) -> bool:
    """Knobs first, unless replicas moved within the window, or knobs moved last and replicas are waiting to move."""
    knobs_at, replicas_at = memory.knobs.moved_at, memory.scaling.moved_at
    if memory.knobs.generation != slo.generation:
        return True
    if replicas_at is not None and now - replicas_at < slo.window:
        return False
    moved_last = (
        knobs_at is not None and (replicas_at is None or knobs_at > replicas_at) and now - knobs_at < 2 * slo.window
    )
    return not (wants_replicas and moved_last)


def _replicas_may_move(knobs_moved_at: float | None, underway: bool, slo: ServingSLO, now: float) -> bool:
    return underway or knobs_moved_at is None or now - knobs_moved_at >= slo.window


def _underway(snapshot: Snapshot, memory: ScaleMemory, desired: DesiredReplicas) -> bool:
    return desired.replicas == memory.decided and snapshot.policy is not None and bool(snapshot.policy.cordoned)


def _scale_actions(
    snapshot: Snapshot, desired: DesiredReplicas, memory: ScaleMemory, now: float, drain_budget: float
) -> tuple[list[Action], ScaleMemory]:
    scale = snapshot.scale
    if scale is None:
        return [], memory
    target = desired.replicas if desired.replicas is not None else scale
    if target == scale:
        memory = replace(memory, decided=None)
    elif target != memory.decided:
        memory = replace(memory, decided=target, moved_at=now)
    retirement, memory = retire(snapshot, target, memory, now, drain_budget)
    before = tuple(sorted(snapshot.policy.cordoned)) if snapshot.policy else ()
    actions: list[Action] = []
    if retirement.cordoned != before:
        reason = "Cordoned" if set(retirement.cordoned) - set(before) else "Uncordoned"
        actions.append(Cordon(retirement.cordoned, reason, f"{desired.message}: {retirement.message}"))
    if target > scale:
        actions.append(Scale(target, (), "ScaledUp", f"{scale} → {target} replicas: {desired.message}"))
    elif target < scale and retirement.ready:
        message = f"{scale} → {target} replicas: {desired.message}; {retirement.message}"
        actions.append(Scale(target, retirement.victims, "ScaledDown", message))
    return actions, memory
