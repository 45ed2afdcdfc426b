"""Executes the actions of a plan: policy, touch, deletion cost, scale. Only status and events are written elsewhere.

Nothing is decided here. Every write first asks whether the lease is held. The next plan finds in the cluster what was
done, so a step that fails is planned again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway_core.contract.policy import Policy
from headway_core.planning.plan import Action, Decision, MarkVictims, Scale, TouchPods, WritePolicy
from headway_core.planning.policy_document import next_revision
from headway_core.planning.snapshot import Phase

from headway_operator import manifests
from headway_operator.kube import APPLY_PATCH, Kube, KubeError
from headway_operator.metrics import ACTIONS
from headway_operator.policy_ack import Delivery
from headway_operator.resources import Pod
from headway_operator.targets import ResolvedTarget

SOON = 1.5
"""Seconds after a write until the pods are asked whether they have it."""
FRESH = 30.0
"""Seconds for which a ConfigMap is believed after a read; a write of one that changed since is refused and rereads."""
_CONFLICTS = 5

log = logging.getLogger(__name__)


class NotLeading(Exception):
    """The lease is gone: nothing may be written."""


class PolicyMap:
    """The policy ConfigMap as it was read or answered last, at `at`."""

    def __init__(self, config_map: Mapping[str, Any], at: float) -> None:
        self.config_map = config_map
        self.at = at
        self._policies = manifests.policies(config_map)

    def policy(self, slo_name: str) -> Policy | None:
        """This object's policy in it."""
        return self._policies.get(manifests.policy_key(slo_name))

    def highest_revision(self, pool: str) -> int:
        """Of every policy for the pool, whoever owns it."""
        return max((known.revision for known in self._policies.values() if known.pool.name == pool), default=0)


@dataclass(slots=True)
class Outcome:
    """What executing a plan has come to."""

    policy: Policy | None
    """The one that is written now."""
    decisions: list[Decision] = field(default_factory=list)
    failure: KubeError | None = None
    """Why the policy could not be written. Nothing was scaled then."""
    refused: KubeError | None = None
    """Why the scale could not be set."""
    again: float = float("inf")
    """Seconds until there may be something to see."""


class Executor:
    """Writes under the lease, for all objects. `may_write` is asked before each write."""

    def __init__(self, kube: Kube, may_write: Callable[[], bool]) -> None:
        self._kube = kube
        self._may_write = may_write
        self._maps: dict[tuple[str, str], PolicyMap] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        """Many objects share a ConfigMap: one reads it for all, and they write one after the other."""

    async def execute(
        self, actions: Iterable[Action], target: ResolvedTarget, written: Policy | None, delivery: Delivery, now: float
    ) -> Outcome:
        """Executes the actions in order, up to the first refused for good. `written` is the policy planned from.

        Raises KubeError when the API server failed for now or somebody else wrote first, NotLeading.
        """
        outcome = Outcome(written)
        for action in actions:
            try:
                await self._execute(action, target, outcome, delivery, now)
            except KubeError as error:
                if error.transient or error.conflict:
                    raise
                if isinstance(action, Scale | MarkVictims):
                    outcome.refused = error
                else:
                    outcome.failure = error
                break
        return outcome

    async def _execute(
        self, action: Action, target: ResolvedTarget, outcome: Outcome, delivery: Delivery, now: float
    ) -> None:
        match action:
            case WritePolicy(policy, changes):
                outcome.policy = await self.write_policy(target, policy, now)
                outcome.again = SOON
                outcome.decisions += (Decision(type(made).__name__, made.reason, made.message) for made in changes)
                ready = [pod for pod in (*target.runtimes, *target.gateways) if pod.phase is Phase.READY]
                outcome.again = min(SOON, await self._touch(ready, outcome.policy.revision, delivery, now))
            case TouchPods(names):
                if outcome.policy is None:
                    raise AssertionError("pods are touched for a policy that is written")
                pods = [pod for pod in (*target.runtimes, *target.gateways) if pod.name in names]
                outcome.again = await self._touch(pods, outcome.policy.revision, delivery, now)
            case Scale():
                if await self._scale(target, action):
                    outcome.decisions.append(Decision("Scale", action.reason, action.message))
            case MarkVictims(victims):
                await self._mark(target.runtimes, frozenset(victims))
            case Decision():
                outcome.decisions.append(action)

    async def policy_map(self, target: ResolvedTarget, now: float) -> PolicyMap:
        """The policy ConfigMap, read at most `FRESH` seconds ago. Raises KubeError."""
        key = (target.slo.namespace, target.config_map)
        async with self._lock(key):
            return await self._read(key, now)

    async def uncordon(self, target: ResolvedTarget, now: float) -> None:
        """Gives cordoned replicas requests again and takes their deletion cost away. Raises KubeError, NotLeading."""
        policy = (await self.policy_map(target, now)).policy(target.slo.name)
        if policy is not None and policy.cordoned:
            await self.write_policy(target, replace(policy, cordoned=()), now)
            await self._mark(target.runtimes, frozenset())

    async def write_policy(self, target: ResolvedTarget, policy: Policy, now: float) -> Policy:
        """Writes the policy, with a revision above every one for its pool in the ConfigMap; returns it as written.

        A ConfigMap that changed meanwhile is read again: its revisions may be higher. Raises KubeError, NotLeading.
        """
        slo = target.slo
        key = (slo.namespace, target.config_map)
        async with self._lock(key):
            for attempt in range(_CONFLICTS):
                found = await self._read(key, now)
                revision = max(policy.revision, next_revision(found.highest_revision(slo.target_name)))
                document = replace(policy, revision=revision)
                self._check()
                try:
                    answer = await self._kube.patch(
                        _map_path(*key),
                        manifests.policy_apply(slo.name, found.config_map, document),
                        APPLY_PATCH,
                        fieldManager=manifests.field_manager(slo),
                        force="true",
                    )
                except KubeError as error:
                    self._maps.pop(key, None)
                    if not error.conflict or attempt == _CONFLICTS - 1:
                        raise
                    await asyncio.sleep(0.05 * 2**attempt)
                    continue
                self._maps[key] = PolicyMap(answer, now)
                ACTIONS.labels("policy").inc()
                what = f"{document.knobs}, cordoned {list(document.cordoned)}"
                log.info("%s/%s: policy revision %d: %s", slo.namespace, slo.name, revision, what)
                return document
        raise AssertionError("the last attempt returns or raises")

    def _lock(self, key: tuple[str, str]) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _read(self, key: tuple[str, str], now: float) -> PolicyMap:
        known = self._maps.get(key)
        if known is None or now - known.at > FRESH:
            known = self._maps[key] = PolicyMap(await self._kube.get(_map_path(*key)), now)
        return known

    async def _touch(self, pods: Iterable[Pod], revision: int, delivery: Delivery, now: float) -> float:
        """Touches those of the pods that are due; returns the seconds until a pod is due again, `SOON` at most.

        Without the right to touch, the kubelet's own minute has to do. Raises KubeError, NotLeading.
        """
        due, again = delivery.due(pods, revision, now)
        try:
            await asyncio.gather(*(self._touch_one(pod, revision, delivery, now) for pod in due))
        except KubeError as error:
            if not error.forbidden:
                raise
            return float("inf")
        return again if again == float("inf") else max(0.1, min(again, SOON))

    async def _touch_one(self, pod: Pod, revision: int, delivery: Delivery, now: float) -> None:
        attempt = delivery.attempts(pod) + 1
        await self._patch_pod(pod, manifests.touch_patch(revision, attempt), "touch")
        delivery.touched(pod, attempt, now)

    async def _scale(self, target: ResolvedTarget, action: Scale) -> bool:
        """Marks the victims and sets the scale; False when somebody else changed it. Raises KubeError, NotLeading."""
        path = f"/apis/apps/v1/namespaces/{target.slo.namespace}/deployments/{target.slo.target_name}/scale"
        scale = await self._kube.get(path)
        if scale.get("spec", {}).get("replicas", 0) != target.deployment.replicas:
            return False
        await self._mark(target.runtimes, frozenset(action.victims))
        self._check()
        try:
            await self._kube.patch(path, manifests.scale_patch(scale, action.replicas))
        except KubeError as error:
            if error.conflict:
                return False
            raise
        ACTIONS.labels("scale").inc()
        log.info("%s/%s: %s", target.slo.namespace, target.slo.name, action.message)
        return True

    async def _mark(self, pods: Iterable[Pod], victims: frozenset[str]) -> None:
        """Puts the deletion cost on exactly these pods; any other loses it. Raises KubeError, NotLeading."""
        wrong = [pod for pod in pods if pod.phase is not Phase.LEAVING and pod.marked != (pod.name in victims)]
        for pod in wrong:
            await self._patch_pod(pod, manifests.cost_patch(pod.name in victims), "mark")

    async def _patch_pod(self, pod: Pod, patch: Mapping[str, Any], action: str) -> None:
        """A pod that is gone needs no patch. Raises KubeError, NotLeading."""
        self._check()
        try:
            await self._kube.patch(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", patch)
        except KubeError as error:
            if not error.missing:
                raise
        ACTIONS.labels(action).inc()

    def _check(self) -> None:
        if not self._may_write():
            raise NotLeading


def _map_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"
