"""What the operator did, read off the API server's audit log: a witness that no part of the product talks to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from cluster.audit import AuditEntry, AuditLog


@dataclass(frozen=True, slots=True)
class PolicyWrite:
    """A policy was written at `at` (epoch seconds). Knobs are None where the runtimes' own values stay."""

    at: float
    revision: int
    max_num_seqs: int | None
    prefill_token_budget: int | None
    cordoned: tuple[str, ...]

    @property
    def knobs(self) -> tuple[int | None, int | None]:
        """(max_num_seqs, prefill token budget)."""
        return self.max_num_seqs, self.prefill_token_budget


@dataclass(frozen=True, slots=True)
class Scaling:
    """The target was given so many replicas."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A pod got a deletion cost, or lost it (None)."""

    at: float
    pod: str
    cost: str | None


class Deeds:
    """Successful writes of one release's operator, oldest first, within [`since`, `until`) of the wall clock."""

    def __init__(self, audit: AuditLog, namespace: str, account: str) -> None:
        self._audit = audit
        self._wanted = {
            "namespace": namespace,
            "user": f"system:serviceaccount:{namespace}:{account}",
            "code": 200,
            "verb": "patch",
        }

    def policies(self, slo: str, since: float = 0.0, until: float = float("inf")) -> list[PolicyWrite]:
        """Writes of the policy of one ServingSLO."""
        found = []
        for entry in self._between(since, until, resource="configmaps"):
            document = json.loads(entry.body["data"][f"{slo}.json"])
            knobs = document.get("knobs") or {}
            found.append(
                PolicyWrite(
                    entry.at,
                    document["revision"],
                    knobs.get("maxNumSeqs"),
                    knobs.get("prefillTokenBudget"),
                    tuple(document.get("cordoned") or ()),
                )
            )
        return found

    def scalings(self, since: float = 0.0, until: float = float("inf")) -> list[Scaling]:
        """Changes of the number of replicas."""
        found = self._between(since, until, resource="deployments", subresource="scale")
        return [Scaling(entry.at, entry.body["spec"]["replicas"]) for entry in found]

    def marks(self, since: float = 0.0, until: float = float("inf")) -> list[Mark]:
        """Deletion costs set and taken away."""
        cost = "controller.kubernetes.io/pod-deletion-cost"
        found = self._between(since, until, resource="pods", subresource="")
        annotated = [(entry, (entry.body.get("metadata") or {}).get("annotations") or {}) for entry in found]
        return [
            Mark(entry.at, entry.name, annotations[cost]) for entry, annotations in annotated if cost in annotations
        ]

    def _between(self, since: float, until: float, **wanted: str) -> list[AuditEntry]:
        self._audit.settle()
        entries = self._audit.entries(**self._wanted, **wanted)
        return [entry for entry in entries if since <= entry.at < until]


def reversals(values: Iterable[int]) -> int:
    """How often a series turned round: 1, 2, 4, 3 turns once."""
    steps = [after - before for before, after in pairwise(values) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))
