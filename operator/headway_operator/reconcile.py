"""One reconciliation of one ServingSLO: resolve, observe, plan, execute, report. Each step is a module of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headway_core.contract.kubernetes import GROUP, PLURAL, VERSION
from headway_core.contract.policy import Knobs, Policy
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Decision, Memory, Plan, paused, plan
from headway_core.planning.snapshot import Snapshot
from headway_core.planning.traffic_window import TrafficWindow
from headway_core.slo import Mode, ServingSLO

from headway_operator import status
from headway_operator.access import Access
from headway_operator.autoscalers import Autoscalers
from headway_operator.cache import Cache, Key
from headway_operator.events import Events
from headway_operator.executor import Executor, NotLeading
from headway_operator.kube import Kube, KubeError
from headway_operator.metrics import CONDITION
from headway_operator.observe import Observation, Observer, observe
from headway_operator.policy_ack import Delivery, acknowledged_replicas, knobs_applied
from headway_operator.settings import Settings
from headway_operator.status import StatusFigures
from headway_operator.targets import ResolvedTarget, other_operator, resolve

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ObjectState:
    """What is remembered of one object between reconciliations. A fresh one is right: the cluster tells the rest."""

    began: float
    memory: Memory = Memory()
    traffic: TrafficWindow | None = None
    delivery: Delivery = field(default_factory=Delivery)
    refreshed: float = 0.0
    """When figures were written last; a new state counts from its beginning."""
    shown: set[str] = field(default_factory=set)
    refusal: str | None = None
    """The complaint about a refused schema that the status shows."""
    waiting: bool = False
    """An acknowledgement is expected soon, so pods are polled more often."""
    left_to: str | None = None
    """The other operator that manages it."""
    cordoned: ResolvedTarget | None = None
    """The target, while its policy cordons a replica; None otherwise."""


class Reconciler:
    """Reconciles any object; one for all of them."""

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        cache: Cache,
        *,
        observer: Observer,
        executor: Executor,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._cache = cache
        self._observer = observer
        self._executor = executor
        self._may_write = may_write
        self._clock = clock
        self._autoscalers = Autoscalers(kube)
        self._events = Events(kube, settings.identity, clock)

    async def reconcile(self, key: Key, state: ObjectState, access: Access) -> float:
        """Reconciles one object; returns the seconds until it is due again.

        Raises KubeError when the API server failed for now, NotLeading, nothing else.
        """
        document = self._cache.slos.get(*key)
        if document is None:
            return self._settings.interval
        other = other_operator(document, self._cache, self._settings.operator)
        if other != state.left_to:
            state.left_to = other
            self._hide(key, state)
            what = f"left to the operator {other} that its gateway names" if other else "managed here"
            log.info("%s/%s is %s", *key, what)
        if other is not None:
            return self._settings.interval
        resolution = resolve(document, self._cache, access)
        if resolution.target is None:
            undecided = [
                Condition(kind, None, "TargetNotResolved", "not judged while the target is not resolved")
                for kind in status.UNDECIDED
            ]
            conditions = [resolution.accepted, resolution.resolved, *undecided]
            await self._report(document, state, access, resolution.slo, conditions, StatusFigures(), [])
            return self._settings.interval
        target = resolution.target
        await self._observer.poll(target, awaiting_ack=state.waiting)
        now = self._clock()
        known, failure = await self._known(target, document, access, now)
        observation = observe(target, self._observer, self._traffic_window(state, target.slo), known, now)
        planned = plan(observation.snapshot, target.slo, state.memory, now, self._settings.drain_budget)
        state.memory = planned.memory
        outcome = await self._executor.execute(planned.actions, target, known.policy, state.delivery, now)
        policy = outcome.policy
        state.waiting = outcome.again < self._settings.interval
        state.cordoned = target if policy is not None and policy.cordoned else None
        waited = state.delivery.waited(policy, now)
        applied = knobs_applied(target.slo, policy, observation, failure or outcome.failure, waited)
        told = [_refused_scaling(condition, outcome.refused) for condition in planned.conditions]
        conditions = [resolution.accepted, resolution.resolved, *told, applied]
        if now - state.began < target.slo.window + self._settings.interval:
            conditions = status.keep_while_warming(conditions, document.get("status") or {}, target.slo.generation)
        figures = self._figures(target, observation, planned, policy, document, state)
        await self._report(document, state, access, target.slo, conditions, figures, outcome.decisions)
        return min(self._settings.interval, outcome.again)

    def _traffic_window(self, state: ObjectState, slo: ServingSLO) -> TrafficWindow:
        traffic = state.traffic
        if traffic is None or (traffic.pool, traffic.window) != (slo.target_name, slo.window):
            traffic = state.traffic = TrafficWindow(slo.target_name, slo.window)
            state.began = self._clock()
        return traffic

    async def _known(
        self, target: ResolvedTarget, document: Mapping[str, Any], access: Access, now: float
    ) -> tuple[Snapshot, KubeError | None]:
        """What is known besides the pods' reports; and why the policy could not be read, if so."""
        policy: Policy | None = None
        failure: KubeError | None = None
        try:
            policy = (await self._executor.policy_map(target, now)).policy(target.slo.name)
        except KubeError as error:
            if error.transient:
                raise
            failure = error
        recommends = target.slo.mode is Mode.RECOMMEND
        recommended = ((document.get("status") or {}).get("desired") or {}) if recommends else {}
        known = Snapshot(
            policy=policy,
            policy_readable=failure is None,
            recommended=_knobs(recommended) if recommended else None,
            recommended_replicas=recommended.get("replicas"),
            foreign_autoscaler=await self._autoscaler(target, access, now),
            missing_scaling_rights=tuple(map(str, access.lacks(target.slo.namespace, "ScalingActive"))),
            stale_after=self._settings.stale_after,
        )
        return known, failure

    async def _autoscaler(self, target: ResolvedTarget, access: Access, now: float) -> str | None:
        slo = target.slo
        if slo.bounds.replicas is None or not access.may(slo.namespace, "list", "horizontalpodautoscalers"):
            return None
        return await self._autoscalers.of(slo.namespace, slo.target_name, now)

    def _figures(
        self,
        target: ResolvedTarget,
        observation: Observation,
        planned: Plan,
        policy: Policy | None,
        document: Mapping[str, Any],
        state: ObjectState,
    ) -> StatusFigures:
        slo, snapshot = target.slo, observation.snapshot
        before = document.get("status") or {}
        warm = self._clock() - state.began >= slo.window
        managed = slo.bounds.replicas is not None and snapshot.foreign_autoscaler is None
        replicas = planned.replicas
        if not warm:  # what was wanted before outweighs what is not known yet
            replicas = max(replicas or 0, (before.get("desired") or {}).get("replicas") or 0)
        return StatusFigures(
            replicas=snapshot.scale,
            ready=len(snapshot.serving),
            traffic=snapshot.traffic,
            whole=warm,
            desired=None if slo.mode is Mode.OBSERVE else planned.knobs,
            desired_replicas=replicas if managed else None,
            applied=policy.knobs if policy is not None else None,
            applied_replicas=snapshot.scale,
            revision=policy.revision if policy is not None else None,
            acknowledged=acknowledged_replicas(observation, policy),
        )

    async def _report(
        self,
        document: Mapping[str, Any],
        state: ObjectState,
        access: Access,
        slo: ServingSLO | None,
        conditions: list[Condition],
        figures: StatusFigures,
        decisions: list[Decision],
    ) -> None:
        """Writes the status when that is due, and tells what changed."""
        metadata, before = document["metadata"], document.get("status") or {}
        missing = tuple(str(right) for right in access.lacks(metadata["namespace"]))
        conditions = [status.ready(conditions, missing, _as_asked(slo)), *conditions]
        self._show(metadata, conditions, state)
        now, at = self._clock(), _now()
        generation = int(metadata.get("generation", 0))
        listed = status.condition_documents(conditions, before, generation, at)
        after = status.build(slo, listed, figures, status.decided(before, decisions, at), before, generation)
        if not status.worth_writing(before, after, now - max(state.refreshed, state.began)):
            return
        key = (metadata["namespace"], metadata["name"])
        try:
            answer = await self._patch_status(key, status.merge_patch(before, after))
        except KubeError as error:
            if error.forbidden:
                message = f"the status cannot be written: {error.message}"
                await self._events.warn(document, "MissingPermission", message, at)
            if not error.missing:
                raise
            return
        state.refreshed = now
        self._cache.slos.put(answer)
        await self._events.tell(document, conditions, decisions, before, at)

    async def complain(self, key: Key, state: ObjectState, complaint: str) -> None:
        """Says once that the schema is refused: an older one may drop the status. Raises KubeError, NotLeading."""
        document = self._cache.slos.get(*key)
        if document is None or state.refusal == complaint:
            return
        before = document.get("status") or {}
        conditions = before.get("conditions") or ()
        known: dict[str, Any] = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
        if (known.get("status"), known.get("reason"), known.get("message")) != ("False", "StaleSchema", complaint):
            condition = Condition("Ready", False, "StaleSchema", complaint)
            generation = int(document["metadata"].get("generation", 0))
            listed = status.condition_documents([condition], before, generation, _now())
            await self._patch_status(key, {"conditions": listed})
        state.refusal = complaint

    async def _patch_status(self, key: Key, patch: Mapping[str, Any]) -> dict[str, Any]:
        if not self._may_write():
            raise NotLeading
        namespace, name = key
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}/status"
        return await self._kube.patch(path, {"status": patch})

    def _show(self, metadata: Mapping[str, Any], conditions: list[Condition], state: ObjectState) -> None:
        for condition in conditions:
            state.shown.add(condition.type)
            value = -1 if condition.status is None else int(condition.status)
            CONDITION.labels(metadata["namespace"], metadata["name"], condition.type).set(value)

    def _hide(self, key: Key, state: ObjectState) -> None:
        for kind in state.shown:
            CONDITION.remove(*key, kind)
        state.shown.clear()

    async def forget(self, key: Key, state: ObjectState) -> None:
        """The object is gone: its metrics go, knobs and replicas stay, cordons end. Raises KubeError, NotLeading."""
        self._hide(key, state)
        if state.cordoned is not None:
            await self._executor.uncordon(state.cordoned, self._clock())


def _knobs(desired: Mapping[str, Any]) -> Knobs:
    """What was recommended last, read back from the status, so that a restart recommends the same."""
    return Knobs(desired.get("maxNumSeqs"), desired.get("prefillTokenBudget"))


def _refused_scaling(condition: Condition, refused: KubeError | None) -> Condition:
    """ScalingActive is False when the API server refused the scale; any other condition stays as it is."""
    if condition.type != "ScalingActive" or not condition.status or refused is None:
        return condition
    return Condition(condition.type, False, "Refused", f"the scale could not be set: {refused.message}")


def _as_asked(slo: ServingSLO | None) -> Condition:
    if slo is not None and paused(slo):
        return Condition("Ready", True, "Paused", "paused: promises are measured and nothing is applied")
    mode = slo.mode if slo is not None else Mode.ENFORCE
    words = {
        Mode.OBSERVE: ("Observing", "promises are measured; nothing is recommended or applied"),
        Mode.RECOMMEND: ("Recommending", "status.desired says what would be set; nothing is applied"),
        Mode.ENFORCE: ("Enforcing", "knobs and replicas are managed within spec.bounds"),
    }
    return Condition("Ready", True, *words[mode])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
