"""What gateway, runtime and operator must spell alike: ports, paths, headers, labels, metric names, and the three
documents.

* `Policy` goes down: the operator (or `headway up`) writes it as a file, gateway and runtime read it.
* `RuntimeReport` and `GatewayReport` come up: polled from the control port (`GET /load`); a runtime's report also
  rides, in short, on every response as the header `LOAD`.

Absent is unknown: a reader must never take None for zero. Counters in reports only grow until `boot_id` changes;
readers difference them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headway_core import wire
from headway_core.errors import DocumentError
from headway_core.slo import PriorityClass

# ---------------------------------------------------------------- ports and paths

SERVING_PORT = 8000
"""Requests: the OpenAI-compatible endpoint of gateway and runtime."""
CONTROL_PORT = 8001
"""Load report, policy, metrics, health: never exposed to clients."""

PATH_LOAD = "/load"
PATH_POLICY = "/policy"
PATH_METRICS = "/metrics"
PATH_HEALTH = "/health"
PATH_READY = "/ready"

MAX_BODY_BYTES = 16 * 2**20
"""Largest request body, unless a flag says otherwise: one number, so that the gateway is the one that refuses."""
MAX_CHOICES = 128
"""Answers to one request, over all its prompts."""

# ---------------------------------------------------------------- headers (lower case, as ASGI has them)

SHED_REASON = "x-headway-shed-reason"
"""On 429 and 503 from the gateway: one of `ShedReason`."""
REQUEST_ID = "x-request-id"
"""For tracing only; never a key."""
PRIORITY = "x-headway-priority"
"""Gateway to runtime: the class's priority, a whole number; the runtime serves higher ones first."""
CLASS = "x-headway-class"
"""Client to gateway, honoured only with --trust-class-header: the name of a class. Gateway to runtime: the class for
its metrics."""
TENANT = "x-headway-tenant"
"""Gateway to runtime: salt of the prefix cache, so that nobody learns by timing what others asked."""
DISPATCH = "x-headway-dispatch"
"""Gateway to runtime: ``<gateway boot id>:<number>``; numbers grow by one per replica, and the load report says the
highest seen."""
WANT_USAGE = "x-headway-want-usage"
"""Gateway to runtime: ask for the SSE comment `USAGE_COMMENT` at the end of a stream."""
USAGE_COMMENT = ": headway "
"""Head of the SSE comment line that carries ``{"prompt": p, "cached": c, "completion": n}``; the gateway takes it out
of the stream."""
PROMPT_TOKENS = "x-headway-prompt-tokens"
"""Runtime to gateway: the exact prompt length, from which the gateway learns its bytes-per-token estimate."""
CACHED_TOKENS = "x-headway-cached-tokens"
"""Runtime to gateway: prompt tokens that came from the prefix cache."""
LOAD = "x-headway-load"
"""Runtime to gateway, on every response: a `LoadHint` as compact JSON."""

INTERNAL_HEADERS = frozenset({PRIORITY, CLASS, TENANT, DISPATCH, WANT_USAGE, PROMPT_TOKENS, CACHED_TOKENS, LOAD})
"""Stripped at the gateway's edge, both from what clients send and from what they get."""


class ShedReason(Enum):
    """Why a request was not served; the values of the header `SHED_REASON` and of the metric label `reason`."""

    PREFILL_WAIT = "prefill_wait"
    SLOT_WAIT = "slot_wait"
    BLOCK_WAIT = "block_wait"
    OUTRANKED = "outranked"
    """Given up from the queue so that others, waiting or expected, keep their promise (Moore's rule)."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIME = "queue_time"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"


# ---------------------------------------------------------------- Kubernetes names

GROUP = "headway.dev"
VERSION = "v1alpha1"
PLURAL = "servingslos"
LABEL_RUNTIME = "headway.dev/runtime"
"""On runtime pods: the name of their pool (the target Deployment)."""
LABEL_GATEWAY = "headway.dev/gateway"
"""On gateway pods: the name of the gateway's Service."""
ANNOTATION_PAUSED = "headway.dev/paused"
"""On a ServingSLO, "true": nothing is applied."""
ANNOTATION_OPERATOR = "headway.dev/operator"
"""On a gateway's Service: ``namespace/name`` of the lease of the operator that manages what is behind it; any other
leaves that alone."""
ANNOTATION_POLICY_TOUCH = "headway.dev/policy-revision"
"""On pods: the revision that the operator last wrote. Changing it makes the kubelet refresh mounted ConfigMaps at
once."""
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIELD_MANAGER_PREFIX = "headway/"


def policy_config_map(gateway: str) -> str:
    """The ConfigMap that carries the policies of everything behind one gateway Service; one key ``<slo>.json`` for each
    ServingSLO."""
    return f"{gateway}-policy"


# ---------------------------------------------------------------- metric names (Prometheus adds _total to counters)


class Metric:
    """Names and label sets, all closed: no label ever takes a value from a client."""

    REQUESTS = "headway_requests"  # gateway; pool, class, outcome
    OFFERED = "headway_offered_requests"  # gateway; pool, class
    RETRIES = "headway_client_retries"  # gateway; pool, class: offered requests that a client SDK marked as retries
    PROMISE_GOOD = "headway_promise_good"  # gateway; pool, class, objective
    PROMISE_TOTAL = "headway_promise"  # gateway; pool, class, objective
    SHED = "headway_shed_requests"  # gateway; pool, class, reason
    TTFT = "headway_ttft_seconds"  # gateway, arrival to first content; pool, class
    TPOT = "headway_tpot_seconds"  # gateway, per request; pool, class
    ITL = "headway_itl_seconds"  # gateway, per gap; pool, class
    TTFT_ERROR = "headway_ttft_prediction_error_seconds"  # gateway, predicted - actual; pool, decision
    QUEUE_DEPTH = "headway_queue_depth"  # gateway; pool, class
    IN_FLIGHT = "headway_in_flight_requests"  # gateway; pool
    POLICY_REVISION = "headway_policy_revision"  # both; pool
    POLICY_AGE = "headway_policy_age_seconds"  # both; since the last good read
    ENGINE_TTFT = "headway_engine_ttft_seconds"  # runtime, arrival at the runtime to first token; class
    ENGINE_ITL = "headway_engine_itl_seconds"  # runtime; class
    STEP_SECONDS = "headway_engine_step_seconds"  # runtime
    STEP_ERROR = (
        "headway_engine_step_prediction_relative_error"  # runtime: |predicted - actual| / actual, one step ahead
    )
    PREEMPTIONS = "headway_engine_preemptions"  # runtime; kind, cause
    RUNNING = "headway_engine_running_sequences"  # runtime
    WAITING = "headway_engine_waiting_sequences"  # runtime
    BLOCKS = "headway_engine_kv_blocks"  # runtime; state = free | cached | used
    PROMPT_TOKENS = "headway_engine_prompt_tokens"  # runtime; source = computed | cached | recomputed
    OUTPUT_TOKENS = "headway_engine_output_tokens"  # runtime
    EMULATED = "headway_engine_emulated_accelerator"  # runtime: 1 when --pace shapes the iterations


OUTCOMES = ("ok", "shed", "client_closed", "client_error", "upstream_error", "timeout")
"""The closed set of `Metric.REQUESTS`' label `outcome`: every offered request ends in exactly one."""

# ---------------------------------------------------------------- policy


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one replica, or the headless Service in front of all, listens. `host` may be a DNS name with many
    addresses."""

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
        for name, value in (
            ("maxNumSeqs", self.max_num_seqs),
            ("prefillTokenBudget", self.prefill_token_budget),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


MAX_REVISION = 2**31 - 1
"""Revisions count changes: one a second for 68 years. Beyond it is a mistake, and would shut out every policy that
comes after."""


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

    def class_named(self, name: str) -> PriorityClass:
        """The class of that name. Raises KeyError."""
        for known in self.classes:
            if known.name == name:
                return known
        raise KeyError(name)


# ---------------------------------------------------------------- reports


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
    """Median |predicted - actual| / actual, one step ahead."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over the requests that finished in the recent window: tokens."""

    requests: int
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    context_tokens: float
    """Mean context held by a decoding sequence, averaged over its steps."""


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

    replica: str
    pool: str
    model: str
    boot_id: str
    seq: int
    """Grows by one with each report of this boot."""
    at: float
    """Wall clock of the replica, epoch seconds: for people. Age is counted from receipt."""
    state: ReplicaState
    capacity: EngineLimits
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
    """One class's counters since the gateway's boot. Every offered request is in exactly one of `outcomes`, or still in
    flight."""

    offered: int = 0
    retries: int = 0
    """Offered requests that an SDK marked as retries; demand = offered - retries."""
    admitted: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    shed: dict[str, int] = field(default_factory=dict)
    good: dict[str, int] = field(default_factory=dict)
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


# ---------------------------------------------------------------- reading and writing


def dump(document: Policy | RuntimeReport | GatewayReport | LoadHint) -> str:
    """The document as one line of JSON, members in a fixed order: equal documents are equal bytes."""
    return json.dumps(wire.encode(document), separators=(",", ":"), ensure_ascii=True)


def load_policy(text: str | bytes) -> Policy:
    """Raises DocumentError, naming the member, for anything that is not a policy."""
    return wire.decode(Policy, _json(text))


def load_runtime_report(text: str | bytes) -> RuntimeReport:
    """Raises DocumentError, naming the member, for anything that is not a runtime's load report."""
    return wire.decode(RuntimeReport, _json(text))


def load_gateway_report(text: str | bytes) -> GatewayReport:
    """Raises DocumentError, naming the member, for anything that is not a gateway's load report."""
    return wire.decode(GatewayReport, _json(text))


def load_hint(text: str | bytes) -> LoadHint:
    """Raises DocumentError, naming the member, for anything that is not a load hint."""
    return wire.decode(LoadHint, _json(text))


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"is not JSON: {error}") from error


def tenant_salt(tenant: str | None) -> bytes:
    """The salt of a tenant's prefix digests: 16 bytes, equal for equal tenants, from blake2b and never from
    ``hash()``."""
    return hashlib.blake2b((tenant or "").encode(), digest_size=16).digest()


def class_priorities(classes: tuple[PriorityClass, ...]) -> Mapping[str, int]:
    """Class name → priority."""
    return {known.name: known.priority for known in classes}
