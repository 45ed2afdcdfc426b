"""What the operator may do, by SelfSubjectAccessReviews. Every watch needs one: a refused watch would end kopf."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway_core.contract.kubernetes import GROUP, PLURAL

from headway_operator.kube import Kube
from headway_operator.metrics import MISSING_RIGHTS

ASK_AGAIN = 60.0
"""Seconds between reviews while a right is missing."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource, and the condition that cannot hold without it."""

    verb: str
    group: str
    resource: str
    condition: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


NEEDED = (
    Right("list", GROUP, PLURAL, "Ready"),
    Right("watch", GROUP, PLURAL, "Ready"),
    Right("patch", GROUP, f"{PLURAL}/status", "Ready"),
    Right("list", "apps", "deployments", "TargetResolved"),
    Right("watch", "apps", "deployments", "TargetResolved"),
    Right("list", "", "services", "TargetResolved"),
    Right("watch", "", "services", "TargetResolved"),
    Right("list", "", "pods", "MetricsAvailable"),
    Right("watch", "", "pods", "MetricsAvailable"),
    Right("patch", "", "pods", "KnobsApplied"),
    Right("get", "apps", "deployments/scale", "ScalingActive"),
    Right("patch", "apps", "deployments/scale", "ScalingActive"),
    Right("list", "autoscaling", "horizontalpodautoscalers", "ScalingActive"),
    Right("create", "", "events", "Ready"),
)
"""Besides these: the lease; get and patch of each gateway's policy ConfigMap by name, found out when it is used."""


@dataclass(frozen=True, slots=True)
class Access:
    """The answer of one review: rights that are missing, by namespace ("" for all)."""

    missing: frozenset[tuple[str, Right]] = frozenset()

    def may_watch(self, namespace: str, resource: str) -> bool:
        """Both verbs that a watch needs."""
        return not any(
            place == namespace and right.resource == resource and right.verb in ("list", "watch")
            for place, right in self.missing
        )

    def lacks(self, namespace: str, condition: str | None = None) -> tuple[Right, ...]:
        """Rights missing for objects of `namespace`, in the order of `NEEDED`; with `condition`, those it needs."""
        if not self.missing:
            return ()
        missing = {right for place, right in self.missing if place in ("", namespace)}
        return tuple(right for right in NEEDED if right in missing and condition in (None, right.condition))

    def may(self, namespace: str, verb: str, resource: str) -> bool:
        """Whether this one right is there."""
        return not any(right.verb == verb and right.resource == resource for right in self.lacks(namespace))


class AccessReview:
    """What the operator may do, as the last review said. `refresh` it often: it asks when that is due."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._clock = clock
        self._asked_at: float | None = None
        self.access = Access()

    @property
    def known(self) -> bool:
        """Whether there was a review."""
        return self._asked_at is not None

    async def refresh(self) -> None:
        """Asks at first, and then every minute while a right is missing or something was refused. Raises KubeError."""
        now = self._clock()
        if self._asked_at is not None:
            in_doubt = self._kube.denied or bool(self.access.missing)
            if not in_doubt or now - self._asked_at < ASK_AGAIN:
                return
        self.access = await review(self._kube, self._namespaces)
        self._asked_at = now
        self._kube.denied = False
        MISSING_RIGHTS.set(len(self.access.missing))
        for place, right in sorted(self.access.missing, key=lambda entry: (entry[0], NEEDED.index(entry[1]))):
            log.warning("missing right: %s in %s", right, place or "all namespaces")


async def review(kube: Kube, namespaces: Iterable[str]) -> Access:
    """Asks for every right of `NEEDED` in each namespace; none given: in all at once. Raises KubeError."""
    questions = [(namespace, right) for namespace in (tuple(namespaces) or ("",)) for right in NEEDED]
    answers = await asyncio.gather(*(_allowed(kube, namespace, right) for namespace, right in questions))
    return Access(frozenset(question for question, allowed in zip(questions, answers, strict=True) if not allowed))


async def _allowed(kube: Kube, namespace: str, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }
    return bool((await kube.create(_REVIEWS, body)).get("status", {}).get("allowed", False))
