"""The load reports: what gateway and runtime say on their control ports, and in short on every response."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headway_core.contract.policy import Knobs


class ReplicaState(Enum):
    """A replica's life as others see it. Only READY gets new requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the replica was started with; knobs never exceed it."""

    max_num_seqs: int
    prefill_token_budget: int
    max_model_len: int
    block_size: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The policy in force: the revision read last, what the knobs became, and what clamped them (knob → reason)."""

    revision: int
    slo_uid: str
    effective: Knobs
    clamped_by: dict[str, str] = field(default_factory=dict)
    age: float = 0.0
    error: str | None = None
    """The last read failed with this; the values before it stay in force."""


@dataclass(frozen=True, slots=True)
class StepTimeReport:
    """Coefficients of `headway_core.latency`, seconds per unit, with how far they can be trusted.

    t = base + per_row·min(m, knee) + per_row_above·max(0, m - knee) + per_context_token·c + per_prefill_pair·q +
    per_sampled_row·r for m = prefill tokens + decode rows, c context tokens, q prefill pairs, r sampled rows.
    """

    base: float
    per_row: float
    per_row_above: float
    per_context_token: float
    per_prefill_pair: float
    per_sampled_row: float
    knee: int
    samples: int
    """Iterations seen since boot, the calibration apart."""
    max_decode_rows: int
    max_prefill_tokens: int
    relative_error: float | None = None
    """Median |predicted - actual| / actual, one iteration ahead."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over the requests that finished in the recent window: tokens."""

    requests: int
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    context_tokens: float
    """Mean context held by a decoding sequence, averaged over its iterations."""


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What one priority has in the replica, waiting or running."""

    priority: int
    waiting: int
    running: int
    remaining_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """`GET /load` of a runtime's control port."""

    replica_id: str
    pool: str
    model: str
    boot_id: str
    seq: int
    """Grows by one with each report of this boot."""
    at: float
    """Wall clock of the replica, epoch seconds: for people. Age is counted from receipt."""
    state: ReplicaState
    limits: EngineLimits
    effective: Knobs
    """The knobs in force now, whatever set them."""
    policy: Acknowledgement | None = None
    cordoned: bool = False
    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    free_blocks: int = 0
    """Free plus evictable (cached, unreferenced)."""
    classes: tuple[ClassLoad, ...] = ()
    prefill_rate: float | None = None
    """C: prefill tokens per second with decoders running, from measured iterations."""
    completion_rate: float | None = None
    """X: requests finished per second while the slots were busy; n / W of Little's law."""
    block_release_rate: float | None = None
    iteration_seconds: float | None = None
    """Smoothed length of an iteration now."""
    step_time: StepTimeReport | None = None
    mix: Mix | None = None
    dispatched: dict[str, int] = field(default_factory=dict)
    """Gateway boot id → highest dispatch number seen."""
    emulated_pace: str | None = None
    """Set when this is an emulated accelerator (--pace): its coefficients as given."""
    kv_bytes_per_token: int | None = None
    iterations: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    message: str | None = None
    """Why the replica is not ready, for people."""


@dataclass(frozen=True, slots=True)
class LoadHint:
    """The part of a `RuntimeReport` that changes between polls, small enough for a response header."""

    boot_id: str
    seq: int
    running: int
    waiting: int
    free_slots: int
    free_blocks: int
    remaining_prefill_tokens: dict[int, int]
    """priority → tokens."""
    dispatched: dict[str, int]
    prefill_rate: float | None = None
    completion_rate: float | None = None


@dataclass(frozen=True, slots=True)
class ClassReport:
    """One class's counters since the gateway's boot. An offered request is in one of `outcomes`, or in flight."""

    offered: int = 0
    retries: int = 0
    """Offered requests that an SDK marked as retries; demand = offered - retries."""
    admitted: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    shed: dict[str, int] = field(default_factory=dict)
    attained: dict[str, int] = field(default_factory=dict)
    """objective (ttft, tpot, all) → requests that kept it, over admitted and finished."""
    judged: dict[str, int] = field(default_factory=dict)
    """objective → requests that were judged; attainment over all offered counts shed and failed ones as misses."""
    ttft: dict[int, int] = field(default_factory=dict)
    """Buckets of `headway_core.histogram`."""
    tpot: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    queued: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One pool as its gateway sees it."""

    pool: str
    classes: dict[str, ClassReport]
    policy: Acknowledgement | None = None
    ready_replicas: int = 0
    known_replicas: int = 0
    saturated: bool = False
    """The rate rule λ·s̄ > C·ρ_max holds: TTFT will break although no queue is visible yet."""
    replica_in_flight: dict[str, int] = field(default_factory=dict)
    """Replica id → requests this gateway has open on it: a cordoned replica is idle when all gateways say 0."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """`GET /load` of a gateway's control port."""

    gateway: str
    boot_id: str
    seq: int
    at: float
    state: ReplicaState
    pools: tuple[PoolReport, ...] = ()
