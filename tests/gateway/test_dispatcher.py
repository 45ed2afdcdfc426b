"""The dispatcher with a clock of the test's own: what waits too long is shed without anybody waiting for it."""

import asyncio

import pytest
from headway_core.admission import RULES, AdmissionController, AdmissionQueue, PoolAdmission, QueueLimits, Request
from headway_core.contract.header_names import ShedReason
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits, ReplicaState, RuntimeReport
from headway_core.slo import Objectives, PriorityClass, TtftObjective
from headway_gateway.dispatcher import Dispatcher
from headway_gateway.error_responses import RequestFailed

CLASS = PriorityClass("c", 0, Objectives(TtftObjective(1.0)))


def full_replica():
    return RuntimeReport(
        replica_id="r",
        pool="p",
        model="m",
        boot_id="b",
        seq=1,
        at=0.0,
        state=ReplicaState.READY,
        limits=EngineLimits(1, 2048, 131_072, 16, 1000),
        effective=Knobs(1, 2048),
        running=1,
        waiting=0,
        free_slots=0,
        free_blocks=900,
        classes=(),
        dispatched={},
    )


async def test_a_request_that_waits_too_long_is_shed_by_the_clock_that_is_passed_in(until):
    now = 1000.0
    admission = PoolAdmission(
        (CLASS,),
        "gateway",
        controller=AdmissionController(RULES["open"]),
        queue=AdmissionQueue(QueueLimits(10, 1000, 60.0)),
    )
    dispatcher = Dispatcher(admission, lambda: now)
    running = asyncio.create_task(dispatcher.run())
    admission.report(full_replica(), now)
    queued = []
    waiting = asyncio.create_task(dispatcher.acquire(Request(1, CLASS, now, 10), queued.append))
    await until(lambda: queued == [True])
    now += 3600.0
    admission.report(full_replica(), now)
    with pytest.raises(RequestFailed) as ended:
        await asyncio.wait_for(waiting, 5.0)
    assert ended.value.reason in {ShedReason.QUEUE_TIME, ShedReason.NO_REPLICA} and queued == [True, False]
    assert not len(admission.queue)
    running.cancel()
