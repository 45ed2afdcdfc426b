"""The pools behind this gateway: for each, its policy, its replicas, its admission and its counters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping

from headway_core.admission import (
    RULES,
    AdmissionController,
    AdmissionQueue,
    Fleet,
    PoolAdmission,
    QueueLimits,
    TokenEstimator,
)
from headway_core.admission.retry_after import SHORTEST
from headway_core.contract.header_names import ShedReason
from headway_core.contract.policy import Policy, Pool
from headway_core.contract.reports import ReplicaState
from headway_core.slo import DEFAULT_CLASS

from headway_gateway import error_responses
from headway_gateway.accounting import ClassCounters, SignedErrors
from headway_gateway.dispatcher import Dispatcher
from headway_gateway.error_responses import RequestFailed
from headway_gateway.failures import FailureLog
from headway_gateway.replicas import Replicas
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream


def default_policy(pool: Pool) -> Policy:
    """The policy of a pool from the command line until a policy file names it."""
    return Policy(
        revision=1, slo_uid="", generation=0, pool=pool, classes=(DEFAULT_CLASS,), default_class=DEFAULT_CLASS.name
    )


class ServedPool:
    """One pool. `apply_policy` replaces its policy; a request is judged by the objectives in force when it arrived."""

    def __init__(
        self, policy: Policy, boot_id: str, settings: Settings, upstream: Upstream, clock: Callable[[], float]
    ) -> None:
        self.name = policy.pool.name
        self.counters: dict[str, ClassCounters] = {}
        self.ttft_errors = {"admitted": SignedErrors(), "shed": SignedErrors()}
        """Predicted minus actual TTFT, by decision."""
        limits = QueueLimits(settings.max_queue_requests, settings.max_queue_bytes, settings.max_queue_time)
        self.admission = PoolAdmission(
            policy.classes,
            boot_id,
            controller=AdmissionController(RULES[settings.admission_rule]),
            queue=AdmissionQueue(limits),
            fleet=Fleet(boot_id, settings.poll_interval),
        )
        self.dispatcher = Dispatcher(self.admission, clock)
        self.failures = FailureLog(self.name)
        self.replicas = Replicas(
            self.admission, upstream, settings.poll_interval, self._replicas_changed, self.failures.gone, clock
        )
        self.estimator = TokenEstimator()
        self._configured = settings.pools
        self._tasks: list[asyncio.Task[None]] = []
        self.apply_policy(policy)

    def start(self) -> None:
        """Starts to discover replicas and to dispatch what waits."""
        self._tasks = [asyncio.create_task(self.replicas.run()), asyncio.create_task(self.dispatcher.run())]

    async def stop(self) -> None:
        """Ends what `start` began."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def apply_policy(self, policy: Policy) -> None:
        """Takes the policy's classes and cordons, and its endpoints unless the command line names this pool's."""
        self.policy = policy
        self.admission.classes = policy.classes
        for known in policy.classes:
            self.counters.setdefault(known.name, ClassCounters())
        given = next((pool.endpoints for pool in self._configured if pool.name == self.name), policy.pool.endpoints)
        self.replicas.discover(given)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        self.admission.fleet.cordoned = frozenset(self.policy.cordoned) | self.replicas.down()
        self.dispatcher.wake()

    @property
    def model(self) -> str | None:
        """The name of the model for clients; None while neither the policy nor a replica has told it."""
        return self.policy.pool.model or self.replicas.model

    def ready(self, now: float) -> int:
        """How many replicas a request could be sent to now."""
        return len(self.admission.fleet.loads(now))


class Pools:
    """All pools by name, and which model each serves."""

    def __init__(self, boot_id: str, settings: Settings, upstream: Upstream, clock: Callable[[], float]) -> None:
        self.draining = False
        self.unclassified = ClassCounters()
        """Requests that ended before their pool and class were known."""
        self.boot_id = boot_id
        self._clock = clock
        self._settings = settings
        self._upstream = upstream
        self._pools: dict[str, ServedPool] = {}
        self._numbers = itertools.count(1)
        self._initial: tuple[ServedPool, ...] | None = None
        """The pools that were known at the start; None before it."""
        for pool in settings.pools:
            self.apply_policy(default_policy(pool))

    def __iter__(self) -> Iterator[ServedPool]:
        return iter(self._pools.values())

    def apply_policy(self, policy: Policy) -> None:
        """Applies a policy that came into force; makes the pool if it is new."""
        known = self._pools.get(policy.pool.name)
        if known is not None:
            known.apply_policy(policy)
            return
        pool = self._pools[policy.pool.name] = ServedPool(
            policy, self.boot_id, self._settings, self._upstream, self._clock
        )
        pool.admission.draining = self.draining
        if self._initial is not None:
            pool.start()

    def start(self) -> None:
        """Starts every pool's tasks, and from now on those of each new pool."""
        self._initial = tuple(self)
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
            RequestFailed: 404 when none does; 503 while some pool's replicas have not said what they serve.
        """
        models = self.models()
        if model in models:
            return models[model]
        if not self._pools or len(models) < len(self._pools):
            raise error_responses.shed(ShedReason.NO_REPLICA, SHORTEST)
        raise RequestFailed(error_responses.unknown_model(model, sorted(models)))

    def drain(self) -> None:
        """Every new request is shed from now on."""
        self.draining = True
        for pool in self:
            pool.admission.draining = True

    async def stop(self) -> None:
        """Ends every pool's tasks."""
        await asyncio.gather(*(pool.stop() for pool in self))

    @property
    def state(self) -> ReplicaState:
        """Starting until every address known at first was probed once: before that no request could be served."""
        if self.draining:
            return ReplicaState.DRAINING
        probed = self._initial is not None and all(pool.replicas.probed.is_set() for pool in self._initial)
        return ReplicaState.READY if probed else ReplicaState.STARTING
