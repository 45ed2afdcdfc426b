"""A ServingSLO's values: objectives, priority classes, bounds. `slo_parser` reads them from a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

API_VERSION = "headway.dev/v1alpha1"
KIND = "ServingSLO"


@dataclass(frozen=True, slots=True)
class TtftObjective:
    """Time to first token. `target` and `per_thousand_prompt_tokens` in seconds; `percentile` in (0, 100)."""

    target: float
    percentile: float = 95.0
    per_thousand_prompt_tokens: float = 0.0

    def limit(self, prompt_tokens: int) -> float:
        """Seconds that a request with this many prompt tokens may take to its first token."""
        return self.target + self.per_thousand_prompt_tokens * prompt_tokens / 1000


@dataclass(frozen=True, slots=True)
class TpotObjective:
    """Time per output token after the first, seconds: (last - first token) / (n - 1)."""

    target: float
    percentile: float = 95.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is promised to one class; at least one of the two."""

    ttft: TtftObjective | None = None
    tpot: TpotObjective | None = None

    def __post_init__(self) -> None:
        if self.ttft is None and self.tpot is None:
            raise ValueError("an SLO needs at least one objective: ttft, tpot, or both")


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """One class of requests. A higher `priority` goes first; `shares` are its guaranteed part under contention."""

    name: str
    priority: int
    objectives: Objectives
    shares: int = 1
    service_tiers: tuple[str, ...] = ()
    max_queue_time: float | None = None


DEFAULT_CLASS = PriorityClass("default", 0, Objectives(TtftObjective(2.0), TpotObjective(0.1)))
"""Where no ServingSLO names classes: first token within 2 s, 100 ms for each further token, for 95% of the requests."""


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds; None leaves that side open."""

    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min must be <= max, not {self.min} > {self.max}")

    def clip(self, value: int) -> int:
        """`value`, brought inside the bounds."""
        if self.min is not None:
            value = max(self.min, value)
        return value if self.max is None else min(self.max, value)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the operator may set. `replicas` None: replicas are not managed at all (there is no default)."""

    replicas: Range | None = None
    max_num_seqs: Range = Range(min=1)
    prefill_token_budget: Range = Range(min=1)


class Mode(Enum):
    """Observe only measures; Recommend also publishes what it would set; Enforce sets it."""

    OBSERVE = "Observe"
    RECOMMEND = "Recommend"
    ENFORCE = "Enforce"


@dataclass(frozen=True, slots=True)
class ServingSLO:
    """The resource, typed. Names of the things it points at; durations in seconds."""

    name: str
    namespace: str
    uid: str
    generation: int
    mode: Mode
    target_name: str
    service_name: str
    service_port: int
    gateway_name: str | None
    objectives: Objectives
    classes: tuple[PriorityClass, ...]
    default_class: str
    bounds: Bounds
    window: float = 60.0
    min_samples: int = 20
    scale_up_stabilization: float = 0.0
    scale_down_stabilization: float = 300.0
    annotations: Mapping[str, str] = field(default_factory=dict)
