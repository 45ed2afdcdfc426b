"""The door: who comes in, who waits, who is told "not now", and which replica serves.

Pure decisions over load reports and a clock that is passed in. No HTTP, no sockets, no tasks: the gateway and the
simulator own those.

How a gateway uses the parts, for one pool::

    door = Door(policy.classes, gateway=boot_id, fleet=Fleet(boot_id, interval=poll_interval))
    tokens = TokenEstimator()

    # whenever a poll of /load succeeds, and on each response's `header_names.LOAD` header
    door.report(report, now, round_trip)
    door.hint(replica, hint, now)
    door.fleet.cordoned, door.slo = frozenset(policy.cordoned), policy.classes     # as the policy says
    door.remove(replica)                                                           # as DNS says

    # a request arrives, of the PriorityClass `known`
    request = Request(next_id, known, now, tokens.estimate(model, prompt), size_bytes=len(body),
                      retry=retry_count > 0, prefix=prefix_chain(prompt, header_names.tenant_salt(tenant)),
                      prefix_chunk_tokens=tokens_per_chunk)
    answers = door.submit(request, now)           # dispatch it, shed it (and perhaps others), or neither: it waits

    # after every call that may free something, and every few milliseconds while len(door.queue)
    answers = door.poll(now)
    for dispatch in answers.dispatches: ...      # wake that request's task: connect to dispatch.replica, with
                                                 #   PRIORITY: dispatch.priority, DISPATCH: f"{boot}:{dispatch.number}"
    for shed in answers.shed: ...                # 429 (shed.contended) or 503, with Retry-After: shed.retry_after
                                                 #   and SHED_REASON: shed.reason.value

    # its answer
    comparisons = door.first_token(request.request_id, now)   # first content: export comparison.error
    tokens.observe(model, prompt, exact)                      # from the header PROMPT_TOKENS
    door.ended(request.request_id, now, server_error=False)   # whichever end it was; repeating does no harm
    answers = door.resubmit(request, now, tried=[replica])       # after `ended`, when it may be retried

A client that goes away is `door.ended(...)` too, whichever phase it is in. When nothing is ready, `offer` sheds with
NO_REPLICA. On SIGTERM set `door.draining`: newcomers are shed with DRAINING, and what waits still has its turn.
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
