"""Admission: which request is sent to which replica, which waits, and which is told "not now".

Pure decisions over load reports and a clock that is passed in. No HTTP, no sockets, no tasks: the gateway and the
simulator own those. A gateway has one `PoolAdmission` for each pool and drives it like this:

>>> from headway_core.contract.policy import Knobs
>>> from headway_core.contract.reports import EngineLimits, ReplicaState, RuntimeReport
>>> from headway_core.slo import DEFAULT_CLASS
>>> admission = PoolAdmission([DEFAULT_CLASS], "gateway-1", fleet=Fleet("gateway-1", interval=1.0))
>>> estimator = TokenEstimator()

A report tells it of a replica: whenever one was polled, or came with a response (`hint`). The policy sets
`admission.classes` and `admission.fleet.cordoned`, DNS calls `admission.remove`.

>>> report = RuntimeReport(
...     replica_id="r0", pool="chat", model="m", boot_id="b", seq=1, at=0.0, state=ReplicaState.READY,
...     limits=EngineLimits(8, 512, 4096, 16, 1000), effective=Knobs(), free_slots=8, free_blocks=1000,
...     prefill_rate=1000.0, completion_rate=2.0, block_release_rate=100.0, iteration_seconds=0.02)
>>> admission.report(report, now=0.0, round_trip=0.001)

A request is sent at once, or shed (and perhaps others with it), or neither: then it waits. Each dispatch is to be sent
with the headers `PRIORITY` and `DISPATCH`; each shed request is answered with 429 (503 where it is not `contended`) and
its `retry_after` seconds.

>>> prompt = b"word " * 600
>>> first, second, third = (
...     Request(number, DEFAULT_CLASS, 0.1, estimator.estimate("m", prompt),
...             prefix=prefix_chain(b"%d" % number + prompt))
...     for number in range(3))
>>> [(dispatch.replica_id, dispatch.number) for dispatch in admission.submit(first, 0.1).dispatches]
[('r0', 1)]
>>> admission.submit(second, 0.1)
AdmissionResult(dispatches=(), shed=())
>>> [(shed.request_id, shed.reason.value, shed.retry_after) for shed in admission.submit(third, 0.1).shed]
[(2, 'prefill_wait', 1)]

The first token says how good the predictions were, and the response how many tokens the prompt has. `ended` follows
whichever end it was, also when the client left; calling it twice does no harm. After a failure before any content,
`resubmit` asks for another replica.

>>> [f"{sample.predicted:.2f} {sample.error:.2f}" for sample in admission.first_token(0, now=0.9)]
['0.77 -0.03']
>>> estimator.observe("m", prompt, 600)
>>> admission.ended(0, now=1.0, server_error=False)

After every call that may free something, and every few milliseconds while requests wait, `poll` says who goes now.

>>> [dispatch.request.request_id for dispatch in admission.poll(now=1.0).dispatches]
[1]

Without a ready replica, `submit` sheds with NO_REPLICA; with `admission.draining` set, newcomers with DRAINING.
"""

from headway_core.admission.admission_queue import AdmissionQueue, QueueLimits
from headway_core.admission.controller import AdmissionController
from headway_core.admission.fleet import Fleet
from headway_core.admission.outliers import Outliers
from headway_core.admission.pool_admission import PoolAdmission
from headway_core.admission.pool_load import PoolLoad, ReplicaLoad
from headway_core.admission.prefixes import PrefixIndex, prefix_chain
from headway_core.admission.request import Admit, Decision, Prediction, Request, Shed, Wait
from headway_core.admission.results import AdmissionResult, Dispatch, PredictionSample
from headway_core.admission.rules import RULES, AdmissionRule
from headway_core.admission.token_estimator import TokenEstimator

__all__ = [
    "RULES",
    "AdmissionController",
    "AdmissionQueue",
    "AdmissionResult",
    "AdmissionRule",
    "Admit",
    "Decision",
    "Dispatch",
    "Fleet",
    "Outliers",
    "PoolAdmission",
    "PoolLoad",
    "Prediction",
    "PredictionSample",
    "PrefixIndex",
    "QueueLimits",
    "ReplicaLoad",
    "Request",
    "Shed",
    "TokenEstimator",
    "Wait",
    "prefix_chain",
]
