"""What happened to one offered request; a client's repetition is another one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from headway_core.contract.header_names import ShedReason
from headway_core.histogram import LogHistogram, bucket
from headway_core.slo import PriorityClass

from headway_sim.traces import TraceRequest


@dataclass(slots=True)
class Attempt:
    """One offered request, from arrival to its end. Instants in seconds of the virtual clock, at the client."""

    number: int
    request: TraceRequest
    priority_class: PriorityClass
    arrival: float
    quartile: int
    """By prompt length within the trace: 0 the shortest."""
    repeated: int = 0
    """How often its client had been told "not now" before."""
    predicted: float | None = None
    """TTFT predicted at arrival, seconds, also when it was shed."""
    replica_id: str | None = None
    dispatched_at: float | None = None
    shed: ShedReason | None = None
    shed_at: float | None = None
    retry_after: int | None = None
    unschedulable: bool = False
    first_token_at: float | None = None
    last_token_at: float | None = None
    tokens: int = 0
    tokens_in_time: bool = True
    """Each token so far came by arrival + TTFT + i·TPOT + grace."""
    gaps: LogHistogram = field(default_factory=LogHistogram)
    due: float = field(init=False)
    """When its next token has to be there, grace apart; infinite when its class has no TTFT objective."""
    pace: float = field(init=False)
    """Seconds by which `due` moves on with each token."""

    def __post_init__(self) -> None:
        ttft, tpot = self.priority_class.objectives.ttft, self.priority_class.objectives.tpot
        self.due = math.inf if ttft is None else self.arrival + ttft.limit(self.request.prompt_tokens)
        self.pace = math.inf if tpot is None else tpot.target

    @property
    def admitted(self) -> bool:
        """It was sent to a replica."""
        return self.dispatched_at is not None

    @property
    def finished(self) -> bool:
        """Its answer is complete."""
        return self.tokens == self.request.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def tpot(self) -> float | None:
        """(last - first token) / (n - 1) of a finished answer of at least two tokens."""
        if self.first_token_at is None or self.last_token_at is None or self.tokens < 2 or not self.finished:
            return None
        return (self.last_token_at - self.first_token_at) / (self.tokens - 1)

    @property
    def ttft_kept(self) -> bool:
        """Its first token came, and in time."""
        ttft, objective = self.ttft, self.priority_class.objectives.ttft
        return ttft is not None and (objective is None or ttft <= objective.limit(self.request.prompt_tokens) + 1e-9)

    @property
    def tpot_kept(self) -> bool | None:
        """Its tokens met the TPOT target; None without a target, or when the answer is one token."""
        objective = self.priority_class.objectives.tpot
        if objective is None or self.request.output_tokens < 2:
            return None
        return self.tpot is not None and self.tpot <= objective.target + 1e-9

    @property
    def good(self) -> bool:
        """Every token came, and in time: what goodput counts."""
        return self.finished and self.tokens_in_time

    def token(self, now: float, grace: float) -> None:
        """A token reached the client."""
        if now > self.due + grace:
            self.tokens_in_time = False
        if self.last_token_at is None:
            self.first_token_at = now
            if self.due == math.inf:  # no target for the first: the others are counted from it
                self.due = now
        else:
            index = _bucket(now - self.last_token_at)
            self.gaps.counts[index] = self.gaps.counts.get(index, 0) + 1
        self.last_token_at = now
        self.due += self.pace
        self.tokens += 1


# Sequences that decode together share their gaps.
_bucket = functools.lru_cache(maxsize=1024)(bucket)
