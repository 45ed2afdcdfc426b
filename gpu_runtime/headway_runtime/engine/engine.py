"""The engine: one `step` is schedule, execute, account. It knows token ids and counts; no text, no sockets.

Decisions are `headway_core.batching`'s, tensors `ModelRunner`'s; here are token histories, end tokens and knobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from headway_core.batching.digests import extend_digests, prefix_digests
from headway_core.batching.iteration_plan import (
    EventKind,
    ItemResult,
    IterationPlan,
    IterationResult,
    IterationShape,
    PlanItem,
)
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.scheduler_load import SchedulerLoad
from headway_core.batching.sequence import Sequence
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits
from headway_core.errors import RequestError, Unschedulable

from headway_runtime.engine.engine_stats import FinishedRequest
from headway_runtime.ipc.messages import AddSequence, Commands, Ended, EndReason, TokenIds, TokenLogprobs, TokenOut
from headway_runtime.model.model_runner import ModelRunner
from headway_runtime.model.sampler import Sampled


class StepTimePredictor(Protocol):
    """What predicts and learns the length of iterations (`headway_core.latency.StepTimeModel`)."""

    def predict(self, shape: IterationShape) -> float | None:
        """Seconds; None while nothing is known."""

    def observe(self, shape: IterationShape, seconds: float) -> None:
        """An iteration of this shape took so long."""


@dataclass(slots=True)
class LiveSequence:
    """A sequence as the engine holds it: its scheduler's record, all its tokens, and when it ends."""

    seq: Sequence
    request: AddSequence
    tokens: TokenIds
    """Prompt and output; the first `length` entries are known."""
    length: int
    end_ids: frozenset[int]
    bound_epoch: int | None = None
    """The epoch for which its slot was bound; None before the first."""

    def append(self, token: int) -> None:
        """One more token."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length // 2), dtype=np.int32)])
        self.tokens[self.length] = token
        self.length += 1

    def finished_request(self, now: float) -> FinishedRequest | None:
        """What it was, now that it is over; None when it never had a token."""
        prompt = len(self.request.prompt)
        output = self.length - prompt
        return FinishedRequest(now, prompt, self.seq.cached_tokens, output) if output else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed iteration."""

    plan: IterationPlan
    knobs: Knobs
    load: SchedulerLoad
    """While it ran."""
    began: float
    """The end of the iteration before, without a break between them: tokens are as far apart as iterations end."""
    predicted: float | None
    elapsed: float
    tokens: tuple[TokenOut, ...]
    ended: tuple[Ended, ...]
    finished: tuple[FinishedRequest, ...]


class Engine:
    """Sequences in, tokens out. Not thread-safe: one loop owns it.

    `pad(plan, seconds so far)` is called at the end of each iteration: an emulated accelerator sleeps in it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        step_times: StepTimePredictor,
        *,
        limits: EngineLimits,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pad: Callable[[IterationPlan, float], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._step_times = step_times
        self._limits = limits
        self._block_size = limits.block_size
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._pad = pad
        self._live: dict[int, LiveSequence] = {}
        self._ended: list[Ended] = []
        self._ended_at: float | None = None
        """When the last iteration ended; None when the engine was idle since."""

    @property
    def idle(self) -> bool:
        """There is nothing to compute."""
        return not self._live

    def apply(self, commands: Commands) -> tuple[FinishedRequest, ...]:
        """Takes in what the server wants; returns those given up that had tokens already.

        What cannot be done ends that sequence alone, and is reported by the next `take_ended`.
        """
        now = self._clock()
        if commands.knobs is not None:
            self.set_knobs(commands.knobs)
        for request in commands.add:
            try:
                self.add(request, now)
            except (Unschedulable, RequestError) as error:
                self._ended.append(Ended(request.seq_id, EndReason.ERROR, str(error)))
        return tuple(finished for seq_id in commands.cancel if (finished := self.cancel(seq_id, now)) is not None)

    def add(self, request: AddSequence, now: float) -> None:
        """Takes a sequence. Raises Unschedulable, or RequestError for parameters that the vocabulary does not allow."""
        request.params.check_vocabulary(self._runner.vocab_size)
        prompt, digests = request.prompt, []
        if self._prefix_caching:
            digests = prefix_digests(prompt.tolist(), self._block_size, request.salt)
        seq = Sequence(
            seq_id=request.seq_id,
            priority=request.priority,
            arrival=request.arrival,
            num_prompt=len(prompt),
            max_tokens=request.max_tokens,
            digests=digests,
            group=request.group,
            tpot_target=request.tpot_target,
            ttft_target=request.ttft_target,
        )
        self.scheduler.add(seq, now)
        tokens = np.zeros(len(prompt) + min(request.max_tokens, 256), dtype=np.int32)
        tokens[: len(prompt)] = prompt
        end_ids = request.params.ending_ids(self._runner.eos_ids)
        self._live[request.seq_id] = LiveSequence(seq, request, tokens, len(prompt), end_ids)

    def cancel(self, seq_id: int, now: float) -> FinishedRequest | None:
        """Gives a sequence up, whatever its state. None when it had no tokens yet, or has ended already."""
        live = self._live.pop(seq_id, None)
        if live is None:
            return None
        self.scheduler.cancel(seq_id, now)
        if not self._live:
            self._ended_at = None
        return live.finished_request(now)

    def set_knobs(self, knobs: Knobs) -> None:
        """The knobs from the next iteration on; the start-up limits where they are None or above them."""
        rows, tokens = self._limits.max_num_seqs, self._limits.prefill_token_budget
        rows, tokens = min(knobs.max_num_seqs or rows, rows), min(knobs.prefill_token_budget or tokens, tokens)
        self.scheduler.set_knobs(Knobs(max_num_seqs=rows, prefill_token_budget=tokens))

    def step(self) -> StepRecord | None:
        """One iteration; None when there is nothing to compute."""
        now = self._clock()
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        began = now if self._ended_at is None else self._ended_at
        knobs, load = self.scheduler.knobs, self.scheduler.load()
        predicted = self._step_times.predict(plan.shape)
        output = self._execute(plan)
        if self._pad is not None:
            self._pad(plan, self._clock() - began)
        now = self._clock()
        elapsed = now - began
        self._step_times.observe(plan.shape, elapsed)
        sampled = [item for item in plan.items if item.samples]
        reasons = self._account(sampled, output)
        outcomes = tuple(ItemResult(item.seq_id, item.epoch, reasons[item.seq_id] is not None) for item in sampled)
        events = self.scheduler.complete(IterationResult(plan.plan_id, outcomes, elapsed), now)
        tokens = self._tokens_out(sampled, output)
        finished: list[FinishedRequest] = []
        for event in events:
            if event.kind is EventKind.FINISHED:
                live = self._live.pop(event.seq_id)
                reason, message = reasons[event.seq_id] or (EndReason.LENGTH, "")
                self._ended.append(Ended(event.seq_id, reason, message))
                if (one := live.finished_request(now)) is not None:
                    finished.append(one)
        self._ended_at = now if self._live else None
        return StepRecord(plan, knobs, load, began, predicted, elapsed, tokens, self.take_ended(), tuple(finished))

    def take_ended(self) -> tuple[Ended, ...]:
        """Sequences that have ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _execute(self, plan: IterationPlan) -> Sampled:
        for slot in plan.freed_slots:
            self._runner.free(slot)
        for item in plan.items:
            live = self._live[item.seq_id]
            if live.bound_epoch != item.epoch:
                self._runner.bind(item.slot, live.tokens[: live.length], live.request.params, len(live.request.prompt))
                live.bound_epoch = item.epoch
        return self._runner.execute(plan.items)

    def _account(self, sampled: list[PlanItem], output: Sampled) -> dict[int, tuple[EndReason, str] | None]:
        """Appends the new tokens to their sequences and says which sequences end by them, and why."""
        reasons: dict[int, tuple[EndReason, str] | None] = {}
        for at, (item, token) in enumerate(zip(sampled, output.ids.tolist(), strict=True)):
            live = self._live[item.seq_id]
            if at in output.errors:
                reasons[item.seq_id] = (EndReason.ERROR, output.errors[at])
                continue
            live.append(token)
            num_output = live.length - len(live.request.prompt)
            if token in live.end_ids and num_output >= live.request.params.min_tokens:
                reasons[item.seq_id] = (EndReason.STOP, "")
            elif num_output >= live.request.max_tokens:
                reasons[item.seq_id] = (EndReason.LENGTH, "")
            else:
                reasons[item.seq_id] = None
                if self._prefix_caching and live.length % self._block_size == 0:
                    known = live.tokens[: live.length].tolist()
                    extend_digests(live.seq.digests, known, self._block_size, live.request.salt)
        return reasons

    def _tokens_out(self, sampled: list[PlanItem], output: Sampled) -> tuple[TokenOut, ...]:
        tokens: list[TokenOut] = []
        for at, (item, token) in enumerate(zip(sampled, output.ids.tolist(), strict=True)):
            if at in output.errors:
                continue
            live = self._live[item.seq_id]
            first = live.length == len(live.request.prompt) + 1
            cached = live.seq.cached_tokens if first else None
            tokens.append(TokenOut(item.seq_id, token, cached, _logprobs(output, at, live.request.params.logprobs)))
        return tuple(tokens)


def _logprobs(result: Sampled, at: int, wanted: int | None) -> TokenLogprobs | None:
    """The log-probabilities that the request wants of the token at place `at`."""
    if wanted is None or result.logprobs is None:
        return None
    top: list[tuple[int, float]] = []
    if wanted and result.top_ids is not None and result.top_logprobs is not None:
        top = list(zip(result.top_ids[at, :wanted].tolist(), result.top_logprobs[at, :wanted].tolist(), strict=True))
    return TokenLogprobs(float(result.logprobs[at]), tuple(top))
