"""Load reports: what is on its way to the engine counts already, gateways are remembered but not for ever."""

from headway_core.contract.policy import Knobs
from headway_core.contract.reports import Acknowledgement, ClassLoad, EngineLimits, ReplicaState
from headway_runtime.ipc.messages import EngineLoad, Ready
from headway_runtime.server.engine_client import Unconfirmed
from headway_runtime.server.runtime_reporter import MAX_GATEWAYS, RuntimeReporter

LOAD = EngineLoad(
    running=2,
    waiting=1,
    free_slots=6,
    free_blocks=90,
    cached_blocks=10,
    knobs=Knobs(8, 64),
    classes=(ClassLoad(5, 1, 2, 300),),
    prefill_rate=1000.0,
    completion_rate=None,
    block_release_rate=2.0,
    iteration_seconds=0.1,
    longest_step_seconds=1.0,
    step_time=None,
    mix=None,
    iterations=10,
    prompt_tokens=500,
    output_tokens=60,
    finished=3,
    cached_prompt_tokens=100,
    recomputed_tokens=20,
    preemptions={"blocks": 2, "slots": 1},
)
READY = Ready(EngineLimits(8, 64, 4096, 16, 100), 300, (1,), 512)


def report(reports, **changes):
    common = {
        "at": 1.0,
        "state": ReplicaState.READY,
        "ready": READY,
        "load": LOAD,
        "unconfirmed": (),
        "policy": None,
        "cordoned": False,
        "message": None,
    }
    return reports.report(**{**common, **changes})


def test_what_the_engine_has_not_taken_in_yet_is_waiting_all_the_same():
    coming = [Unconfirmed(4, 5, 100), Unconfirmed(4, -1, 50), Unconfirmed(5, -1, 7)]
    made = report(RuntimeReporter("r", "p", "m"), unconfirmed=coming)
    assert (made.running, made.waiting) == (2, 4)
    assert made.classes == (ClassLoad(5, 2, 2, 400), ClassLoad(-1, 2, 0, 57))
    hint = RuntimeReporter("r", "p", "m").hint(LOAD, coming)
    assert (hint.waiting, hint.remaining_prefill_tokens) == (4, {5: 400, -1: 57})


def test_before_the_engine_is_up_nothing_is_claimed():
    made = report(RuntimeReporter("r", "p", "m"), state=ReplicaState.STARTING, ready=None, load=None, message="loading")
    assert (made.state, made.message, made.limits.total_blocks, made.prefill_rate, made.effective) == (
        ReplicaState.STARTING,
        "loading",
        0,
        None,
        Knobs(),
    )
    assert RuntimeReporter("r", "p", "m").hint(None, ()) is None


def test_reports_of_one_boot_are_numbered_and_show_the_policy():
    reports = RuntimeReporter("r", "p", "m")
    acknowledged = Acknowledgement(7, "u", Knobs(8, 64))
    first, second = report(reports), report(reports, policy=acknowledged, cordoned=True)
    assert (second.seq, second.boot_id) == (first.seq + 1, first.boot_id)
    assert second.policy == acknowledged and second.cordoned and second.preemptions == 3


def test_the_highest_dispatch_number_of_each_gateway_counts_and_old_gateways_are_forgotten():
    reports = RuntimeReporter("r", "p", "m")
    for number in (1, 5, 3):
        reports.record_dispatch("gw", number)
    assert report(reports).dispatched == {"gw": 5}
    for number in range(MAX_GATEWAYS):
        reports.record_dispatch("gw", 6)
        reports.record_dispatch(f"restarted-{number}", 1)
    known = report(reports).dispatched
    assert len(known) == MAX_GATEWAYS and known["gw"] == 6 and "restarted-0" not in known
