"""`simulate`: a trace through the real admission and the real schedulers, under a virtual clock.

The gateway side is `headway_core.admission.PoolAdmission`; the replicas are `simulated_replica.SimulatedReplica`, half
a round trip away. Load reports are polled, and ride on responses.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway_core.admission import (
    RULES,
    AdmissionController,
    AdmissionQueue,
    AdmissionResult,
    AdmissionRule,
    Dispatch,
    Fleet,
    PoolAdmission,
    PredictionSample,
    QueueLimits,
    Request,
)
from headway_core.admission.pool_admission import POLL_SECONDS
from headway_core.batching.iteration_plan import EventKind
from headway_core.contract.reports import LoadHint, RuntimeReport
from headway_core.errors import Unschedulable
from headway_core.slo import DEFAULT_CLASS, PriorityClass

from headway_sim.attempt import Attempt
from headway_sim.simulated_replica import ReplicaConfig, SimulatedReplica
from headway_sim.traces import MOONCAKE_BLOCK, TraceRequest


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Everything that a run depends on, beside the trace. Seconds, tokens, fractions."""

    classes: tuple[PriorityClass, ...] = (DEFAULT_CLASS,)
    mix: tuple[float, ...] = (1.0,)
    """Share of the requests in each of `classes`."""
    replicas: int = 1
    replica: ReplicaConfig = ReplicaConfig()
    starts: tuple[float, ...] = ()
    """When further replicas come up."""
    rule: AdmissionRule = RULES["moore"]
    margin: float | None = None
    """Fraction of the target to keep free; None: learned."""
    size_error: float = 0.0
    """Prompt lengths are known at admission to ± this fraction."""
    queue: QueueLimits = QueueLimits()
    poll_interval: float = 0.25
    round_trip: float = 0.002
    affinity: bool = True
    """False: admission is not told which prompts share their heads."""
    retries: int = 0
    """How often a client that is told to comes back, after exactly Retry-After."""
    slowdowns: tuple[tuple[float, float], ...] = ()
    """(instant, factor): from then on every iteration takes `factor` times its modelled length."""
    grace: float = 0.05
    """Seconds allowed to every token's deadline in goodput."""
    drain: float = 60.0
    """Most seconds that the run goes on after the last arrival of the trace; it ends before when all is answered."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.classes or len(self.mix) != len(self.classes) or min(self.mix) < 0 or not sum(self.mix) > 0:
            raise ValueError(f"each class needs a share of the mix, not {self.mix} for {len(self.classes)} classes")
        if self.replicas < 1 or not self.poll_interval > 0 or self.round_trip < 0 or not 0 <= self.size_error < 1:
            raise ValueError(
                "needs a replica, a positive poll interval, no negative round trip, and a size error in [0, 1)"
            )


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """What a simulation leaves behind: every attempt in order of arrival, and what was compared."""

    attempts: tuple[Attempt, ...]
    comparisons: tuple[PredictionSample, ...]
    seconds: float
    """Of the virtual clock."""
    prefilled_tokens: int
    cached_tokens: int
    preemptions: int
    busy: tuple[float, ...]
    """Share of the time in which each replica computed."""


def simulate(
    trace: Sequence[TraceRequest],
    config: SimulationConfig = SimulationConfig(),
    progress: Callable[[float], None] | None = None,
) -> SimulationRun:
    """Runs the trace; equal arguments give equal runs. `progress` gets the share of the requests that have come."""
    return _Simulation(trace, config, progress).run()


class _Simulation:
    def __init__(
        self, trace: Sequence[TraceRequest], config: SimulationConfig, progress: Callable[[float], None] | None
    ) -> None:
        self.config = config
        self._progress = progress
        self._offered = len(trace)
        self._come_so_far = 0
        self.rng = random.Random(config.seed)
        self.admission = PoolAdmission(
            config.classes,
            "gateway",
            controller=AdmissionController(config.rule, margin=config.margin, seed=config.seed),
            queue=AdmissionQueue(config.queue),
            fleet=Fleet("gateway", config.poll_interval),
        )
        self.replicas: dict[str, SimulatedReplica] = {}
        self.attempts: list[Attempt] = []
        self.comparisons: list[PredictionSample] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._ticking = False
        self._slowdown = 1.0
        self._coming = len(trace)
        """Arrivals and repetitions that lie ahead."""
        self._unfinished = 0
        """Attempts that have neither been shed nor ended."""
        self._last_arrival = trace[-1].at
        for start in (*[0.0] * config.replicas, *config.starts):
            self._at(start, self._start_replica)
        for request, quartile in zip(trace, _quartiles(trace), strict=True):
            priority_class = self.rng.choices(config.classes, config.mix)[0]
            self._at(request.at, self._come, request, priority_class, quartile)
        for at, factor in config.slowdowns:
            self._at(at, self._slow_down, factor)

    def run(self) -> SimulationRun:
        end = self._last_arrival + self.config.drain
        now = 0.0
        while self._events and self._events[0][0] <= end and (self._coming or self._unfinished):
            now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments, now)
        replicas = self.replicas.values()
        return SimulationRun(
            attempts=tuple(self.attempts),
            comparisons=tuple(self.comparisons),
            seconds=now,
            prefilled_tokens=sum(replica.prefilled for replica in replicas),
            cached_tokens=sum(replica.cached for replica in replicas),
            preemptions=sum(replica.preemptions for replica in replicas),
            busy=tuple(replica.busy_seconds / now for replica in replicas),
        )

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        """Calls ``act(*arguments, when)`` then; among equal instants what was asked for first comes first."""
        heapq.heappush(self._events, (when, next(self._order), act, arguments))

    # ------------------------------------------------------------ clients and gateway

    def _come(self, request: TraceRequest, priority_class: PriorityClass, quartile: int, now: float) -> None:
        self._come_so_far += 1
        if self._progress is not None:
            self._progress(self._come_so_far / self._offered)
        self._arrive(Attempt(-1, request, priority_class, now, quartile))

    def _arrive(self, attempt: Attempt) -> None:
        now = attempt.arrival
        attempt.number = len(self.attempts)
        self.attempts.append(attempt)
        self._coming -= 1
        self._unfinished += 1
        error = self.config.size_error
        known = max(1, round(attempt.request.prompt_tokens * self.rng.uniform(1 - error, 1 + error)))
        request = Request(
            request_id=attempt.number,
            priority_class=attempt.priority_class,
            arrival=now,
            prompt_tokens=known,
            size_bytes=4 * known,
            retry=attempt.repeated > 0,
            prefix=attempt.request.prefix if self.config.affinity else (),
            prefix_chunk_tokens=MOONCAKE_BLOCK,
        )
        result = self.admission.submit(request, now)
        attempt.predicted = self.admission.predicted(attempt.number)
        self._act(result, now)

    def _act(self, result: AdmissionResult, now: float) -> None:
        for shed in result.shed:
            attempt = self.attempts[shed.request_id]
            self._unfinished -= 1
            attempt.shed, attempt.shed_at, attempt.retry_after = shed.reason, now, shed.retry_after
            if attempt.predicted is None:
                attempt.predicted = shed.prediction.ttft
            if attempt.repeated < self.config.retries:
                self._coming += 1
                self._at(now + shed.retry_after, self._repeat, attempt)
        for dispatch in result.dispatches:
            attempt = self.attempts[dispatch.request.request_id]
            attempt.dispatched_at, attempt.replica_id = now, dispatch.replica_id
            self._at(now + self.config.round_trip / 2, self._submit, attempt, dispatch)
        if len(self.admission.queue) and not self._ticking:
            self._ticking = True
            self._at(now + POLL_SECONDS, self._tick)

    def _repeat(self, told: Attempt, now: float) -> None:
        self._arrive(Attempt(-1, told.request, told.priority_class, now, told.quartile, told.repeated + 1))

    def _tick(self, now: float) -> None:
        self._ticking = False
        self._act(self.admission.poll(now), now)

    def _first_token(self, attempt: Attempt, hint: LoadHint, now: float) -> None:
        self.admission.hint(attempt.replica_id or "", hint, now)
        self.comparisons += self.admission.first_token(attempt.number, now)
        self._act(self.admission.poll(now), now)

    def _ended(self, attempt: Attempt, now: float) -> None:
        self.admission.ended(attempt.number, now)
        self._unfinished -= 1
        self._act(self.admission.poll(now), now)

    # ------------------------------------------------------------ replicas

    def _start_replica(self, now: float) -> None:
        replica = SimulatedReplica(f"replica-{len(self.replicas)}", self.config.replica, self._slowdown)
        self.replicas[replica.name] = replica
        self._report(replica.report(now), now)
        self._at(now + self.config.poll_interval, self._poll, replica)

    def _slow_down(self, factor: float, _now: float) -> None:
        self._slowdown = factor
        for replica in self.replicas.values():
            replica.slowdown = factor

    def _poll(self, replica: SimulatedReplica, now: float) -> None:
        report = replica.report(now)
        self._at(now + self.config.round_trip / 2, self._report, report)
        self._at(now + self.config.poll_interval, self._poll, replica)

    def _report(self, report: RuntimeReport, now: float) -> None:
        self.admission.report(report, now, self.config.round_trip)
        self._act(self.admission.poll(now), now)

    def _submit(self, attempt: Attempt, dispatch: Dispatch, now: float) -> None:
        replica = self.replicas[dispatch.replica_id]
        replica.dispatched[self.admission.fleet.gateway] = dispatch.number
        try:
            replica.submit(attempt.number, attempt.request, attempt.priority_class, dispatch.priority, now)
        except Unschedulable:
            attempt.unschedulable = True
            self._at(now + self.config.round_trip / 2, self._ended, attempt)
            return
        self._begin(replica, now)

    def _begin(self, replica: SimulatedReplica, now: float) -> None:
        ends = replica.begin(now)
        if ends is not None:
            self._at(ends, self._iteration, replica)

    def _iteration(self, replica: SimulatedReplica, now: float) -> None:
        seen = now + self.config.round_trip / 2
        events = replica.end(now)
        for event in events:
            attempt = self.attempts[event.seq_id]
            if event.kind is EventKind.TOKEN:
                attempt.token(seen, self.config.grace)
                if attempt.tokens == 1:
                    self._at(seen, self._first_token, attempt, replica.hint(now))
            elif event.kind is EventKind.FINISHED:
                self._at(seen, self._ended, attempt)
        self._begin(replica, now)


def _quartiles(trace: Sequence[TraceRequest]) -> list[int]:
    order = sorted(range(len(trace)), key=lambda index: (trace[index].prompt_tokens, index))
    quartiles = [0] * len(trace)
    for place, index in enumerate(order):
        quartiles[index] = 4 * place // len(trace)
    return quartiles
