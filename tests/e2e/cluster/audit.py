"""The API server's audit log: what was asked of it, by whom, how often. Reading only."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*"]},
        # What only the control plane's own parts do would be most of the log.
        {"level": "None", "users": ["system:apiserver", "system:kube-scheduler", "system:kube-proxy"]},
        {"level": "None", "userGroups": ["system:nodes"]},
        {"level": "Metadata", "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}]},
        {"level": "Request", "verbs": ["create", "update", "patch", "delete"]},
        {"level": "Metadata"},
    ],
}
"""A watch is logged when it ends; everything else when it was answered."""
SETTLED = 0.3
"""Seconds after an answer in which its entry has been written, on a busy machine too."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One answered request. `resource` is plural; `body` is what a write carried; `code` the HTTP status; `at` epoch
    seconds of arrival."""

    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    user_agent: str
    code: int
    at: float
    uri: str
    body: Any = None


class AuditLog:
    """Reads the log file of one API server. Filters take one value or a set of values."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        """A place in the log; pass it as `since` to see only what came later."""
        self.settle()
        return self._size()

    def settle(self) -> None:
        """Waits for the entries of what was answered so far: they follow their answers within milliseconds.

        Not for the log to be quiet, which it never is while somebody polls.
        """
        time.sleep(SETTLED)

    def entries(self, since: int = 0, **wanted: str | int | Collection[str] | Collection[int]) -> list[AuditEntry]:
        """Entries after `since` whose attributes equal `wanted` (``verb={"patch", "update"}, resource="pods"``), oldest
        first."""
        return [
            entry
            for entry in self._read(since)
            if all(_matches(getattr(entry, key), value) for key, value in wanted.items())
        ]

    def count(
        self, *by: str, since: int = 0, **wanted: str | int | Collection[str] | Collection[int]
    ) -> Counter[tuple[Any, ...]]:
        """How many of those entries there are for each combination of the attributes `by`."""
        return Counter(tuple(getattr(entry, key) for key in by) for entry in self.entries(since, **wanted))

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _read(self, since: int) -> Iterator[AuditEntry]:
        if not self.path.exists():
            return
        with self.path.open("rb") as log:
            log.seek(since)
            for line in log:
                if line.endswith(b"\n"):  # the last one may be half written
                    yield _entry(json.loads(line))


def _matches(value: object, wanted: object) -> bool:
    return value in wanted if isinstance(wanted, Collection) and not isinstance(wanted, str) else value == wanted


def _entry(event: dict[str, Any]) -> AuditEntry:
    target = event.get("objectRef") or {}
    return AuditEntry(
        verb=event["verb"],
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        user=event["user"].get("username", ""),
        user_agent=event.get("userAgent", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        uri=event["requestURI"],
        body=event.get("requestObject"),
    )
