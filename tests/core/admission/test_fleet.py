"""What a gateway knows of its replicas: reports, what they have not seen, and when not to believe them."""

from __future__ import annotations

import random

import pytest
from headway_core.admission import Fleet
from headway_core.contract.reports import ClassLoad, LoadHint, ReplicaState


def only(fleet: Fleet, now: float):
    (load,) = fleet.loads(now)
    return load


def test_exactly_what_the_report_has_not_seen_is_added(report) -> None:
    fleet = Fleet("gw")
    fleet.observe(report(prefill_rate=None), now=0.0)
    for tokens in (100, 200, 400):
        fleet.dispatch("r0", 0, tokens, now=0.0)
    assert only(fleet, 0.0).backlog == {0: 700.0}
    assert only(fleet, 0.0).waiting == {0: 3}
    # The report has seen the first two, which are among its 250 remaining tokens; another gateway's numbers say nothing
    # here.
    seen = report(prefill_rate=None, dispatched={"gw": 2, "other": 99}, classes=(ClassLoad(0, 1, 1, 250),))
    fleet.observe(seen, now=0.1)
    assert only(fleet, 0.1).backlog == {0: 650.0}
    assert only(fleet, 0.1).waiting == {0: 2}
    fleet.end("r0", 3)
    fleet.end("r0", 3)
    assert only(fleet, 0.1).backlog == {0: 250.0}
    assert fleet.in_flight("r0") == 2


def test_a_prompt_whose_first_token_came_is_no_backlog(report) -> None:
    fleet = Fleet("gw")
    fleet.observe(report(prefill_rate=None), now=0.0)
    number = fleet.dispatch("r0", 0, 5000, now=0.0)
    fleet.computed("r0", number)
    assert only(fleet, 0.0).backlog == {0: 0.0}


def test_what_is_booked_one_by_one_is_what_a_recount_finds(report) -> None:
    rng = random.Random(5)
    fleet = Fleet("gw")
    fleet.observe(report(classes=(ClassLoad(0, 2, 1, 50_000), ClassLoad(5, 0, 0, 0))), now=0.0)
    numbers: list[int] = []
    for step in range(300):
        now = step / 100
        numbers.append(fleet.dispatch("r0", rng.choice((0, 5)), rng.randint(1, 300), now))
        if rng.random() < 0.3:
            fleet.computed("r0", rng.choice(numbers))
        if rng.random() < 0.3:
            fleet.end("r0", numbers.pop(rng.randrange(len(numbers))))
    booked = only(fleet, 2.99)
    # The same report once more: everything is counted from it again.
    fleet.observe(report(classes=(ClassLoad(0, 2, 1, 50_000), ClassLoad(5, 0, 0, 0))), now=0.0)
    counted = only(fleet, 2.99)
    assert booked.waiting == counted.waiting
    assert sum(booked.backlog.values()) == pytest.approx(sum(counted.backlog.values()), rel=0.02)


def test_between_reports_the_backlog_drains_at_the_replicas_own_rate_and_never_below_zero(report) -> None:
    fleet = Fleet("gw", interval=1.0)
    fleet.observe(report(prefill_rate=1000.0, classes=(ClassLoad(5, 0, 1, 300), ClassLoad(0, 0, 1, 1000))), now=0.0)
    assert only(fleet, 0.5).backlog == {5: 0.0, 0: 800.0}
    # Idle from 1.3 on: what is sent at 2 starts at 2.
    fleet.dispatch("r0", 0, 600, now=2.0)
    assert only(fleet, 2.25).backlog == {5: 0.0, 0: pytest.approx(350.0)}


def test_a_report_that_was_overtaken_is_passed_over_and_a_restart_is_noticed(report) -> None:
    fleet = Fleet("gw")
    assert fleet.observe(report(seq=5, free_slots=1), 0.0)
    assert not fleet.observe(report(seq=4, free_slots=7), 0.1)
    assert only(fleet, 0.1).free_slots == 1
    assert fleet.observe(report(seq=1, boot_id="second", free_slots=7), 0.2)
    assert only(fleet, 0.2).free_slots == 7


def test_a_rate_that_is_no_longer_measured_is_remembered_within_a_boot_only(report) -> None:
    fleet = Fleet("gw")
    fleet.observe(report(prefill_rate=1234.0), 0.0)
    fleet.observe(report(prefill_rate=None), 0.1)
    assert only(fleet, 0.1).prefill_rate == 1234.0
    fleet.observe(report(prefill_rate=None, boot_id="second"), 0.2)
    assert only(fleet, 0.2).prefill_rate is None


def test_a_hint_updates_what_it_says_and_keeps_what_it_cannot_say(report) -> None:
    fleet = Fleet("gw")
    fleet.observe(
        report(seq=10, classes=(ClassLoad(5, 2, 3, 900), ClassLoad(0, 4, 1, 100)), iteration_seconds=0.2), 0.0
    )
    hint = LoadHint(
        "r0-boot",
        11,
        running=3,
        waiting=7,
        free_slots=5,
        free_blocks=77,
        remaining_prefill_tokens={5: 50, 1: 10},
        dispatched={"gw": 1},
    )
    fleet.hint("r0", hint, 0.5)
    load = only(fleet, 0.5)
    assert (load.free_slots, load.free_blocks, load.iteration) == (5, 77, 0.2)
    assert load.backlog == {5: 50.0, 1: 10.0, 0: 0.0}
    assert sum(load.waiting.values()) == 7
    assert sum(load.running.values()) == 3
    fleet.hint("r0", LoadHint("other-boot", 99, 0, 0, 0, 0, {}, {}), 0.6)
    fleet.hint("r0", LoadHint("r0-boot", 9, 0, 0, 0, 0, {}, {}), 0.6)
    fleet.hint("nobody", hint, 0.6)
    assert only(fleet, 0.6).free_slots == 5


def test_slots_of_our_own_that_ended_are_free_before_the_next_report_says_so(report) -> None:
    fleet = Fleet("gw")
    fleet.observe(report(completion_rate=None), 0.0)
    numbers = [fleet.dispatch("r0", 0, 1, 0.0) for _ in range(8)]
    fleet.observe(report(free_slots=0, running=8, dispatched={"gw": 8}, completion_rate=None), 0.1)
    assert only(fleet, 0.1).free_slots == 0
    fleet.end("r0", numbers[0])
    assert only(fleet, 0.1).free_slots == 1


def test_only_ready_fresh_uncordoned_replicas_are_chosen(report) -> None:
    fleet = Fleet("gw", interval=1.0)
    for name in ("a", "b", "c", "d", "e", "f"):
        fleet.observe(report(name), 0.0)
    fleet.observe(report("b", state=ReplicaState.DRAINING), 0.0)
    fleet.observe(report("c", cordoned=True), 0.0)
    fleet.cordoned = frozenset({"d"})
    assert [load.replica_id for load in fleet.loads(1.0)] == ["a", "e", "f"]
    for name in ("c", "d", "e"):
        fleet.observe(report(name, cordoned=name == "c"), 3.0)
    # a and f are older than three intervals; three of five are fresh.
    assert [load.replica_id for load in fleet.loads(3.5)] == ["e"]


def test_when_most_reports_stop_the_last_good_set_stays_in_force(report) -> None:
    fleet = Fleet("gw", interval=1.0)
    for name in ("a", "b", "c"):
        fleet.observe(report(name, classes=(ClassLoad(0, 0, 0, 500),)), 0.0)
    fleet.observe(report("b", state=ReplicaState.DRAINING), 0.5)
    assert [load.replica_id for load in fleet.loads(1.0)] == ["a", "c"]
    frozen = fleet.loads(60.0)
    assert [load.replica_id for load in frozen] == ["a", "c"]
    # One that appears meanwhile is fresh, and with it half of them are again.
    fleet.observe(report("d"), 60.0)
    assert [load.replica_id for load in fleet.loads(60.0)] == ["a", "c"], "one of three is below half"
    fleet.observe(report("a"), 60.5)
    assert [load.replica_id for load in fleet.loads(60.5)] == ["a", "d"]
    fleet.remove("a")
    fleet.remove("c")
    assert [load.replica_id for load in fleet.loads(60.5)] == ["d"]
    assert len(fleet) == 2


def test_the_ejected_are_left_out_for_their_time(report) -> None:
    fleet = Fleet("gw", interval=100.0)
    for name in ("a", "b"):
        fleet.observe(report(name), 0.0)
    for _ in range(5):
        fleet.outliers.server_error("a", 1.0)
    assert [load.replica_id for load in fleet.loads(2.0)] == ["b"]
    assert [load.replica_id for load in fleet.loads(7.0)] == ["a", "b"]
    assert [load.replica_id for load in fleet.loads(7.0, exclude=["b"])] == ["a"]
