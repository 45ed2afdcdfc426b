"""Foreign autoscalers on a target: HorizontalPodAutoscalers, KEDA's among them. Listed every 30 s, never watched."""

from __future__ import annotations

import asyncio

from headway_operator.kube import Kube

FRESH = 30.0
"""Seconds for which a list is believed."""


class Autoscalers:
    """The autoscalers of each namespace, by the Deployment that they scale."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._listing: dict[str, asyncio.Lock] = {}
        self._known: dict[str, tuple[float, dict[str, str]]] = {}

    async def of(self, namespace: str, deployment: str, now: float) -> str | None:
        """Kind and name of the autoscaler on the Deployment, or None. Raises KubeError."""
        async with self._listing.setdefault(namespace, asyncio.Lock()):  # one object lists for all of them
            at, known = self._known.get(namespace, (float("-inf"), {}))
            if now - at > FRESH:
                known = await self._list(namespace)
                self._known[namespace] = (now, known)
            return known.get(deployment)

    async def _list(self, namespace: str) -> dict[str, str]:
        answer = await self._kube.get(f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers")
        found = {}
        for item in answer.get("items") or ():
            reference = item.get("spec", {}).get("scaleTargetRef", {})
            if reference.get("kind") == "Deployment":
                found[reference.get("name", "")] = f"HorizontalPodAutoscaler {item['metadata']['name']}"
        return found
