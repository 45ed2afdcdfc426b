"""Predicted TTFT: the longest of three waits, plus the own prompt, plus an iteration; and what is unknown stays unknown."""

from __future__ import annotations

import pytest
from headway_core.admission.load import Load
from headway_core.admission.prediction import forecast, predict
from headway_core.contract import ShedReason


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
    replica = replica_load(backlog={10: 1000.0, 0: 5000.0}, waiting={10: 1, 0: 7}, running={10: 2, 0: 3}, free_slots=0, completion_rate=1.0)
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
    assert (forecast([request_of()], Load((replica_load(**running, **changes),)), {})[0].ttft is not None) is known


def test_a_queue_is_laid_over_the_replicas_that_are_ready_first(request_of, replica_load) -> None:
    load = Load((replica_load("a", backlog={0: 1000.0}), replica_load("b", prefill_rate=500.0)))
    requests = [request_of(1000) for _ in range(4)]
    # b from 0 to 2, a from 1 to 2, then both again at 2.
    assert [one.prefill_wait for one in forecast(requests, load, {})] == [0.0, 1.0, 2.0, 2.0]


def test_lower_classes_are_charged_for_what_higher_ones_will_send_up_to_their_own_share(priority_class, request_of, replica_load) -> None:
    low = request_of(slo=priority_class(0))
    ahead = {0: 2000.0}
    for higher, stretch in ((0.0, 1.0), (500.0, 2.0), (5000.0, 4.0)):
        load = Load((replica_load(backlog=ahead, running={0: 1}),), higher_work={0: higher})
        prediction = forecast([low], load, {0: 0.25, 10: 0.75})[0]
        assert prediction.prefill_wait == pytest.approx(2.0 * stretch)


def test_cached_tokens_are_not_computed_again(request_of, replica_load) -> None:
    assert predict(request_of(1000, cached_tokens=900), replica_load()).own == pytest.approx(0.1)
    with pytest.raises(ValueError, match="last one"):
        request_of(1000, cached_tokens=1000)
