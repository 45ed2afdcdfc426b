"""The pools behind this gateway: for each, its policy, its replicas, its door and its books."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping

from headway_core.admission import (
    RULES,
    AdmissionController,
    AdmissionQueue,
    Fleet,
    PoolAdmission,
    PredictionSample,
    QueueLimits,
    Request,
    TokenEstimator,
    prefix_chain,
)
from headway_core.admission.prefixes import CHUNK_BYTES
from headway_core.admission.retry_after import SHORTEST
from headway_core.contract.header_names import CLASS, DISPATCH, PRIORITY, TENANT, WANT_USAGE, ShedReason, tenant_salt
from headway_core.contract.policy import Policy
from headway_core.contract.reports import ReplicaState
from headway_core.errors import RequestError
from headway_core.slo import PriorityClass

from headway_gateway import error_responses
from headway_gateway.accounting import ClassCounters, RequestRecord, SignedErrors
from headway_gateway.dispatcher import Dispatcher, Grant
from headway_gateway.error_responses import RequestFailed
from headway_gateway.failures import FailureLog
from headway_gateway.keys import Caller
from headway_gateway.parsed_request import ParsedRequest
from headway_gateway.policy_watcher import default_policy
from headway_gateway.replicas import Replicas
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream


class ServedPool:
    """One pool. `apply_policy` replaces its policy; a request is judged by the objectives in force when it arrived."""

    def __init__(self, policy: Policy, boot_id: str, settings: Settings, upstream: Upstream) -> None:
        self.name = policy.pool.name
        self.counters: dict[str, ClassCounters] = {}
        self.errors = {"admitted": SignedErrors(), "shed": SignedErrors()}
        """Signed error of predicted TTFT, by decision."""
        limits = QueueLimits(settings.max_queue_requests, settings.max_queue_bytes, settings.max_queue_time)
        self.admission = PoolAdmission(
            policy.classes,
            boot_id,
            controller=AdmissionController(RULES[settings.rule]),
            queue=AdmissionQueue(limits),
            fleet=Fleet(boot_id, settings.poll_interval),
        )
        self.dispatcher = Dispatcher(self.admission)
        self.failures = FailureLog(self.name)
        self.replicas = Replicas(
            self.admission, upstream, settings.poll_interval, self._replicas_changed, self.failures.gone
        )
        self.estimator = TokenEstimator()
        self._boot_id = boot_id
        self._static = settings.pools
        self._tasks: list[asyncio.Task[None]] = []
        self.apply_policy(policy)

    def start(self) -> None:
        """Starts looking for replicas and granting."""
        self._tasks = [asyncio.create_task(self.replicas.run()), asyncio.create_task(self.dispatcher.run())]

    async def stop(self) -> None:
        """Ends what `start` began."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def apply_policy(self, policy: Policy) -> None:
        """Takes a policy: classes, cordons, and where to look unless the command line said so."""
        self.policy = policy
        self.admission.classes = policy.classes
        for known in policy.classes:
            self.counters.setdefault(known.name, ClassCounters())
        given = next((pool.endpoints for pool in self._static if pool.name == self.name), policy.pool.endpoints)
        self.replicas.discover(given)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.admission.fleet.cordoned = frozenset(self.policy.cordoned) | self.replicas.unreachable()
        self.dispatcher.wake()

    @property
    def model(self) -> str | None:
        """The name that clients ask for; None while neither the policy nor a replica has said it."""
        return self.policy.pool.model or self.replicas.model

    def ready(self, now: float) -> int:
        """Replicas that would be sent to now."""
        return len(self.admission.fleet.loads(now))

    # ------------------------------------------------------------ a request

    def classify(self, parsed: ParsedRequest, caller: Caller, class_header: str | None) -> PriorityClass:
        """The class of a request: the trusted header's, else the service tier's, else the default; within what the key
        allows.

        Raises:
            RequestFailed: 400 for a header that names no class, 403 for a class asked for that the key does not open.
        """
        classes = {known.name: known for known in self.policy.classes}
        by_tier = {tier: known for known in self.policy.classes for tier in known.service_tiers}
        if class_header is not None and class_header not in classes:
            raise RequestFailed(error_responses.unknown_class(class_header))
        chosen = classes.get(class_header or "") or by_tier.get(parsed.service_tier or "")
        if caller.classes is None:
            return chosen or classes[self.policy.default_class]
        if chosen is not None:
            if chosen.name not in caller.classes:
                raise RequestFailed(error_responses.class_forbidden(chosen.name))
            return chosen
        allowed = [known for known in self.policy.classes if known.name in caller.classes]
        if not allowed:
            raise RequestFailed(error_responses.class_forbidden(self.policy.default_class))
        return next((known for known in allowed if known.name == self.policy.default_class), allowed[0])

    def check_length(self, parsed: ParsedRequest) -> None:
        """Refused here, since the door would else tell a prompt that no replica can hold to come back later.

        Raises:
            RequestError: a prompt of token ids is longer than any replica's context, which has room for a token of the
            answer too.
        """
        longest = self.admission.fleet.longest()
        if longest is not None and parsed.longest_prompt >= longest:
            raise RequestError(
                f"has {parsed.longest_prompt} tokens and at most {longest} are served, one of them for the "
                "answer: shorten it",
                "prompt",
                "context_length_exceeded",
            )

    def request(
        self,
        number: int,
        parsed: ParsedRequest,
        priority_class: PriorityClass,
        caller: Caller,
        *,
        arrival: float,
        retry: bool,
    ) -> Request:
        """The request as admission sees it. With a prompt in text its length is an estimate."""
        tokens = max(
            1, self.estimator.estimate(self.name, parsed.text) if parsed.token_ids is None else parsed.token_ids
        )
        return Request(
            request_id=number,
            priority_class=priority_class,
            arrival=arrival,
            prompt_tokens=tokens,
            size_bytes=len(parsed.body),
            retry=retry,
            prefix=prefix_chain(parsed.text, tenant_salt(caller.tenant)),
            prefix_chunk_tokens=tokens * CHUNK_BYTES / max(1, len(parsed.text)),
        )

    def headers(self, grant: Grant, caller: Caller) -> dict[str, str]:
        """What the runtime is told beside the request itself."""
        told = {
            PRIORITY: str(grant.priority),
            CLASS: grant.request.priority_class.name,
            DISPATCH: f"{self._boot_id}:{grant.number}",
            WANT_USAGE: "1",
        }
        return told if caller.tenant is None else {**told, TENANT: caller.tenant}

    def add_prediction_errors(self, samples: tuple[PredictionSample, ...]) -> None:
        """Books what a first token said about predictions."""
        for sample in samples:
            self.errors["shed" if sample.shed else "admitted"].add(sample.error)

    def record(self, request: Request, parsed: ParsedRequest) -> RequestRecord:
        """The entry of an offered request."""
        return RequestRecord(self.counters[request.priority_class.name], request, parsed.choices)


class Pools:
    """All pools by name, and which model each serves."""

    def __init__(self, boot_id: str, settings: Settings, upstream: Upstream) -> None:
        self.draining = False
        self.unclassified = ClassCounters()
        """Requests that ended before it was known for which pool and class they were."""
        self._boot_id = boot_id
        self._settings = settings
        self._upstream = upstream
        self._pools: dict[str, ServedPool] = {}
        self._numbers = itertools.count(1)
        self._first: tuple[ServedPool, ...] | None = None
        """The pools that were known at the start; None before it."""
        for pool in settings.pools:
            self.apply_policy(default_policy(pool))

    def __iter__(self) -> Iterator[ServedPool]:
        return iter(self._pools.values())

    def apply_policy(self, policy: Policy) -> None:
        """Takes a policy that came into force; one for a pool not seen before opens it."""
        known = self._pools.get(policy.pool.name)
        if known is not None:
            known.apply_policy(policy)
            return
        pool = self._pools[policy.pool.name] = ServedPool(policy, self._boot_id, self._settings, self._upstream)
        pool.admission.draining = self.draining
        if self._first is not None:
            pool.start()

    def start(self) -> None:
        """Starts every pool's tasks, and from now on those of each new pool."""
        self._first = tuple(self)
        for pool in self:
            pool.start()

    def next_number(self) -> int:
        """A number for a request, unique in this gateway."""
        return next(self._numbers)

    def models(self) -> Mapping[str, ServedPool]:
        """Model → pool, of those whose model is known."""
        return {pool.model: pool for pool in self._pools.values() if pool.model is not None}

    def serving(self, model: str) -> ServedPool:
        """The pool that serves `model`.

        Raises:
            RequestFailed: 404 when none does; 503 when that cannot be known yet, because some pool's replicas have not
            said what they serve.
        """
        models = self.models()
        if model in models:
            return models[model]
        if not self._pools or len(models) < len(self._pools):
            raise error_responses.not_now(ShedReason.NO_REPLICA, SHORTEST)
        raise RequestFailed(error_responses.unknown_model(model, sorted(models)))

    def drain(self) -> None:
        """Nothing new comes in from now on."""
        self.draining = True
        for pool in self:
            pool.admission.draining = True

    async def stop(self) -> None:
        """Ends every pool's tasks."""
        await asyncio.gather(*(pool.stop() for pool in self))

    @property
    def state(self) -> ReplicaState:
        """This gateway's own state. It starts until every address that it knew at first was asked once: before, nobody
        could be served."""
        if self.draining:
            return ReplicaState.DRAINING
        looked = self._first is not None and all(pool.replicas.probed.is_set() for pool in self._first)
        return ReplicaState.READY if looked else ReplicaState.STARTING
