"""One simulated replica: the real scheduler and rates, and iterations as long as a step-time model says."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from headway_core.batching.iteration_plan import Event, ItemResult, IterationPlan, IterationResult
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.scheduler_load import SchedulerLoad
from headway_core.batching.scheduling_policies import SCHEDULING_POLICIES, by_name
from headway_core.batching.sequence import Sequence
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits, LoadHint, ReplicaState, RuntimeReport, StepTimeReport
from headway_core.engine_rates import EngineRates
from headway_core.latency import StepTimeModel
from headway_core.slo import PriorityClass

from headway_sim.traces import MOONCAKE_BLOCK, TraceRequest

ACCELERATOR = StepTimeReport(
    base=0.012,
    per_row=2e-6,
    per_row_above=6e-5,
    per_context_token=4e-8,
    per_prefill_pair=1.3e-9,
    per_sampled_row=5e-6,
    knee=160,
    samples=0,
    max_decode_rows=256,
    max_prefill_tokens=8192,
)
"""The default: computed, not measured, for an 8-billion-parameter model with grouped queries in bf16 on one accelerator
with 2 TB/s of memory bandwidth and 270 TFLOP/s; about 12 ms an iteration and 14,000 prefill tokens a second."""


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What a replica is started with; every replica of a run is the same."""

    max_num_seqs: int = 64
    prefill_token_budget: int = 512
    block_size: int = 16
    num_blocks: int = 16_384
    step_time: StepTimeReport = ACCELERATOR
    scheduling_policy: str = "priority"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            names = ", ".join(SCHEDULING_POLICIES)
            raise ValueError(f"scheduling_policy must be one of {names}, not {self.scheduling_policy!r}")
        if self.block_size < 1 or self.num_blocks < 1 or MOONCAKE_BLOCK % self.block_size:
            raise ValueError(
                f"needs blocks, of a size that divides {MOONCAKE_BLOCK}, not {self.num_blocks} of {self.block_size}"
            )


@dataclass(slots=True)
class _Running:
    plan: IterationPlan
    began: float
    ends: float
    during: SchedulerLoad


@dataclass(slots=True)
class SimulatedReplica:
    """Drives one scheduler. `begin` an iteration, and `end` it at the instant that `begin` returned."""

    name: str
    config: ReplicaConfig
    slowdown: float = 1.0
    """Iterations take so many times longer than the step-time model says."""
    busy_seconds: float = 0.0
    dispatched: dict[str, int] = field(default_factory=dict)
    _seq: int = 0
    _running: _Running | None = None
    _before: tuple[int, int] = (0, 0)
    _model: StepTimeModel = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _rates: EngineRates = field(init=False)

    def __post_init__(self) -> None:
        self._model = StepTimeModel.from_report(self.config.step_time)
        self._scheduler = Scheduler(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            knobs=Knobs(self.config.max_num_seqs, self.config.prefill_token_budget),
            policy=by_name(self.config.scheduling_policy, self._model),
            prefix_caching=self.config.prefix_caching,
        )
        self._rates = EngineRates()

    def submit(
        self, number: int, request: TraceRequest, priority_class: PriorityClass, priority: int, now: float
    ) -> None:
        """Takes a request. Raises Unschedulable when the pool could never hold it."""
        objectives = priority_class.objectives
        self._scheduler.add(
            Sequence(
                seq_id=number,
                priority=priority,
                arrival=now,
                num_prompt=request.prompt_tokens,
                max_tokens=request.output_tokens,
                digests=_digests(request, self.config.block_size),
                tpot_target=objectives.tpot.target if objectives.tpot else None,
                ttft_target=objectives.ttft.limit(request.prompt_tokens) if objectives.ttft else None,
            ),
            now,
        )

    def begin(self, now: float) -> float | None:
        """Starts an iteration if none is under way and there is something to compute; returns when it ends."""
        if self._running is not None:
            return None
        plan = self._scheduler.schedule(now)
        if plan is None:
            return None
        seconds = self._model.predict(plan.shape)
        if seconds is None:
            raise AssertionError("a model made from a report predicts")
        self._running = _Running(plan, now, now + seconds * self.slowdown, self._scheduler.load())
        return self._running.ends

    def end(self, now: float) -> tuple[Event, ...]:
        """Completes the iteration under way."""
        running = self._running
        if running is None:
            raise ValueError("no iteration is under way")
        self._running = None
        seconds = running.ends - running.began
        self.busy_seconds += seconds
        outcomes = tuple(ItemResult(item.seq_id, item.epoch, False) for item in running.plan.items if item.samples)
        events = self._scheduler.complete(IterationResult(running.plan.plan_id, outcomes, seconds), now)
        finished, released = self._scheduler.counters.finished, self._scheduler.released_blocks
        self._rates.observe(
            running.plan,
            running.during,
            seconds=seconds,
            finished=finished - self._before[0],
            released_blocks=released - self._before[1],
            now=now,
        )
        self._before = (finished, released)
        return events

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed so far, recomputed ones apart."""
        return self._scheduler.counters.prefill_tokens

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self._scheduler.counters.prefix_hit_tokens

    @property
    def preemptions(self) -> int:
        """Evictions so far."""
        return self._scheduler.counters.preemptions

    def __len__(self) -> int:
        return len(self._scheduler)

    def report(self, now: float) -> RuntimeReport:
        """The load report of this instant."""
        self._seq += 1
        load, config = self._scheduler.load(), self.config
        return RuntimeReport(
            replica_id=self.name,
            pool="simulated",
            model="simulated",
            boot_id=self.name,
            seq=self._seq,
            at=now,
            state=ReplicaState.READY,
            limits=EngineLimits(
                max_num_seqs=config.max_num_seqs,
                prefill_token_budget=config.prefill_token_budget,
                max_model_len=config.num_blocks * config.block_size,
                block_size=config.block_size,
                total_blocks=config.num_blocks,
            ),
            effective=Knobs(config.max_num_seqs, config.prefill_token_budget),
            running=load.running,
            waiting=load.waiting,
            free_slots=load.free_slots,
            free_blocks=load.free_blocks,
            classes=load.classes,
            prefill_rate=self._rates.prefill(now),
            completion_rate=self._rates.completions(now),
            block_release_rate=self._rates.block_releases(now),
            iteration_seconds=self._rates.iteration_seconds,
            step_time=config.step_time,
            dispatched=dict(self.dispatched),
        )

    def hint(self, now: float) -> LoadHint:
        """The short report that rides on a response."""
        self._seq += 1
        load = self._scheduler.load()
        return LoadHint(
            boot_id=self.name,
            seq=self._seq,
            running=load.running,
            waiting=load.waiting,
            free_slots=load.free_slots,
            free_blocks=load.free_blocks,
            remaining_prefill_tokens={known.priority: known.remaining_prefill_tokens for known in load.classes},
            dispatched=dict(self.dispatched),
            prefill_rate=self._rates.prefill(now),
            completion_rate=self._rates.completions(now),
        )


def _digests(request: TraceRequest, block_size: int) -> list[bytes]:
    """Digests of the prompt's full blocks: equal trace ids at equal places are equal content."""
    full = request.prompt_tokens // block_size
    per_id = MOONCAKE_BLOCK // block_size
    # Ids of a trace name whole prefixes already, so no chaining is needed.
    return [struct.pack("<qq", which, part) for which in request.prefix for part in range(per_id)][:full]
