"""The smallest model of admission: one prefill server, first come first served, and the real rules before it.

It can be compared with the exact optimum (`optimum.most_on_time`): a request is on time when its work, prompt tokens /
C, ends within the target of its arrival. Requests wait in the gateway's queue; the server takes one at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headway_core.admission.admission_queue import AdmissionQueue, QueueLimits
from headway_core.admission.controller import AdmissionController
from headway_core.admission.pool_load import PoolLoad, ReplicaLoad
from headway_core.admission.request import Admit, Request, Shed
from headway_core.admission.rules import AdmissionRule, Moore
from headway_core.slo import Objectives, PriorityClass, TtftObjective

from headway_sim.traces import TraceRequest

TARGET_OVER_WORK = 10.0
"""The target is so many times the mean work."""
_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class FifoConfig:
    """One run. `load` is ρ: arriving work per second of the server, by which C is set."""

    load: float
    rule: AdmissionRule = Moore()
    target: float | None = None
    """Seconds that each request may take to the end of its work; None: `TARGET_OVER_WORK` times the mean work."""
    size_error: float = 0.0
    """Prompt lengths are known to ± this fraction, uniformly."""
    margin: float | None = 0.0
    """Fraction of the target to keep free; None: learned."""
    slowdown: float = 1.0
    """From the middle of the trace on, work takes so many times longer, and C is learned again from what is seen."""
    seed: int = 0


@dataclass(slots=True)
class FifoResult:
    """What happened: indices into the trace."""

    offered: int
    on_time: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    shed_on_arrival: int = 0
    displaced: int = 0
    """Of those that had waited."""
    refused_at_recheck: int = 0
    """Of those displaced: when checked again before their start, for arrivals that were expected."""
    waited_in_vain: float = 0.0
    """Mean wait of those displaced, as a share of the target."""
    errors: list[float] = field(default_factory=list)
    """predicted - actual seconds of those served."""

    @property
    def attainment(self) -> float:
        """On time over all offered."""
        return len(self.on_time) / self.offered

    def by_quartile(self, trace: Sequence[TraceRequest]) -> tuple[float, ...]:
        """Attainment of each quarter of the requests by prompt length, the shortest first."""
        order = sorted(range(len(trace)), key=lambda index: (trace[index].prompt_tokens, index))
        bounds = [len(order) * quarter // 4 for quarter in range(5)]
        return tuple(
            sum(index in self.on_time for index in order[low:high]) / max(1, high - low)
            for low, high in pairwise(bounds)
        )


def works(trace: Sequence[TraceRequest], load: float) -> tuple[list[float], float]:
    """Seconds of work of each request at this load, and the usual target."""
    span = trace[-1].at - trace[0].at
    tokens = sum(request.prompt_tokens for request in trace)
    rate = tokens / (load * span)
    return [request.prompt_tokens / rate for request in trace], TARGET_OVER_WORK * tokens / len(trace) / rate


def run(trace: Sequence[TraceRequest], config: FifoConfig) -> FifoResult:
    """Runs the trace through admission and the server."""
    return _Fifo(trace, config).run()


class _Fifo:
    def __init__(self, trace: Sequence[TraceRequest], config: FifoConfig) -> None:
        self.trace = trace
        self.config = config
        self.works, usual = works(trace, config.load)
        self.target = config.target if config.target is not None else usual
        self.rate = trace[0].prompt_tokens / self.works[0]
        self.classes = (PriorityClass("default", 0, Objectives(ttft=TtftObjective(self.target))),)
        self.controller = AdmissionController(config.rule, margin=config.margin, seed=config.seed)
        self.queue = AdmissionQueue(QueueLimits(_MANY, _MANY, float(_MANY)))
        self.result = FifoResult(len(trace))
        self.free_at = 0.0
        self.expected_free = 0.0
        self.predicted: dict[int, float] = {}

    def run(self) -> FifoResult:
        rng = random.Random(self.config.seed)
        spread = self.config.size_error
        for index, entry in enumerate(self.trace):
            self._serve_until(entry.at)
            known = max(1, round(entry.prompt_tokens * rng.uniform(1 - spread, 1 + spread)))
            self._arrive(Request(index, self.classes[0], entry.at, known), entry.at)
        self._serve_until(float("inf"))
        if self.result.displaced:
            self.result.waited_in_vain /= self.result.displaced * self.target
        return self.result

    def _serve_until(self, now: float) -> None:
        while len(self.queue) and self.free_at < now:
            request = self.queue.next(self.free_at)
            if request is None:
                raise AssertionError("a queue that is not empty has a next")
            at = max(self.free_at, request.arrival)
            refused = self.controller.recheck(
                request, PoolLoad((self._server(at),), self.queue.order()), self.classes, at
            )
            self.queue.leave(request.request_id)
            if refused is None:
                self._start(request, at)
            else:
                self.result.refused_at_recheck += 1
                self._shed_waiting(request, at)

    def _arrive(self, request: Request, now: float) -> None:
        self.controller.offered(request, now)
        load = PoolLoad((self._server(now),), self.queue.order())
        decision = self.controller.decide(request, load, self.classes, now)
        if isinstance(decision, Shed):
            self.result.shed_on_arrival += 1
            return
        for shed in decision.displaced:
            displaced = self.queue.leave(shed.request_id)
            if displaced is not None:
                self._shed_waiting(displaced, now)
        if decision.prediction.ttft is not None:
            self.predicted[request.request_id] = decision.prediction.ttft
        if isinstance(decision, Admit):
            self._start(request, now)
        else:
            self.queue.push(request)

    def _shed_waiting(self, request: Request, now: float) -> None:
        self.result.displaced += 1
        self.result.waited_in_vain += now - request.arrival

    def _server(self, now: float) -> ReplicaLoad:
        """The server as admission knows it: what it works on has so much left as its known length says."""
        left = max(0.0, self.expected_free - now) * self.rate
        if self.free_at > now:
            left = max(left, 1e-6)
        return ReplicaLoad(
            replica_id="server",
            backlog={0: left},
            waiting={},
            running={0: 1} if self.free_at > now else {},
            free_slots=_MANY,
            free_blocks=_MANY,
            block_size=1,
            budget=0,
            prefill_rate=self.rate,
            completion_rate=None,
            block_release_rate=None,
            iteration=None,
        )

    def _start(self, request: Request, now: float) -> None:
        self.controller.admitted(request, now)
        index = request.request_id
        work = self.works[index] * (self.config.slowdown if index >= len(self.trace) // 2 else 1.0)
        self.free_at = now + work
        self.expected_free = now + request.prompt_tokens / self.rate
        if self.config.slowdown != 1.0:
            # As a runtime does: a smoothed measurement.
            self.rate = 1 / (0.8 / self.rate + 0.2 * work / self.trace[index].prompt_tokens)
        ttft = self.free_at - request.arrival
        (self.result.on_time if ttft <= self.target + 1e-9 else self.result.late).add(index)
        predicted = self.predicted.pop(index, None)
        if predicted is not None:
            self.result.errors.append(predicted - ttft)
            self.controller.compare(0, predicted, ttft)
