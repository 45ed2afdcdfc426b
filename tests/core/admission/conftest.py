"""Builders for admission tests: a class, a request, a load report, with whatever a test does not care about filled
in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from headway_core.admission import PoolLoad, ReplicaLoad, Request
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import ClassLoad, EngineLimits, ReplicaState, RuntimeReport
from headway_core.slo import Objectives, PriorityClass, TtftObjective

MakeClass = Callable[..., PriorityClass]
MakeRequest = Callable[..., Request]
MakeReplica = Callable[..., ReplicaLoad]
MakeReport = Callable[..., RuntimeReport]


@pytest.fixture
def priority_class() -> MakeClass:
    def make(
        priority: int = 0, target: float | None = 10.0, shares: int = 1, max_queue_time: float | None = None
    ) -> PriorityClass:
        # Without a TTFT objective there has to be another one; TPOT plays no part in admission.
        from headway_core.slo import TpotObjective

        objectives = Objectives(TtftObjective(target)) if target is not None else Objectives(tpot=TpotObjective(0.1))
        return PriorityClass(f"class-{priority}", priority, objectives, shares, max_queue_time=max_queue_time)

    return make


@pytest.fixture
def request_of(priority_class: MakeClass) -> MakeRequest:
    numbers = itertools.count(1)

    def make(tokens: int = 1000, arrival: float = 0.0, slo: PriorityClass | None = None, **more: object) -> Request:
        number = more.pop("request_id", None) or next(numbers)
        return Request(number, slo or priority_class(), arrival, tokens, **more)  # type: ignore[arg-type]

    return make


@pytest.fixture
def replica_load() -> MakeReplica:
    def make(name: str = "r0", **changes: object) -> ReplicaLoad:
        """Idle, with 1,000 prefill tokens per second and plenty of slots and blocks."""
        idle = ReplicaLoad(
            replica_id=name,
            backlog={},
            waiting={},
            running={},
            free_slots=1000,
            free_blocks=100_000,
            block_size=16,
            budget=0,
            prefill_rate=1000.0,
            completion_rate=10.0,
            block_release_rate=100.0,
            iteration=0.0,
        )
        return replace(idle, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture
def busy(replica_load: MakeReplica) -> Callable[..., PoolLoad]:
    """A load of one replica that is computing, so that newcomers have to wait, with these requests waiting."""

    def make(*waiting: Request, backlog: float = 1.0, priority: int = 10, **changes: object) -> PoolLoad:
        replica = replica_load(backlog={priority: backlog}, running={priority: 1}, **changes)
        return PoolLoad((replica,), sorted(waiting, key=lambda one: (-one.priority, one.arrival, one.request_id)))

    return make


@pytest.fixture
def report() -> MakeReport:
    numbers = itertools.count(1)

    def make(name: str = "r0", **changes: object) -> RuntimeReport:
        idle = RuntimeReport(
            replica_id=name,
            pool="p",
            model="m",
            boot_id=f"{name}-boot",
            seq=next(numbers),
            at=0.0,
            state=ReplicaState.READY,
            limits=EngineLimits(
                max_num_seqs=8, prefill_token_budget=512, max_model_len=32_768, block_size=16, total_blocks=10_000
            ),
            effective=Knobs(),
            free_slots=8,
            free_blocks=10_000,
            classes=(ClassLoad(0, 0, 0, 0),),
            prefill_rate=1000.0,
            completion_rate=1.0,
            block_release_rate=100.0,
            iteration_seconds=0.1,
        )
        return replace(idle, **changes)  # type: ignore[arg-type]

    return make
