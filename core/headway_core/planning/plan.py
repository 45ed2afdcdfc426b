"""One decision: a snapshot and the object in, actions with reasons and conditions out. Nothing here acts.

`Plan.actions` is all that is to be done, in this order: mode, pause and missing rights are already taken into account.
Each plan compares what is written with what is wanted, so an edit by somebody else is undone by the next plan.

Order of the actuators: **knobs first**, and only one of the two moves in a window (`spec.evaluation.window`): after
knobs moved, replicas wait a window to see what the knobs gave, and the other way round; when both want to move again,
the one that moved less recently goes first. The steps of one scale-down (cordon, drain, scale) are one move. What is
only recommended makes neither of them wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway_core.contract.kubernetes import ANNOTATION_PAUSED
from headway_core.contract.policy import Knobs, Policy
from headway_core.planning.conditions import Condition, feasible, metrics_available, slo_met, within_bounds
from headway_core.planning.knobs import KnobMemory, KnobPlan, estimate, settle
from headway_core.planning.policy_document import next_revision, outvoted, policy_document, says_the_same
from headway_core.planning.scaling import DRAIN_BUDGET, DesiredReplicas, ScaleMemory, desired_replicas, retire
from headway_core.planning.snapshot import Phase, Snapshot
from headway_core.slo import Mode, ServingSLO


@dataclass(frozen=True, slots=True)
class SetKnobs:
    """A change of the policy: these knobs."""

    knobs: Knobs
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Cordon:
    """A change of the policy: exactly these replicas are cordoned. Any other gets requests again."""

    replicas: tuple[str, ...]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """Write this policy, then have every ready pod read it.

    `policy.revision` is the least that it may have: a policy for the same pool that is found with a higher one raises
    it. `changes` say what was decided; they are empty where the object changed, or somebody else's edit is undone.
    """

    policy: Policy
    changes: tuple[SetKnobs | Cordon, ...]


@dataclass(frozen=True, slots=True)
class TouchPods:
    """Have these pods read the policy that is written: they have not acknowledged it."""

    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MarkVictims:
    """Put the deletion cost on exactly these replicas, and take it away from any other."""

    victims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Mark `victims` with a deletion cost, then set the scale. `victims` is empty when scaling up."""

    replicas: int
    victims: tuple[str, ...]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, to be told; `action` is its kind. In a plan: what mode Enforce would do. Nothing is written."""

    action: str
    reason: str
    message: str


Action = WritePolicy | TouchPods | Scale | MarkVictims | Decision


@dataclass(frozen=True, slots=True)
class Memory:
    """What one call hands to the next. `Memory()` after a restart is right; it delays scaling down by a window."""

    knobs: KnobMemory = KnobMemory()
    scaling: ScaleMemory = ScaleMemory()
    judged: bool = False
    """Whether there were samples enough to judge the objectives."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The knobs and replicas wanted, what to do now, and what can be said. `actions` alone are executed."""

    knobs: Knobs
    replicas: int | None
    """Wanted; the present scale where nothing was decided: unknown, not managed, or knobs moved within the window."""
    replicas_message: str
    """Why this many replicas, with the numbers."""
    actions: tuple[Action, ...]
    conditions: tuple[Condition, ...]
    knob_plan: KnobPlan
    memory: Memory


def plan(snapshot: Snapshot, slo: ServingSLO, memory: Memory, now: float, drain_budget: float = DRAIN_BUDGET) -> Plan:
    """The decision of this moment. Pure: the same arguments give the same answer."""
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
        message = f"{desired.message}; knobs first, replicas move a window of {slo.window:.0f}s later"
        desired = replace(desired, replicas=None, message=message)
    met = slo_met(snapshot, slo, memory.judged)
    set_knobs = SetKnobs(knobs.knobs, "KnobsChanged", knobs.message) if knobs.knobs != current else None
    cordon: Cordon | None = None
    scale: Scale | None = None
    if desired.replicas is not None or not active.status:  # else frozen: a scale-down under way stays where it is
        cordon, scale, scaling = _scale_changes(snapshot, desired, scaling, now, drain_budget)
    actions = _recommendations(snapshot, set_knobs, desired) if slo.mode is Mode.RECOMMEND else []
    kept = _kept_from_scaling(snapshot, slo)
    if snapshot.policy_readable and not paused(slo):
        policy, changes = _wanted_policy(snapshot, slo, set_knobs, cordon)
        actions += _policy_actions(snapshot, policy, changes)
        if kept is None:
            actions += _replica_actions(snapshot, policy, scale)
    return Plan(
        knobs=knobs.knobs,
        replicas=desired.replicas if desired.replicas is not None else snapshot.scale,
        replicas_message=desired.message,
        actions=tuple(actions),
        conditions=(
            metrics_available(snapshot, slo),
            feasible(knobs),
            within_bounds(knobs, slo, desired.unbounded),
            met,
            kept if active.status and kept is not None else active,
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


def paused(slo: ServingSLO) -> bool:
    """Whether somebody asked for nothing to be applied."""
    return slo.annotations.get(ANNOTATION_PAUSED, "").lower() == "true"


def _kept_from_scaling(snapshot: Snapshot, slo: ServingSLO) -> Condition | None:
    """ScalingActive when replicas may not be touched, whatever the load asks for; None when they may."""
    if paused(slo):
        return Condition("ScalingActive", False, "Paused", "the object is paused: replicas stay as they are")
    if slo.mode is not Mode.ENFORCE:
        return Condition(
            "ScalingActive", False, "NotEnforced", f"spec.mode is {slo.mode.value}: replicas stay as they are"
        )
    if snapshot.missing_scaling_rights:
        rights = ", ".join(snapshot.missing_scaling_rights)
        return Condition("ScalingActive", False, "Forbidden", f"the operator's account may not {rights}: grant it")
    return None


def _recommendations(snapshot: Snapshot, set_knobs: SetKnobs | None, desired: DesiredReplicas) -> list[Action]:
    """What is recommended now and was not before."""
    made: list[Action] = []
    if set_knobs is not None:
        made.append(Decision("SetKnobs", "KnobsRecommended", set_knobs.message))
    if desired.replicas not in (None, snapshot.recommended_replicas):
        message = f"{desired.replicas} replicas: {desired.message}"
        made.append(Decision("Scale", "ReplicasRecommended", message))
    return made


def _wanted_policy(
    snapshot: Snapshot, slo: ServingSLO, set_knobs: SetKnobs | None, cordon: Cordon | None
) -> tuple[Policy, tuple[SetKnobs | Cordon, ...]]:
    """The policy to write, and what was decided to change. Unless enforced, its knobs stay and nobody is cordoned."""
    before = snapshot.policy
    knobs, cordoned = (before.knobs, before.cordoned) if before is not None else (Knobs(), ())
    if slo.mode is not Mode.ENFORCE:
        return policy_document(slo, snapshot.endpoints, knobs, revision=1), ()
    knobs = set_knobs.knobs if set_knobs is not None else knobs
    cordoned = cordon.replicas if cordon is not None else cordoned
    policy = policy_document(slo, snapshot.endpoints, knobs, cordoned, revision=1)
    return policy, tuple(change for change in (set_knobs, cordon) if change is not None)


def _policy_actions(snapshot: Snapshot, policy: Policy, changes: tuple[SetKnobs | Cordon, ...]) -> list[Action]:
    """Writes the policy when it says something new, or when a pod knows a higher revision: it would not read this."""
    before, highest = snapshot.policy, snapshot.highest_revision
    revision = before.revision if before is not None else 0
    if outvoted(revision, highest) or not says_the_same(before, policy):
        return [WritePolicy(replace(policy, revision=next_revision(revision, highest)), changes)]
    return [TouchPods(snapshot.unaware)] if snapshot.unaware else []


def _replica_actions(snapshot: Snapshot, policy: Policy, scale: Scale | None) -> list[Action]:
    """The scale, or else no deletion cost on a replica that is to stay."""
    if scale is not None:
        return [scale]
    marked = any(replica.marked and replica.phase is not Phase.LEAVING for replica in snapshot.replicas)
    return [MarkVictims(())] if marked and not policy.cordoned else []


def _knobs_may_move(memory: Memory, slo: ServingSLO, wants_replicas: bool, now: float) -> bool:
    """Knobs first, unless replicas moved within the window, or knobs moved last and replicas are waiting to move."""
    knobs_at, replicas_at = memory.knobs.moved_at, memory.scaling.moved_at
    if memory.knobs.generation != slo.generation:
        return True
    if replicas_at is not None and now - replicas_at < slo.window:
        return False
    if not wants_replicas or knobs_at is None:
        return True
    return (replicas_at is not None and knobs_at <= replicas_at) or now - knobs_at >= 2 * slo.window


def _replicas_may_move(knobs_moved_at: float | None, underway: bool, slo: ServingSLO, now: float) -> bool:
    return underway or knobs_moved_at is None or now - knobs_moved_at >= slo.window


def _underway(snapshot: Snapshot, memory: ScaleMemory, desired: DesiredReplicas) -> bool:
    return desired.replicas == memory.decided and snapshot.policy is not None and bool(snapshot.policy.cordoned)


def _scale_changes(
    snapshot: Snapshot, desired: DesiredReplicas, memory: ScaleMemory, now: float, drain_budget: float
) -> tuple[Cordon | None, Scale | None, ScaleMemory]:
    scale = snapshot.scale
    if scale is None:
        return None, None, memory
    target = desired.replicas if desired.replicas is not None else scale
    if target == scale:
        memory = replace(memory, decided=None)
    elif target != memory.decided:
        memory = replace(memory, decided=target, moved_at=now)
    retirement, memory = retire(snapshot, target, memory, now, drain_budget)
    before = tuple(sorted(snapshot.policy.cordoned)) if snapshot.policy else ()
    cordon: Cordon | None = None
    if retirement.cordoned != before:
        reason = "Cordoned" if set(retirement.cordoned) - set(before) else "Uncordoned"
        cordon = Cordon(retirement.cordoned, reason, f"{desired.message}: {retirement.message}")
    if target > scale:
        return cordon, Scale(target, (), "ScaledUp", f"{scale} → {target} replicas: {desired.message}"), memory
    if target < scale and retirement.ready:
        message = f"{scale} → {target} replicas: {desired.message}; {retirement.message}"
        return cordon, Scale(target, retirement.victims, "ScaledDown", message), memory
    return cordon, None, memory
