"""Carries out what a plan asks for, as far as mode, pause and rights allow, and says what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway_core.contract.policy import Knobs, Policy
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Cordon, Plan, Scale, SetKnobs
from headway_core.slo import Mode, ServingSLO

from headway_operator import manifests
from headway_operator.access import Access
from headway_operator.apply import Applier, Touches
from headway_operator.kube import KubeError
from headway_operator.observe import Observation
from headway_operator.policy_ack import knobs_applied, paused
from headway_operator.status import Decision
from headway_operator.targets import ResolvedTarget

SOON = 1.5
"""Seconds after a write until the pods are asked whether they have it."""


@dataclass(slots=True)
class Outcome:
    """What carrying a plan out has come to."""

    policy: Policy | None
    """The one that is written now."""
    decisions: list[Decision] = field(default_factory=list)
    refused: KubeError | None = None
    """Why the scale could not be set."""
    again: float = float("inf")
    """Seconds until there may be something to see."""
    applied: Condition = field(init=False)
    """KnobsApplied."""


@dataclass(slots=True)
class Progress:
    """How far one object's policy has come: touches of its pods, and since when its revision has been waited for."""

    touches: Touches = field(default_factory=Touches)
    revision: int = 0
    since: float = 0.0

    def waited(self, policy: Policy | None, now: float) -> float:
        """Seconds since this revision was first seen."""
        if policy is not None and self.revision != policy.revision:
            self.revision, self.since = policy.revision, now
        return now - self.since


class Enforcer:
    """One for all objects."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def carry_out(
        self,
        target: ResolvedTarget,
        observation: Observation,
        wanted: Plan,
        progress: Progress,
        access: Access,
        *,
        failure: KubeError | None,
        now: float,
    ) -> Outcome:
        """`failure` is why the policy could not be read. Raises KubeError when the API server failed for now,
        NotLeading."""
        slo, snapshot = target.slo, observation.snapshot
        enforced = slo.mode is Mode.ENFORCE and not paused(slo)
        outcome = Outcome(snapshot.policy)
        if failure is None and not paused(slo):
            try:
                await self._carry_policy(target, observation, wanted, progress, outcome, now=now)
            except KubeError as error:
                if error.transient or error.conflict:
                    raise
                failure = error
        scaling = next((action for action in wanted.actions if isinstance(action, Scale)), None)
        if enforced and failure is None and not scaling_rights(access, slo):
            try:
                if scaling is not None:
                    if await self._applier.scale(target, scaling):
                        outcome.decisions.append(Decision("Scale", scaling.reason, scaling.message))
                elif not (outcome.policy and outcome.policy.cordoned):
                    await self._applier.mark(target.runtimes, frozenset())
            except KubeError as error:
                if error.transient or error.conflict:
                    raise
                outcome.refused = error
        outcome.applied = knobs_applied(slo, outcome.policy, observation, failure, progress.waited(outcome.policy, now))
        return outcome

    async def _carry_policy(
        self,
        target: ResolvedTarget,
        observation: Observation,
        wanted: Plan,
        progress: Progress,
        outcome: Outcome,
        *,
        now: float,
    ) -> None:
        """Writes the policy when it says something new, or a pod knows a higher revision; then has the pods read it."""
        slo, before = target.slo, observation.snapshot.policy
        enforced = slo.mode is Mode.ENFORCE
        knobs = wanted.knobs if enforced else (before.knobs if before else Knobs())
        cordon = next((action for action in wanted.actions if isinstance(action, Cordon)), None)
        cordoned = (cordon.replicas if cordon else before.cordoned if before else ()) if enforced else ()
        outvoted = before is not None and observation.highest_revision > before.revision
        if outvoted or not manifests.says_the_same(before, manifests.policy(target, knobs, cordoned, 1)):
            outcome.policy = await self._applier.write_policy(
                target, knobs, cordoned, above=observation.highest_revision, now=now
            )
            outcome.again = SOON
            if enforced:
                outcome.decisions += [
                    Decision(type(action).__name__, action.reason, action.message)
                    for action in wanted.actions
                    if isinstance(action, SetKnobs | Cordon)
                ]
        if outcome.policy is not None:
            due = await self._touch(target, outcome.policy, observation, progress, now)
            outcome.again = min(outcome.again, due)

    async def _touch(
        self, target: ResolvedTarget, policy: Policy, observation: Observation, progress: Progress, now: float
    ) -> float:
        """Seconds until a pod must be touched again. Without the right to touch, the kubelet's own minute has to do."""
        try:
            due = await self._applier.touch(target, policy, observation.acknowledged, progress.touches, now)
        except KubeError as error:
            if not error.forbidden:
                raise
            due = None
        return float("inf") if due is None else max(0.1, min(due, SOON))


def scaling_rights(access: Access, slo: ServingSLO) -> tuple[str, ...]:
    """Rights that are missing for scaling; with one of them missing nothing is scaled, since a foreign autoscaler may
    be unseen."""
    return tuple(str(right) for right in access.lacks(slo.namespace, "ScalingActive"))
