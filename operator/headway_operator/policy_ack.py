"""Whether the pods acknowledge the written policy (KnobsApplied), and which must be touched to read it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headway_core.contract.kubernetes import ANNOTATION_PAUSED
from headway_core.contract.policy import Policy
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import paused
from headway_core.slo import Mode, ServingSLO

from headway_operator.kube import KubeError
from headway_operator.observe import Observation
from headway_operator.resources import Pod

ACKNOWLEDGED_WITHIN = 120.0
"""Seconds that reading a policy may take before it is a fault: a kubelet that was not woken needs a minute."""

TOUCH_AGAIN = 3.0
"""Seconds without acknowledgement after which a pod is touched again; doubled each time."""
TOUCHES = 5
"""Touches of one pod for one revision; after that the kubelet's own minute has to do."""


class Delivery:
    """How far the present revision of one object's policy has come: since when it is awaited, and who was touched."""

    def __init__(self) -> None:
        self._revision = 0
        self._since = 0.0
        self._pods: dict[str, tuple[int, float]] = {}
        """Pod uid → (touches, when last)."""

    def _follow(self, revision: int, now: float) -> None:
        if self._revision != revision:
            self._revision, self._since, self._pods = revision, now, {}

    def waited(self, policy: Policy | None, now: float) -> float:
        """Seconds since this revision was first seen."""
        if policy is not None:
            self._follow(policy.revision, now)
        return now - self._since

    def due(self, pods: Iterable[Pod], revision: int, now: float) -> tuple[list[Pod], float]:
        """Those of the pods to touch now, and the seconds until a pod is due again: inf when none will be."""
        self._follow(revision, now)
        due: list[Pod] = []
        again = float("inf")
        for pod in pods:
            touched = int(pod.touched.split(".")[0] == str(revision))
            attempts, last = self._pods.setdefault(pod.uid, (touched, now))
            if attempts < TOUCHES:
                wait = last + TOUCH_AGAIN * 2 ** (attempts - 1) - now if attempts else 0.0
                again = min(again, wait if wait > 0 else TOUCH_AGAIN * 2.0**attempts)
                if wait <= 0:
                    due.append(pod)
        return due, again

    def attempts(self, pod: Pod) -> int:
        """How often it was touched for the revision."""
        return self._pods[pod.uid][0]

    def touched(self, pod: Pod, attempts: int, now: float) -> None:
        """Takes note of a touch, the one with this number."""
        self._pods[pod.uid] = (attempts, now)


def acknowledged_replicas(observation: Observation, policy: Policy | None) -> int:
    """Serving replicas that confirm the policy."""
    if policy is None:
        return 0
    revisions = (observation.acknowledged.get(replica.name, 0) for replica in observation.snapshot.fresh)
    return sum(revision >= policy.revision for revision in revisions)


def knobs_applied(
    slo: ServingSLO, policy: Policy | None, observation: Observation, failure: KubeError | None, waited: float
) -> Condition:
    """The condition. `failure` is why the policy could not be written, `waited` the seconds since it was."""

    def condition(status: bool | None, reason: str, message: str) -> Condition:
        return Condition("KnobsApplied", status, reason, message)

    if paused(slo):
        return condition(
            False, "Paused", f"the annotation {ANNOTATION_PAUSED} is set: nothing is applied until it is removed"
        )
    if failure is not None:
        return condition(False, *_failure(failure, slo))
    if slo.mode is not Mode.ENFORCE:
        return condition(False, "NotEnforced", f"spec.mode is {slo.mode.value}: knobs and replicas stay as they are")
    if policy is None:
        raise AssertionError("without a failure, enforcing writes a policy")
    if observation.refusals:
        pod, why = sorted(observation.refusals.items())[0]
        return condition(
            False, "Refused", f"{len(observation.refusals)} pods could not read the policy, such as {pod}: {why}"
        )
    serving = len(observation.snapshot.fresh)
    confirmed = acknowledged_replicas(observation, policy)
    if serving == 0:
        return condition(
            None, "NoReplicas", f"revision {policy.revision} is written; no replica is there to confirm it"
        )
    if confirmed < serving:
        words = f"{confirmed} of {serving} serving replicas confirmed revision {policy.revision}"
        if waited < ACKNOWLEDGED_WITHIN:
            return condition(None, "Waiting", words)
        return condition(
            False, "NotAcknowledged", f"{words}: check that they mount the ConfigMap and were started with --policy"
        )
    if observation.clamped:
        what = "; ".join(f"{knob}: {why}" for knob, why in sorted(observation.clamped.items()))
        return condition(
            True, "Clamped", f"every serving replica confirmed the policy; some have less in force: {what}"
        )
    return condition(
        True, "Acknowledged", f"revision {policy.revision} is in force on {confirmed} of {serving} serving replicas"
    )


def _failure(error: KubeError, slo: ServingSLO) -> tuple[str, str]:
    name = f"{slo.gateway_name}-policy"
    if error.forbidden:
        return (
            "Forbidden",
            f"the operator's account may not get and patch ConfigMap {name} in namespace {slo.namespace}: grant "
            f"it ({error.message})",
        )
    if error.missing:
        return (
            "ConfigMapNotFound",
            f"there is no ConfigMap {name}: the chart makes it; or kubectl create configmap {name} -n {slo.namespace}",
        )
    return "WriteFailed", f"the policy could not be written: {error.message}"
