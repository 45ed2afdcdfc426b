"""A request as admission sees it, and what may be decided about it. Data only: deciding happens in `controller`."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from headway_core.contract.header_names import ShedReason
from headway_core.slo import PriorityClass


@dataclass(frozen=True, slots=True)
class Request:
    """One request, with the objectives in force when it arrived.

    `request_id` is the gateway's own number, never a client's string. `arrival` is in seconds of the gateway's clock.
    """

    request_id: int
    priority_class: PriorityClass
    arrival: float
    prompt_tokens: int
    """Exact, or the estimate of `token_estimator.TokenEstimator`."""
    size_bytes: int = 0
    """What it occupies while it waits."""
    retry: bool = False
    """An SDK marked it as a repetition: it is no new demand, and counts as shorter (`rules.moore.RETURN_WEIGHT`)."""
    cached_tokens: int = 0
    """Prompt tokens that some replica probably holds (`prefixes.PrefixIndex`); fewer than `prompt_tokens`."""
    prefix: tuple[Hashable, ...] = ()
    """Chained digests of the prompt's head (`prefixes.prefix_chain`), shortest first."""
    prefix_chunk_tokens: float = 0.0
    """Tokens that one element of `prefix` stands for."""
    target: float | None = field(init=False)
    """Seconds from arrival that its first token may take; None when its class has no TTFT objective."""
    deadline: float = field(init=False)
    """Instant by which the first token has to come; infinite without a TTFT objective."""
    priority: int = field(init=False)
    """The priority of its class: higher goes first."""
    uncached_tokens: int = field(init=False)
    """Tokens that still have to be computed, at least 1."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.size_bytes < 0 or not math.isfinite(self.arrival):
            raise ValueError(f"a request has at least one token, no negative size and a finite arrival, not {self}")
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            rule = f"cached tokens lie in [0, {self.prompt_tokens}): the last one is always computed"
            raise ValueError(f"{rule}, not {self.cached_tokens}")
        ttft = self.priority_class.objectives.ttft
        target = None if ttft is None else ttft.limit(self.prompt_tokens)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "deadline", math.inf if target is None else self.arrival + target)
        object.__setattr__(self, "priority", self.priority_class.priority)
        object.__setattr__(self, "uncached_tokens", self.prompt_tokens - self.cached_tokens)


class Prediction(NamedTuple):
    """The waits of a newcomer, seconds, each None when what it depends on is unknown; see `prediction.predict`."""

    prefill_wait: float | None
    slot_wait: float | None
    block_wait: float | None
    own: float | None
    """Its own uncached tokens / C."""
    iteration: float
    """One iteration; 0 when no iteration was measured yet, because then nothing runs."""

    @property
    def wait(self) -> float | None:
        """The longest of the waits; None as soon as one is unknown."""
        if self.prefill_wait is None or self.slot_wait is None or self.block_wait is None:
            return None
        return max(self.prefill_wait, self.slot_wait, self.block_wait)

    @property
    def ttft(self) -> float | None:
        """Seconds from now to the first token."""
        prefill, slot, block, own, iteration = self
        if prefill is None or slot is None or block is None or own is None:
            return None
        return max(prefill, slot, block) + own + iteration

    @property
    def at_least(self) -> float:
        """Seconds to the first token as far as they are known: the true figure is this or more."""
        wait = max(self.prefill_wait or 0.0, self.slot_wait or 0.0, self.block_wait or 0.0)
        return wait + (self.own or 0.0) + self.iteration

    @property
    def binding(self) -> ShedReason:
        """Which wait is the longest: the reason to give when it is too long."""
        waits = (
            (self.prefill_wait or 0.0, ShedReason.PREFILL_WAIT),
            (self.slot_wait or 0.0, ShedReason.SLOT_WAIT),
            (self.block_wait or 0.0, ShedReason.BLOCK_WAIT),
        )
        return max(waits, key=lambda pair: pair[0])[1]


UNKNOWN = Prediction(None, None, None, None, 0.0)
"""Nothing is known: not zero, and not a reason to shed."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Send it to `replica_id` now."""

    replica_id: str
    prediction: Prediction
    displaced: tuple[Shed, ...] = ()
    """Waiting requests that are shed, so that the others meet their targets."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Keep it in the queue, at most until the instant `expiry`; then ask again."""

    expiry: float
    prediction: Prediction
    displaced: tuple[Shed, ...] = ()


@dataclass(frozen=True, slots=True)
class Shed:
    """Answer "not now": 429 (503 when nothing can serve at all) with `retry_after` whole seconds."""

    request_id: int
    reason: ShedReason
    retry_after: int
    prediction: Prediction = UNKNOWN

    @property
    def contended(self) -> bool:
        """Capacity exists but is taken: 429. Otherwise nothing can serve now: 503."""
        return self.reason not in (ShedReason.NO_REPLICA, ShedReason.DRAINING)


Decision = Admit | Wait | Shed
