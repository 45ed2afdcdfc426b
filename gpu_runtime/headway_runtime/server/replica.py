"""The replica as its HTTP side sees it: state, engine, text, policy, books. One object a process, made in
`headway_runtime.server.app`.

Knows no JSON and no ASGI; endpoints ask it to accept a request, wait on the `Generation` they get, and release it.
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

from headway_core.batching.plan import Limits
from headway_core.contract import documents, header_names
from headway_core.contract.policy import Knobs, Policy
from headway_core.contract.reports import ReplicaState, RuntimeReport
from headway_core.errors import EngineDied
from headway_core.slo import TpotObjective, TtftObjective

from headway_runtime.ipc.messages import AddSequence, StepReport, TokenIds
from headway_runtime.server.api import errors
from headway_runtime.server.api.generation_request import GenerationRequest
from headway_runtime.server.api.request_headers import RequestHeaders
from headway_runtime.server.engine_client import EngineClient
from headway_runtime.server.generation import Choice, Generation
from headway_runtime.server.metrics import RuntimeMetrics
from headway_runtime.server.policy_watcher import PolicyWatcher, clamp
from headway_runtime.server.prompts import PromptEncoder
from headway_runtime.server.runtime_reporter import RuntimeReporter
from headway_runtime.settings import Settings

ENCODING_THREADS = 2
_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

log = logging.getLogger("headway.runtime")


class Replica:
    """One model, one engine, everything in flight on it."""

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
        self._reports = RuntimeReporter(
            settings.replica_id, settings.pool, settings.served_model_name, settings.engine.pace
        )
        metrics.set_emulated(settings.engine.pace is not None)
        self._policy_file = (
            None if settings.policy is None else PolicyWatcher(settings.policy, settings.pool, self._apply_policy)
        )
        self._clamped_by: dict[str, str] = {}
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Loads the model. Raises EngineDied."""
        ready = await self.engine.start()
        self._prompts.set_model(ready)
        self.state, self.message = ReplicaState.READY, None
        if self._policy_file is not None:
            self._policy_file.read_once()

    async def watch_policy(self) -> None:
        """Follows the policy file for ever."""
        if self._policy_file is not None:
            await self._policy_file.watch()

    def begin_drain(self) -> None:
        """Takes nothing new from here on."""
        if self.state is not ReplicaState.FAILED:
            self.state, self.message = ReplicaState.DRAINING, "shutting down"

    async def drained(self, seconds: float) -> None:
        """Waits until nothing is in flight, at most `seconds`; then ends the rest with an error that their clients
        see."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.cut_all()

    def cut_all(self) -> None:
        """Ends everything in flight with an error."""
        for generation in self._generations:
            generation.fail(errors.cut_by_drain())

    async def until_idle(self, seconds: float) -> None:
        """Waits until every answer is written, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d answers could not be finished", len(self._generations))

    def engine_failed(self) -> None:
        """The engine process is gone: nobody may be sent here."""
        self.state, self.message = ReplicaState.FAILED, "the engine process ended"

    async def stop(self) -> int:
        """Ends the engine process and the threads; returns the engine's exit status."""
        for pool in (self._threads, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
        return await self.engine.stop()

    # ------------------------------------------------------------ requests

    @property
    def closing(self) -> bool:
        """Connections are not to be kept."""
        return self.state in (ReplicaState.DRAINING, ReplicaState.FAILED)

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and not yet released."""
        return len(self._generations)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output; None before the engine is up."""
        return None if self.engine.ready is None else self.engine.ready.capacity.max_model_len

    def check_open(self) -> None:
        """Raises ApiError (503) unless new requests are taken."""
        if self.state is ReplicaState.DRAINING:
            raise errors.draining()
        if self.state is not ReplicaState.READY:
            raise errors.not_ready()

    async def aside(self, work: Callable[[_Given], _Result], given: _Given, *, large: bool) -> _Result:
        """`work(given)`, done in a worker thread. Large requests have one of their own, so that they keep only each
        other waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._large if large else self._threads, work, given)

    async def accept(
        self, request: GenerationRequest, headers: RequestHeaders, arrival: float, *, large: bool
    ) -> Generation:
        """Templates and tokenizes in a thread, then hands the request's sequences to the engine.

        Raises ApiError or RequestError.
        """
        if request.model is not None and request.model != self.model_name:
            raise errors.unknown_model(request.model, self.model_name)
        prompts = await self.aside(self._prompts.encode, request, large=large)
        self.check_open()
        generation, added = self._sequences(request, headers, prompts, arrival)
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
        """Nobody waits for the request any more: what the engine still has of it is given up."""
        generation.close()
        self.engine.cancel(choice.seq_id for choice in generation.choices if choice.held_by_engine)
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()

    def _sequences(
        self, request: GenerationRequest, headers: RequestHeaders, prompts: list[TokenIds], arrival: float
    ) -> tuple[Generation, list[AddSequence]]:
        """One choice and one sequence for each of `n` completions of each prompt, in the order of the answer's
        indices."""
        ids = self.engine.new_ids(len(prompts) * request.n)
        # Without a seed each prompt draws for itself: the same prompt asked several times is not to get the same answer
        # several times.
        seeds = [secrets.randbits(62) if request.params.seed is None else request.params.seed for _ in prompts]
        label = self.metrics.class_label(headers.class_name)
        ttft, tpot = self._targets(headers.class_name)
        salt = header_names.tenant_salt(headers.tenant)
        generation = Generation(sum(len(prompt) for prompt in prompts), arrival, self.metrics, label)
        added: list[AddSequence] = []
        for index, seq_id in enumerate(ids):
            prompt = prompts[index // request.n]
            leader = ids[index - index % request.n]
            params = replace(request.params, seed=seeds[index // request.n], choice=index % request.n)
            text = self._prompts.text_stream(request)
            choice = Choice(generation, seq_id, index, text, leads=seq_id == leader, give_up=self._give_up)
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

    def _give_up(self, seq_id: int) -> None:
        self.engine.cancel((seq_id,))

    def _targets(self, class_name: str | None) -> tuple[TtftObjective | None, TpotObjective | None]:
        """What the policy in force promises to a class; (None, None) without a policy or for a class that it does not
        have."""
        policy = self.policy
        known = () if policy is None else policy.classes
        for one in known:
            if one.name == class_name:
                return one.objectives.ttft, one.objectives.tpot
        return None, None

    # ------------------------------------------------------------ books

    @property
    def policy(self) -> Policy | None:
        """The policy in force."""
        return None if self._policy_file is None else self._policy_file.policy

    def saw_dispatch(self, dispatch: tuple[str, int] | None) -> None:
        """A gateway's request is in these books, or was refused."""
        if dispatch is not None:
            self._reports.saw_dispatch(*dispatch)

    def response_headers(self) -> errors.Headers:
        """The load hint, once there is anything to say."""
        hint = self._reports.hint(self.engine.load, self.engine.unconfirmed)
        return () if hint is None else ((header_names.LOAD.encode(), documents.dump(hint).encode()),)

    def report(self) -> RuntimeReport:
        """The load report as of now."""
        policy = self.policy
        load = self.engine.load
        stalled = self.unhealthy()
        effective = Knobs() if load is None else Knobs(load.limits.max_num_seqs, load.limits.prefill_token_budget)
        return self._reports.report(
            at=time.time(),
            state=self.state if stalled is None else ReplicaState.FAILED,
            ready=self.engine.ready,
            load=load,
            unconfirmed=self.engine.unconfirmed,
            policy=None
            if self._policy_file is None
            else self._policy_file.acknowledgement(effective, self._clamped_by),
            cordoned=policy is not None and self.settings.replica_id in policy.cordoned,
            message=stalled or self.message,
        )

    def scrape(self) -> bytes:
        """The metrics as Prometheus reads them."""
        policy = self.policy
        age = None if self._policy_file is None else self._policy_file.age
        self.metrics.policy(self.settings.pool, 0 if policy is None else policy.revision, age)
        return self.metrics.render()

    def unhealthy(self) -> str | None:
        """Why this process should be restarted; None while it should not."""
        if self.state is ReplicaState.FAILED:
            return "the engine process ended"
        waited = self.engine.stalled_for(time.monotonic())
        return None if waited is None else f"no step has ended for {waited:.0f} s although there is work"

    def _on_progress(self, message: str) -> None:
        if self.state is ReplicaState.STARTING:
            self.message = message

    def _on_report(self, report: StepReport) -> None:
        if report.elapsed is not None:
            self.metrics.step(report.elapsed, report.predicted)
        if report.load is not None and self.engine.ready is not None:
            self.metrics.load(report.load, self.engine.ready.capacity.total_blocks)

    def _apply_policy(self, policy: Policy) -> None:
        if self.engine.ready is None:
            return
        effective, self._clamped_by = clamp(policy.knobs, self.engine.ready.capacity)
        self.metrics.set_classes(known.name for known in policy.classes)
        if effective.max_num_seqs is not None and effective.prefill_token_budget is not None:
            self.engine.set_limits(Limits(effective.max_num_seqs, effective.prefill_token_budget))
