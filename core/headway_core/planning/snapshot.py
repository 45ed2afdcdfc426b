"""What was observed, as the planner takes it: replicas with their reports' age, traffic, scale and policy in force.

Ages are seconds since receipt by the observer's own clock; a replica's wall clock is never compared with another's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headway_core.contract.policy import Endpoint, Knobs, Policy
from headway_core.contract.reports import ReplicaState, RuntimeReport
from headway_core.histogram import LogHistogram


class Phase(Enum):
    """A replica's life as its supervisor (Kubernetes, or `headway up`) sees it."""

    READY = "ready"
    STARTING = "starting"
    """Capacity to come: pending, pulling, loading weights."""
    FAILED = "failing"
    """Crashes, cannot be scheduled, cannot pull: neither blocks a decision nor counts in it."""
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    """One replica. `age` is that of `report`, seconds; both None when it never answered."""

    name: str
    phase: Phase
    report: RuntimeReport | None = None
    age: float | None = None
    note: str = ""
    """What its supervisor says about it, for people: ``CrashLoopBackOff``."""
    marked: bool = False
    """Carries the deletion cost that a scale-down puts on its victims."""

    @property
    def serves(self) -> bool:
        """Ready by its supervisor, and not contradicted by itself."""
        return self.phase is Phase.READY and (self.report is None or self.report.state is ReplicaState.READY)

    def fresh(self, stale_after: float) -> bool:
        """Serves, and said so lately."""
        return self.serves and self.report is not None and self.age is not None and self.age <= stale_after


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """One class over the window, all gateways together: increments, never raw counters."""

    name: str
    offered: int = 0
    retries: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    shed: int = 0
    attained: Mapping[str, int] = field(default_factory=dict)
    judged: Mapping[str, int] = field(default_factory=dict)
    ttft: LogHistogram = field(default_factory=LogHistogram)
    tpot: LogHistogram = field(default_factory=LogHistogram)

    @property
    def attainment(self) -> float | None:
        """Share of offered requests that kept every objective; shed and failed ones are misses, clients' faults not."""
        faults = ("client_error", "client_closed")
        ended = sum(count for outcome, count in self.outcomes.items() if outcome not in faults)
        return self.attained.get("all", 0) / ended if ended else None


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests that arrived, retries apart: `count` in `seconds`."""

    count: int
    seconds: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.count / self.seconds

    @property
    def surely(self) -> float:
        """Requests per second that chance (a Poisson count, two standard deviations) does not explain away."""
        return max(0.0, self.count - 2 * math.sqrt(self.count)) / self.seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the gateways counted lately. `classes` by name over the evaluation window."""

    seconds: float
    classes: Mapping[str, ClassTraffic]
    demand: Demand
    """Over the evaluation window."""
    recent: Demand
    """Over its last quarter: sees a step in load sooner, with more noise."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that `plan` decides from, besides the object and its own memory."""

    replicas: tuple[ObservedReplica, ...] = ()
    scale: int | None = None
    """Replicas asked of the target now; None: not readable, or nothing that scales."""
    rolling: bool = False
    """A rollout is under way: old and new replicas stand side by side."""
    policy: Policy | None = None
    """The policy written last, whoever wrote it."""
    policy_readable: bool = True
    """False: it could not be read, so nothing is written over it and nothing is scaled."""
    endpoints: tuple[Endpoint, ...] = ()
    """Where the pool's replicas are reached, as the policy must say."""
    highest_revision: int = 0
    """The highest revision for the pool that any pod has in force, whoever wrote it; 0: none."""
    unaware: tuple[str, ...] = ()
    """Ready pods, runtimes and gateways, that have not acknowledged `policy`."""
    recommended: Knobs | None = None
    """What was recommended last, where nothing is enforced."""
    recommended_replicas: int | None = None
    traffic: Traffic | None = None
    """None until gateways were read twice."""
    gateways: int = 0
    gateways_reporting: int = 0
    in_flight: Mapping[str, int] | None = None
    """Replica → requests open at all gateways; None unless every gateway answered."""
    saturated: bool = False
    """A gateway's rate rule says that TTFT will break although no queue shows yet."""
    foreign_autoscaler: str | None = None
    """Name of somebody else's autoscaler on the target."""
    missing_scaling_rights: tuple[str, ...] = ()
    """With one of them missing nothing is scaled, since a foreign autoscaler may be unseen."""
    stale_after: float = 15.0

    @property
    def serving(self) -> tuple[ObservedReplica, ...]:
        """Replicas that take requests."""
        return tuple(replica for replica in self.replicas if replica.serves)

    @property
    def fresh(self) -> tuple[ObservedReplica, ...]:
        """Serving replicas whose report is not stale: the only ones that vote."""
        return tuple(replica for replica in self.replicas if replica.fresh(self.stale_after))

    @property
    def trustworthy(self) -> bool:
        """At least half of the serving replicas vote, and there is one."""
        return 0 < len(self.serving) <= 2 * len(self.fresh)
