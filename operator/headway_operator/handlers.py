"""What the operator listens to. No handler here changes an object, so kopf adds no finalizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import kopf

from headway_operator.cache import WATCHED

Take = Callable[[str, str | None, Mapping[str, Any]], None]
"""Told of each event: plural, type (None for what was there at the start), object."""


def registry(take: Take, plurals: Collection[str]) -> kopf.OperatorRegistry:
    """Handlers for the resources named. The others may not be watched, which a condition tells."""
    index = kopf.OperatorRegistry()

    @kopf.on.startup(registry=index)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)

    @kopf.on.login(registry=index)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**given)

    for plural in plurals:
        group, version = WATCHED[plural]

        @kopf.on.event(group, version, plural, registry=index, id=plural, param=plural)
        async def event(*, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
            take(param, event["type"], event["object"])

    return index


def configure(settings: kopf.OperatorSettings) -> None:
    """kopf only as a source of events: it posts none, and scans no namespaces or CRDs, which needs cluster rights."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300  # seconds, whole: the API server refuses "300.0"
    settings.queueing.idle_timeout = 1.0
