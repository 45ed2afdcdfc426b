"""Carries a plan out: policy, touch of the pods, deletion cost, scale. The only place that changes anything but a
status.

Every write asks first whether the lease is held. Each step can be found again in the cluster, so one that fails is
simply planned again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_core.contract.policy import Knobs, Policy
from headway_core.planning.plan import Scale
from headway_core.planning.snapshot import Phase

from headway_operator import manifests
from headway_operator.kube import APPLY_PATCH, Kube, KubeError
from headway_operator.metrics import ACTIONS
from headway_operator.resources import Pod
from headway_operator.targets import ResolvedTarget

TOUCH_AGAIN = 3.0
"""Seconds without acknowledgement after which a pod is touched again; doubled each time."""
TOUCHES = 5
"""Touches of one pod for one revision; after that the kubelet's own minute has to do."""
FRESH = 30.0
"""Seconds for which a ConfigMap that was read is believed; a write of one that changed since is refused, and reads it
again."""
_CONFLICTS = 5

log = logging.getLogger(__name__)


class NotLeading(Exception):
    """The lease is gone: nothing may be written."""


class Written:
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
class Touches:
    """What was done to have one revision read: pod uid → (attempts, when last)."""

    revision: int = 0
    pods: dict[str, tuple[int, float]] = field(default_factory=dict)


class Applier:
    """Writes under the lease. `may_write` is asked before each."""

    def __init__(self, kube: Kube, may_write: Callable[[], bool]) -> None:
        self._kube = kube
        self._may_write = may_write
        self._maps: dict[tuple[str, str], Written] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        """Many objects share a ConfigMap: one reads it for all, and they write one after the other instead of refusing
        each other."""

    async def config_map(self, target: ResolvedTarget, now: float) -> Written:
        """The policy ConfigMap, read at most `FRESH` seconds ago. Raises KubeError."""
        key = (target.slo.namespace, target.config_map)
        async with self._lock(key):
            return await self._read(key, now)

    def _lock(self, key: tuple[str, str]) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _read(self, key: tuple[str, str], now: float) -> Written:
        known = self._maps.get(key)
        if known is None or now - known.at > FRESH:
            known = self._maps[key] = Written(await self._kube.get(_map_path(*key)), now)
        return known

    async def write_policy(
        self, target: ResolvedTarget, knobs: Knobs, cordoned: tuple[str, ...], *, above: int, now: float
    ) -> Policy:
        """The policy, with a revision higher than any that was ever written or acknowledged (`above`).

        Raises KubeError, NotLeading.

        A ConfigMap that somebody else changed meanwhile is read again: their keys are not ours, but a revision of
        theirs may be higher.
        """
        slo = target.slo
        key = (slo.namespace, target.config_map)
        async with self._lock(key):
            for attempt in range(_CONFLICTS):
                written = await self._read(key, now)
                revision = 1 + max(above, written.highest_revision(slo.target_name))
                document = manifests.policy(target, knobs, cordoned, revision)
                self._check()
                try:
                    answer = await self._kube.patch(
                        _map_path(*key),
                        manifests.policy_apply(slo.name, written.config_map, document),
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
                self._maps[key] = Written(answer, now)
                ACTIONS.labels("policy").inc()
                log.info(
                    "%s/%s: policy revision %d: %s, cordoned %s",
                    slo.namespace,
                    slo.name,
                    revision,
                    knobs,
                    list(cordoned),
                )
                return document
        raise AssertionError("the last attempt returns or raises")

    async def touch(
        self, target: ResolvedTarget, policy: Policy, acknowledged: Mapping[str, int], touches: Touches, now: float
    ) -> float | None:
        """Touches the ready pods that have not acknowledged; returns the seconds until the next is due, or None.

        Raises KubeError, NotLeading.
        """
        if touches.revision != policy.revision:
            touches.revision, touches.pods = policy.revision, {}
        waits: list[float] = []
        due: list[Pod] = []
        for pod in (*target.runtimes, *target.gateways):
            if pod.phase is not Phase.READY or acknowledged.get(pod.name, 0) >= policy.revision:
                continue
            attempts, last = touches.pods.setdefault(pod.uid, (1 if _told(pod, policy.revision) else 0, now))
            if attempts < TOUCHES:
                wait = last + TOUCH_AGAIN * 2 ** (attempts - 1) - now if attempts else 0.0
                waits.append(wait if wait > 0 else TOUCH_AGAIN * 2.0**attempts)
                if wait <= 0:
                    due.append(pod)
        await asyncio.gather(*(self._touch(pod, policy.revision, touches, now) for pod in due))
        return min(waits, default=None)

    async def _touch(self, pod: Pod, revision: int, touches: Touches, now: float) -> None:
        attempts = touches.pods[pod.uid][0] + 1
        self._check()
        try:
            await self._kube.patch(_pod_path(pod), manifests.touch_patch(revision, attempts))
        except KubeError as error:
            if not error.missing:
                raise
        touches.pods[pod.uid] = (attempts, now)
        ACTIONS.labels("touch").inc()

    async def scale(self, target: ResolvedTarget, action: Scale) -> bool:
        """Marks the victims, takes stale marks away, and sets the scale; False when it was changed by somebody else
        meanwhile.

        Raises KubeError, NotLeading.
        """
        path = f"/apis/apps/v1/namespaces/{target.slo.namespace}/deployments/{target.slo.target_name}/scale"
        scale = await self._kube.get(path)
        if scale.get("spec", {}).get("replicas", 0) != target.deployment.replicas:
            return False
        await self.mark(target.runtimes, frozenset(action.victims))
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

    async def mark(self, pods: Iterable[Pod], victims: frozenset[str]) -> None:
        """Puts the deletion cost on exactly these pods: any other pod that carries it loses it.

        Raises KubeError, NotLeading.
        """
        wrong = [
            pod
            for pod in pods
            if pod.phase is not Phase.LEAVING and (pod.cost == manifests.DELETION_COST) != (pod.name in victims)
        ]
        for pod in wrong:
            self._check()
            try:
                await self._kube.patch(_pod_path(pod), manifests.cost_patch(pod.name in victims))
            except KubeError as error:
                if not error.missing:
                    raise
            ACTIONS.labels("mark").inc()

    def _check(self) -> None:
        if not self._may_write():
            raise NotLeading


def _told(pod: Pod, revision: int) -> bool:
    return pod.touched.split(".")[0] == str(revision)


def _map_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"


def _pod_path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
