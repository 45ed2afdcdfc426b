"""Predicted TTFT: the longest of three waits, plus the own prompt, plus an iteration; and what is unknown stays
unknown."""

from __future__ import annotations

import random

import pytest
from headway_core.admission.pool_load import PoolLoad
from headway_core.admission.prediction import Forecast, predict
from headway_core.contract.header_names import ShedReason


def test_the_longest_wait_counts_and_is_named(request_of, replica_load) -> None:
    prefill = predict(request_of(500), replica_load(backlog={0: 2000.0}, running={0: 1}, iteration=0.1))
    assert prefill.ttft == pytest.approx(2.0 + 0.5 + 0.1)
    assert prefill.binding is ShedReason.PREFILL_WAIT
    # Five wait for a slot before it, one slot is free, 0.5 come free a second.
    slots = predict(request_of(500), replica_load(waiting={0: 5}, running={0: 9}, free_slots=1, completion_rate=0.5))
    assert slots.wait == pytest.approx((5 + 1 - 1) / 0.5)
    assert slots.binding is ShedReason.SLOT_WAIT
    # 501 tokens need 32 blocks of 16; 12 are free, 4 come free a second.
    blocks = predict(request_of(500), replica_load(running={0: 1}, free_blocks=12, block_release_rate=4.0))
    assert blocks.wait == pytest.approx(20 / 4.0)
    assert blocks.binding is ShedReason.BLOCK_WAIT


def test_what_a_class_finds_in_the_engine_is_its_own_and_higher_work(priority_class, request_of, replica_load) -> None:
    replica = replica_load(
        backlog={10: 1000.0, 0: 5000.0}, waiting={10: 1, 0: 7}, running={10: 2, 0: 3}, free_slots=0, completion_rate=1.0
    )
    high = predict(request_of(slo=priority_class(10)), replica)
    low = predict(request_of(slo=priority_class(0)), replica)
    assert (high.prefill_wait, low.prefill_wait) == (1.0, 6.0)
    # A higher class may take the slots of the three that run below it.
    assert (high.slot_wait, low.slot_wait) == (0.0, 9.0)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"prefill_rate": None}, False),
        ({"prefill_rate": None, "backlog": {0: 10.0}}, False),
        ({"completion_rate": None}, True),
        ({"completion_rate": None, "free_slots": 0}, False),
        ({"block_release_rate": None}, True),
        ({"block_release_rate": None, "free_blocks": 0}, False),
    ],
)
def test_an_unknown_rate_is_never_taken_for_a_number(request_of, replica_load, changes, known) -> None:
    running = {"running": {0: 1}}
    assert (predict(request_of(), replica_load(**running, **changes)).ttft is not None) is known
    assert (Forecast(PoolLoad((replica_load(**running, **changes),)), {}).add(request_of()).ttft is not None) is known


def test_a_queue_is_laid_over_the_replicas_that_are_ready_first(request_of, replica_load) -> None:
    load = PoolLoad((replica_load("a", backlog={0: 1000.0}), replica_load("b", prefill_rate=500.0)))
    laid_out = Forecast(load, {})
    # b from 0 to 2, a from 1 to 2, then both again at 2.
    assert [laid_out.add(request_of(1000)).prefill_wait for _ in range(4)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("binding", ["prefill", "slots", "blocks", "nothing", "unknown"])
def test_the_first_late_one_is_the_first_whose_own_prediction_is_late(
    priority_class, request_of, replica_load, binding
) -> None:
    changes = {
        "prefill": {"backlog": {5: 700.0, 0: 900.0}},
        "slots": {"free_slots": -2, "completion_rate": 3.0},
        "blocks": {"free_blocks": 5, "block_release_rate": 40.0},
        "nothing": {},
        "unknown": {"prefill_rate": None, "completion_rate": None, "free_slots": 0, "block_release_rate": None},
    }[binding]
    load = PoolLoad(
        (replica_load("a", running={0: 1}, iteration=0.1, **changes), replica_load("b", running={0: 1}, **changes))
    )
    rng = random.Random(3)
    found = set()
    for _ in range(200):
        order = [
            request_of(rng.randint(1, 1500), rng.uniform(-4, 0), priority_class(rank, 5.0))
            for rank in (5, 5, 5, 0, 0, 0, 0, 0)
        ]
        laid_out, expected = Forecast(load, {0: 0.5, 5: 0.5}), None
        for index, one in enumerate(order):
            prediction = laid_out.add(one)
            if expected is None and prediction.at_least > one.deadline - 0.5:
                expected = (index, prediction)
        late = Forecast(load, {0: 0.5, 5: 0.5}).first_late(order, 0.0, lambda _: 0.5)
        assert late == expected
        found.add(late and late.place)
    assert len(found) > 2 or binding in ("nothing", "unknown")


def test_lower_classes_are_charged_for_what_higher_ones_will_send_up_to_their_own_share(
    priority_class, request_of, replica_load
) -> None:
    low = request_of(slo=priority_class(0))
    ahead = {0: 2000.0}
    for higher, factor in ((0.0, 1.0), (500.0, 2.0), (5000.0, 4.0)):
        load = PoolLoad((replica_load(backlog=ahead, running={0: 1}),), higher_work={0: higher})
        prediction = Forecast(load, {0: 0.25, 10: 0.75}).add(low)
        assert prediction.prefill_wait == pytest.approx(2.0 * factor)


def test_cached_tokens_are_not_computed_again(request_of, replica_load) -> None:
    assert predict(request_of(1000, cached_tokens=900), replica_load()).own == pytest.approx(0.1)
    with pytest.raises(ValueError, match="last one"):
        request_of(1000, cached_tokens=1000)
