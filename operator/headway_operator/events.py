"""Kubernetes Events about an object: on change only, and the same reason at most once in five minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Decision

from headway_operator import manifests
from headway_operator.kube import Kube, KubeError

QUIET = 300.0
"""Seconds in which a reason is told once per object."""

log = logging.getLogger(__name__)


class Events:
    """Posts events. One that cannot be posted is only logged: nothing depends on it."""

    def __init__(self, kube: Kube, reporter: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._reporter = reporter
        self._clock = clock
        self._told: dict[tuple[str, str], float] = {}

    async def tell(
        self,
        document: Mapping[str, Any],
        conditions: Iterable[Condition],
        decisions: Iterable[Decision],
        before: Mapping[str, Any],
        at: str,
    ) -> None:
        """Decisions, conditions that became False or changed why, and those that hold again."""
        for decision in decisions:
            await self._post(document, decision.reason, decision.message, False, at)
        old = {condition["type"]: condition for condition in before.get("conditions") or ()}
        for condition in conditions:
            known = old.get(condition.type, {})
            was_false = known.get("status") == "False"
            fell = condition.status is False and not (was_false and known.get("reason") == condition.reason)
            rose = condition.status is True and was_false
            if condition.type != "Ready" and (fell or rose):  # Ready only repeats another condition's reason
                await self._post(document, condition.reason, f"{condition.type}: {condition.message}", fell, at)

    async def warn(self, document: Mapping[str, Any], reason: str, message: str, at: str) -> None:
        """One warning, for what a status cannot say."""
        await self._post(document, reason, message, True, at)

    async def _post(self, document: Mapping[str, Any], reason: str, message: str, warning: bool, at: str) -> None:
        key = (document["metadata"].get("uid", ""), reason)
        now = self._clock()
        if now - self._told.get(key, float("-inf")) < QUIET:
            return
        self._told = {known: told for known, told in self._told.items() if now - told < QUIET}
        self._told[key] = now
        namespace = document["metadata"]["namespace"]
        body = manifests.event(
            document, reason=reason, message=message, warning=warning, at=at, reporter=self._reporter
        )
        try:
            await self._kube.create(f"/api/v1/namespaces/{namespace}/events", body)
        except KubeError as error:
            if not error.conflict:
                log.info("event not posted: %s", error)
