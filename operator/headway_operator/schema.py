"""Whether the cluster's ServingSLO schema is the one this operator was made for.

An older schema drops fields it does not know: what users write is lost without a word, and a status that never reads
back as written would be written for ever. So an older one is refused, with the command that upgrades it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_core.contract.kubernetes import GROUP, VERSION
from headway_core.slo import KIND

from headway_operator.kube import Kube, KubeError

CHECK_GOOD = 600.0
"""Seconds between checks of a schema that is good."""
CHECK_REFUSED = 10.0
"""Seconds between checks of one that is missing or refused."""
UPGRADE = "kubectl apply --server-side -f crds/servingslos.headway.dev.yaml"

_OBSERVED = ("attainment", "class", "requestRate", "shed", "tpot", "ttft")
_RANGES = tuple(
    f"spec.bounds.{knob}.{side}" for knob in ("replicas", "maxNumSeqs", "prefillTokenBudget") for side in ("min", "max")
)
_OBJECTIVES = ("ttft.target", "ttft.percentile", "ttft.perThousandPromptTokens", "tpot.target", "tpot.percentile")
_OF_CLASS = tuple(f"objectives.{field}" for field in _OBJECTIVES)
_CLASS = ("name", "priority", "shares", "serviceTiers", "maxQueueTime", *_OF_CLASS)
_SPEC = (
    *("spec.mode", "spec.defaultClass", "spec.gatewayRef.name", "spec.serviceRef.name", "spec.serviceRef.port"),
    *("spec.targetRef.apiVersion", "spec.targetRef.kind", "spec.targetRef.name"),
    *("spec.evaluation.window", "spec.evaluation.minSamples"),
    *("spec.behavior.scaleUp.stabilizationWindow", "spec.behavior.scaleDown.stabilizationWindow"),
)
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime", "observedGeneration")
_APPLIED = ("maxNumSeqs", "prefillTokenBudget", "replicas", "policyRevision", "acknowledgedReplicas")

FIELDS = frozenset(
    (
        *_SPEC,
        *_RANGES,
        *(f"spec.objectives.{field}" for field in _OBJECTIVES),
        *(f"spec.classes.{field}" for field in _CLASS),
        *("status.observedGeneration", "status.replicas", "status.readyReplicas"),
        *(f"status.conditions.{field}" for field in _CONDITION),
        *(f"status.observed.{field}" for field in _OBSERVED),
        *(f"status.classes.{field}" for field in _OBSERVED),
        *(f"status.desired.{field}" for field in ("maxNumSeqs", "prefillTokenBudget", "replicas")),
        *(f"status.applied.{field}" for field in _APPLIED),
        *(f"status.decisions.{field}" for field in ("time", "action", "reason", "message")),
    )
)
"""Every leaf that this operator reads or writes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What the cluster serves. `complaint` None: every field is there; else what is wrong and what to do."""

    installed: bool
    complaint: str | None = None


class SchemaCheck:
    """The schema as it was served last. `refresh` it often: it asks when that is due."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._checked_at: float | None = None
        self.served = Served(False)

    @property
    def known(self) -> bool:
        """Whether it was read."""
        return self._checked_at is not None

    async def refresh(self) -> None:
        """Reads it at first, and when the last reading is old. Raises KubeError when it cannot be read."""
        now = self._clock()
        period = CHECK_GOOD if self.served.complaint is None and self.served.installed else CHECK_REFUSED
        if self._checked_at is not None and now - self._checked_at < period:
            return
        self.served = await served(self._kube)
        self._checked_at = now
        if self.served.complaint is not None:
            log.error("%s", self.served.complaint)


async def served(kube: Kube) -> Served:
    """Reads the published schema. Raises KubeError when it cannot be read."""
    missing = Served(False, f"the ServingSLO CRD is not installed: {UPGRADE}")
    try:
        document = await kube.get(f"/openapi/v3/apis/{GROUP}/{VERSION}")
    except KubeError as error:
        if error.missing:
            return missing
        raise
    schemas = document.get("components", {}).get("schemas", {})
    found = next((schema for name, schema in schemas.items() if name.endswith(f".{KIND}")), None)
    if found is None:
        return missing
    lacking = sorted(FIELDS - leaves(found))
    if not lacking:
        return Served(True)
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    fields = ", ".join(lacking[:3])
    return Served(
        True,
        f"the ServingSLO CRD in this cluster is older than this operator: it lacks {fields}{more}. Upgrade it: "
        f"{UPGRADE}",
    )


def leaves(schema: Mapping[str, Any], path: str = "") -> frozenset[str]:
    """Dotted paths of every leaf property; items of a list have the list's path."""
    schema = schema.get("items", schema)
    properties = schema.get("properties", {})
    if not properties:
        return frozenset((path,))
    return frozenset().union(*(leaves(child, f"{path}.{name}" if path else name) for name, child in properties.items()))
