"""The policy: what the operator (or `headway up`) writes, and gateway and runtime read."""

from __future__ import annotations

from dataclasses import dataclass

from headway_core.contract.http import CONTROL_PORT, SERVING_PORT
from headway_core.slo import PriorityClass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica, or the headless Service in front of all, listens. `host` may be a name of many addresses."""

    host: str
    port: int = SERVING_PORT
    control_port: int = CONTROL_PORT


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas that serve one model. `model` None: the name that the replicas report."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Knobs:
    """Ceilings for every replica of the pool; None leaves the replica's own start-up value."""

    max_num_seqs: int | None = None
    prefill_token_budget: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("maxNumSeqs", self.max_num_seqs), ("prefillTokenBudget", self.prefill_token_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


MAX_REVISION = 2**31 - 1
"""Revisions count changes: one a second for 68 years. A higher one is a mistake that would shut out later policies."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One ServingSLO as its gateway and runtimes need it. Only a higher `revision` of the same pool is ever applied."""

    revision: int
    slo_uid: str
    generation: int
    pool: Pool
    classes: tuple[PriorityClass, ...]
    default_class: str
    knobs: Knobs = Knobs()
    cordoned: tuple[str, ...] = ()
    """Replica ids (pod names) that get nothing new."""
    min_samples: int = 20
    window: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.revision <= MAX_REVISION:
            shown = self.revision if abs(self.revision) < 10**20 else f"{'-' if self.revision < 0 else ''}10^20 or more"
            raise ValueError(
                f"revision must be from 1 to {MAX_REVISION}, not {shown}: write the one after the revision in force"
            )
        if all(known.name != self.default_class for known in self.classes):
            raise ValueError(f"defaultClass must name one of the classes, not {self.default_class!r}")
