"""What the engine knows about its own pace: rates, the recent mix of requests, and the snapshot for the server.

Reads the scheduler and listens to finished steps; decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headway_core.batching.iteration_plan import IterationPlan, IterationShape
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.scheduler_load import SchedulerLoad
from headway_core.contract.reports import EngineLimits, Mix
from headway_core.engine_rates import EngineRates
from headway_core.latency import StepTimeModel

from headway_runtime.ipc.messages import EngineLoad

MIX_SECONDS = 60.0
"""The mix's window, as long as an SLO's default one. Until old requests leave it, knobs are wrong for new ones."""
_MAX_FINISHED = 2000


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A sequence that left with at least one token, at `at` seconds."""

    at: float
    prompt: int
    cached: int
    output: int


class EngineStats:
    """Rates and mix of one engine."""

    def __init__(self, scheduler: Scheduler, model: StepTimeModel, limits: EngineLimits) -> None:
        self._scheduler = scheduler
        self._model = model
        self._limits = limits
        self._rates = EngineRates()
        self._finished: deque[FinishedRequest] = deque(maxlen=_MAX_FINISHED)
        self._finished_before = 0
        self._released_before = 0

    def record_finished(self, finished: FinishedRequest) -> None:
        """A sequence is done, by itself or because its reader has all that it wanted."""
        self._finished.append(finished)

    def record_iteration(self, plan: IterationPlan, during: SchedulerLoad, *, began: float, ended: float) -> None:
        """An iteration is complete; `during` is the load while it ran."""
        counters = self._scheduler.counters
        finished = counters.finished + counters.cancelled
        self._rates.observe(
            plan,
            during,
            seconds=ended - began,
            finished=finished - self._finished_before,
            released_blocks=self._scheduler.released_blocks - self._released_before,
            now=ended,
        )
        self._finished_before, self._released_before = finished, self._scheduler.released_blocks

    def mark_idle(self) -> None:
        """The engine is idle: what finished and was released by now does not count for the next iteration."""
        self._finished_before = self._scheduler.counters.finished + self._scheduler.counters.cancelled
        self._released_before = self._scheduler.released_blocks

    def snapshot(self, now: float) -> EngineLoad:
        """Everything, as of now."""
        load, counters = self._scheduler.load(), self._scheduler.counters
        mix = self._mix(now)
        return EngineLoad(
            running=load.running,
            waiting=load.waiting,
            free_slots=load.free_slots,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            knobs=self._scheduler.knobs,
            classes=load.classes,
            prefill_rate=self._rates.prefill(now) or self._expected_prefill_rate(load, mix),
            completion_rate=self._rates.completions(now) or self._expected_completion_rate(mix),
            block_release_rate=self._rates.block_releases(now),
            iteration_seconds=self._rates.iteration_seconds,
            longest_step_seconds=self._longest_step(),
            step_time=self._model.report(),
            mix=mix,
            iterations=counters.iterations,
            prompt_tokens=counters.prefill_tokens + counters.prefix_hit_tokens,
            output_tokens=counters.output_tokens,
            finished=counters.finished,
            cached_prompt_tokens=counters.prefix_hit_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            preemptions={"blocks": counters.preemptions_for_blocks, "slots": counters.preemptions_for_slots},
        )

    def _expected_prefill_rate(self, load: SchedulerLoad, mix: Mix | None) -> float | None:
        """C by the step-time model, where no iteration filled its budget lately: admission needs C then too."""
        budget = self._scheduler.prefill_token_budget
        held = round(load.running * mix.context_tokens) if mix is not None else 0
        shape = IterationShape(budget, budget * budget // 2, load.running, held, load.running + 1)
        seconds = self._model.predict(shape)
        return budget / seconds if seconds else None

    def _expected_completion_rate(self, mix: Mix | None) -> float | None:
        """X = n / W by Little's law with all slots taken by the recent mix, for when they were not all taken lately."""
        if mix is None:
            return None
        rows = self._scheduler.max_num_seqs
        computed = round(rows * (mix.prompt_tokens - mix.cached_tokens) / mix.output_tokens)
        prefill = min(self._scheduler.prefill_token_budget, computed)
        pairs, held = round(prefill * mix.prompt_tokens / 2), round(rows * mix.context_tokens)
        seconds = self._model.predict(IterationShape(prefill, pairs, rows, held, rows))
        return rows / (mix.output_tokens * seconds) if seconds else None

    def _longest_step(self) -> float | None:
        """Seconds of the heaviest iteration allowed: all slots decode, a full pool, a full prefill ending a prompt."""
        rows, budget = self._limits.max_num_seqs, self._limits.prefill_token_budget
        context = self._limits.total_blocks * self._limits.block_size
        pairs = budget * max(budget, self._limits.max_model_len)
        return self._model.predict(IterationShape(budget, pairs, rows, context, rows + 1))

    def _mix(self, now: float) -> Mix | None:
        while self._finished and self._finished[0].at < now - MIX_SECONDS:
            self._finished.popleft()
        count = len(self._finished)
        if not count:
            return None
        steps = sum(one.output for one in self._finished)
        held = sum(one.output * (one.prompt + (one.output + 1) / 2) for one in self._finished)
        return Mix(
            requests=count,
            prompt_tokens=sum(one.prompt for one in self._finished) / count,
            cached_tokens=sum(one.cached for one in self._finished) / count,
            output_tokens=steps / count,
            context_tokens=held / steps,
        )
