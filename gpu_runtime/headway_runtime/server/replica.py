"""The replica as its HTTP side uses it: state, engine, prompts, policy, metrics, reports. One object a process.

Knows no JSON and no ASGI. A route calls `accept`, waits on the `Generation` that it gets, and calls `release`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from headway_core.contract import documents, header_names
from headway_core.contract.policy import Knobs, Policy
from headway_core.contract.reports import EngineLimits, ReplicaState, RuntimeReport
from headway_core.errors import EngineDied
from headway_core.slo import TpotObjective, TtftObjective
from headway_edge.policy_watcher import PolicyWatcher

from headway_runtime.ipc.messages import AddSequence, StepReport, TokenIds
from headway_runtime.server.api import errors
from headway_runtime.server.api.generation_request import GenerationRequest
from headway_runtime.server.api.request_headers import RequestHeaders
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.generation import Choice, Generation
from headway_runtime.server.metrics import RuntimeMetrics
from headway_runtime.server.prompts import PromptEncoder
from headway_runtime.server.runtime_reporter import RuntimeReporter
from headway_runtime.settings import Settings

ENCODING_THREADS = 2
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

log = logging.getLogger("headway.runtime")


class Replica:
    """One model, one engine, and all requests in flight."""

    def __init__(self, settings: Settings, prompts: PromptEncoder, metrics: RuntimeMetrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.model_name = settings.served_model_name
        self.created = int(time.time())
        self.state = ReplicaState.STARTING
        self.message: str | None = "the model is being loaded"
        self.engine = EngineClient(settings.engine, prompts.eos_ids, self._on_report, self._on_progress)
        self._prompts = prompts
        self._threads = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="encode")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._reporter = RuntimeReporter(
            settings.replica_id, settings.pool, settings.served_model_name, settings.engine.pace
        )
        metrics.set_emulated(settings.engine.pace is not None)
        self._policy_watcher = (
            None
            if settings.policy is None
            else PolicyWatcher(settings.policy, time.monotonic, self._apply_policy, settings.pool)
        )
        self._clamped_by: dict[str, str] = {}
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------ start, drain, stop

    async def start(self) -> None:
        """Loads the model. Raises EngineDied."""
        ready = await self.engine.start()
        self._prompts.set_model(ready)
        self.state, self.message = ReplicaState.READY, None
        if self._policy_watcher is not None:
            self._policy_watcher.read()

    async def watch_policy(self) -> None:
        """Applies each new policy; returns only without a policy file."""
        if self._policy_watcher is not None:
            await self._policy_watcher.run()

    def begin_drain(self) -> None:
        """Rejects new requests from here on."""
        if self.state is not ReplicaState.FAILED:
            self.state, self.message = ReplicaState.DRAINING, "shutting down"

    async def wait_until_drained(self, seconds: float) -> None:
        """Waits at most `seconds` until no request is in flight; then fails those that still are."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.fail_all()

    def fail_all(self) -> None:
        """Ends each request in flight with an error that its client gets."""
        for generation in self._generations:
            generation.fail(errors.drain_timed_out())

    async def wait_until_idle(self, seconds: float) -> None:
        """Waits at most `seconds` until every response is written."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d responses could not be finished", len(self._generations))

    def engine_failed(self) -> None:
        """The engine process has ended: the state is FAILED from here on."""
        self.state, self.message = ReplicaState.FAILED, "the engine process ended"

    async def stop(self) -> int:
        """Ends the engine process and the threads; returns the engine's exit status."""
        for pool in (self._threads, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
        return await self.engine.stop()

    # ------------------------------------------------------------ requests

    @property
    def closes_connections(self) -> bool:
        """Whether responses close their connection: the replica drains or has failed."""
        return self.state in (ReplicaState.DRAINING, ReplicaState.FAILED)

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and not yet released."""
        return len(self._generations)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output; None before the engine is up."""
        return None if self.engine.ready is None else self.engine.ready.limits.max_model_len

    def check_accepting(self) -> None:
        """Raises ApiError (503) unless new requests are accepted."""
        if self.state is ReplicaState.DRAINING:
            raise errors.draining()
        if self.state is not ReplicaState.READY:
            raise errors.not_ready()

    async def run_in_thread(self, work: Callable[[_Argument], _Result], argument: _Argument, *, large: bool) -> _Result:
        """`work(argument)` in a worker thread. Large requests share one thread, so that they delay only each other."""
        return await asyncio.get_running_loop().run_in_executor(self._large if large else self._threads, work, argument)

    async def accept(
        self, request: GenerationRequest, headers: RequestHeaders, arrival: float, *, large: bool
    ) -> Generation:
        """Renders and tokenizes in a thread, then adds the request's sequences to the engine.

        Raises ApiError or RequestError.
        """
        if request.model is not None and request.model != self.model_name:
            raise errors.unknown_model(request.model, self.model_name)
        prompts = await self.run_in_thread(self._prompts.encode, request, large=large)
        self.check_accepting()
        generation, added = self._make_sequences(request, headers, prompts, arrival)
        try:
            self.engine.add(added, [*generation.choices])
        except EngineDied:
            raise errors.engine_died() from None
        self._generations.add(generation)
        self._idle.clear()
        timeout = self.settings.request_timeout
        generation.expire_after(arrival + timeout - time.monotonic(), errors.timed_out(timeout))
        return generation

    def release(self, generation: Generation) -> None:
        """The response is complete or has no reader: cancels the sequences that the engine still has."""
        generation.close()
        self.engine.cancel(choice.seq_id for choice in generation.choices if choice.held_by_engine)
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()

    def _make_sequences(
        self, request: GenerationRequest, headers: RequestHeaders, prompts: list[TokenIds], arrival: float
    ) -> tuple[Generation, list[AddSequence]]:
        """A choice and a sequence for each of `n` completions of each prompt, in the order of the response."""
        ids = self.engine.new_ids(len(prompts) * request.n)
        # Without a seed each prompt gets a random one: a prompt sent twice in a request should get two completions.
        seeds = [secrets.randbits(62) if request.params.seed is None else request.params.seed for _ in prompts]
        class_label = self.metrics.class_label(headers.class_name)
        ttft, tpot = self._targets(headers.class_name)
        salt = header_names.tenant_salt(headers.tenant)
        generation = Generation(sum(len(prompt) for prompt in prompts), arrival, self.metrics, class_label)
        added: list[AddSequence] = []
        for index, seq_id in enumerate(ids):
            prompt = prompts[index // request.n]
            leader = ids[index - index % request.n]
            params = replace(request.params, seed=seeds[index // request.n], choice=index % request.n)
            text = self._prompts.text_stream(request)
            choice = Choice(
                generation, seq_id, index, text, first_of_prompt=seq_id == leader, cancel=self._cancel_sequence
            )
            generation.choices.append(choice)
            added.append(
                AddSequence(
                    seq_id=seq_id,
                    priority=headers.priority,
                    arrival=arrival,
                    group=leader if request.n > 1 else None,
                    salt=salt,
                    prompt=prompt,
                    max_tokens=self._prompts.max_tokens(request, len(prompt)),
                    params=params,
                    ttft_target=None if ttft is None else ttft.limit(len(prompt)),
                    tpot_target=None if tpot is None else tpot.target,
                )
            )
        return generation, added

    def _cancel_sequence(self, seq_id: int) -> None:
        self.engine.cancel((seq_id,))

    def _targets(self, class_name: str | None) -> tuple[TtftObjective | None, TpotObjective | None]:
        """The class's objectives in the policy in force; (None, None) without a policy or for an unknown class."""
        policy = self.policy
        for priority_class in () if policy is None else policy.classes:
            if priority_class.name == class_name:
                return priority_class.objectives.ttft, priority_class.objectives.tpot
        return None, None

    # ------------------------------------------------------------ policy, reports, metrics

    @property
    def policy(self) -> Policy | None:
        """The policy in force."""
        return None if self._policy_watcher is None else self._policy_watcher.store.policies.get(self.settings.pool)

    def record_dispatch(self, dispatch: tuple[str, int] | None) -> None:
        """A gateway's request with this dispatch number was accepted or rejected."""
        if dispatch is not None:
            self._reporter.record_dispatch(*dispatch)

    def load_headers(self) -> errors.Headers:
        """The load hint as a response header; none before the engine's first report."""
        hint = self._reporter.hint(self.engine.load, self.engine.unconfirmed)
        return () if hint is None else ((header_names.LOAD.encode(), documents.dump(hint).encode()),)

    def report(self) -> RuntimeReport:
        """The load report as of now."""
        policy = self.policy
        load = self.engine.load
        stalled = self.failure_reason()
        effective = Knobs() if load is None else load.knobs
        return self._reporter.report(
            at=time.time(),
            state=self.state if stalled is None else ReplicaState.FAILED,
            ready=self.engine.ready,
            load=load,
            unconfirmed=self.engine.unconfirmed,
            policy=None
            if self._policy_watcher is None
            else self._policy_watcher.store.acknowledgement(
                self.settings.pool, effective, self._clamped_by, time.monotonic()
            ),
            cordoned=policy is not None and self.settings.replica_id in policy.cordoned,
            message=stalled or self.message,
        )

    def render_metrics(self) -> bytes:
        """The metrics in the Prometheus text format."""
        policy = self.policy
        watcher = self._policy_watcher
        age = None if watcher is None else watcher.store.age(self.settings.pool, time.monotonic())
        self.metrics.set_policy(self.settings.pool, 0 if policy is None else policy.revision, age)
        return self.metrics.render()

    def failure_reason(self) -> str | None:
        """Why this process should be restarted; None while it works."""
        if self.state is ReplicaState.FAILED:
            return "the engine process ended"
        waited = self.engine.stalled_for(time.monotonic())
        return None if waited is None else f"no step has ended for {waited:.0f} s although there is work"

    def _on_progress(self, message: str) -> None:
        if self.state is ReplicaState.STARTING:
            self.message = message

    def _on_report(self, report: StepReport) -> None:
        if report.elapsed is not None:
            self.metrics.observe_step(report.elapsed, report.predicted)
        if report.load is not None and self.engine.ready is not None:
            self.metrics.set_load(report.load, self.engine.ready.limits.total_blocks)

    def _apply_policy(self, policy: Policy) -> None:
        if self.engine.ready is None:
            return
        effective, self._clamped_by = clamp(policy.knobs, self.engine.ready.limits)
        self.metrics.set_classes(priority_class.name for priority_class in policy.classes)
        self.engine.set_knobs(effective)


def clamp(knobs: Knobs, limits: EngineLimits) -> tuple[Knobs, dict[str, str]]:
    """The knobs that a replica with these limits can have, and for each that was lowered the reason.

    The limits at start are the upper bound: memory and buffers were allocated for them.
    """
    clamped: dict[str, str] = {}

    def bounded(name: str, wanted: int | None, most: int) -> int:
        if wanted is not None and wanted > most:
            clamped[name] = f"start-up capacity {most}"
        return most if wanted is None else min(wanted, most)

    effective = Knobs(
        max_num_seqs=bounded("maxNumSeqs", knobs.max_num_seqs, limits.max_num_seqs),
        prefill_token_budget=bounded("prefillTokenBudget", knobs.prefill_token_budget, limits.prefill_token_budget),
    )
    return effective, clamped
