"""The lengths that a pool can carry, and what is made of them before a waiting request starts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from headway_core.admission import RULES, AdmissionController, AdmissionRule
from headway_core.admission.offered_lengths import OfferedLengths
from headway_core.admission.rules import Moore
from headway_core.admission.rules.moore import not_worth_starting
from headway_core.contract.header_names import ShedReason


def test_carried_is_the_longest_that_still_fits_taking_the_shortest_first() -> None:
    rng = random.Random(4)
    bounded = 0
    for _ in range(300):
        lengths = OfferedLengths(window=40, least=5)
        seen: list[tuple[float, int]] = []
        now = 0.0
        for _ in range(rng.randint(1, 90)):
            now += rng.expovariate(1.0)
            seen.append((now, rng.choice((10, 20, 20, 50, 300))))
            lengths.add(seen[-1][1], now)
        kept = seen[-40:]
        now += rng.random()
        rate = rng.uniform(10, 120)
        carried = lengths.carried(rate, now)
        capacity, sizes = rate * (now - kept[0][0]), sorted(tokens for _, tokens in kept)
        fits = [total <= capacity for total in itertools.accumulate(sizes)]
        if len(kept) < 5 or all(fits):
            assert carried is None
        else:
            assert carried == sizes[fits.index(False)]
            bounded += 1
    assert 100 < bounded < 250


def test_a_window_that_says_something_before_it_has_seen_anything_is_refused() -> None:
    for window, least in ((10, 0), (10, 11)):
        with pytest.raises(ValueError, match="least"):
            OfferedLengths(window, least)


def test_a_request_starts_unless_longer_ones_than_can_be_carried_meet_a_queue_that_fills() -> None:
    assert not not_worth_starting(100_000, None, 1.0), "everything offered fits"
    assert not not_worth_starting(1000, 1000, 5.0), "no longer than what can be carried, however full the queue is"
    assert not_worth_starting(2000, 1000, 0.8)
    assert not not_worth_starting(2000, 1000, 0.7)
    assert not not_worth_starting(100_000, 1000, 0.05), "hardly anybody waits"


@pytest.fixture
def overloaded(priority_class, request_of):
    """A controller that was offered twice what 1,000 tokens/s carry (lengths up to 1,300 fit), its class, and the
    instant."""

    def make(rule: AdmissionRule = Moore(), priority: int = 0, **options):
        slo = priority_class(priority, 10.0)
        admission = AdmissionController(rule, margin=0.0, **options)
        for index in range(1000):
            admission.offered(request_of(1 + index % 20 * 100, arrival=index / 2.1, slo=slo), index / 2.1)
        return admission, slo, 999 / 2.1

    return make


def test_a_long_one_is_refused_before_it_starts_only_when_the_queue_is_nearly_full(
    overloaded, request_of, busy
) -> None:
    admission, slo, now = overloaded()
    long = request_of(1900, arrival=now - 9.0, slo=slo)
    short = request_of(1300, arrival=now - 9.0, slo=slo)

    def load(first, behind: int):
        return busy(first, *(request_of(500, arrival=now - 1.0, slo=slo) for _ in range(behind)), backlog=1.0)

    refused = admission.recheck(long, load(long, 14), [slo], now)
    assert refused is not None
    assert (refused.request_id, refused.reason) == (long.request_id, ShedReason.OUTRANKED)
    assert refused.contended
    assert admission.recheck(long, load(long, 14), [slo], now) == refused, "asking changes nothing"
    assert admission.recheck(long, load(long, 10), [slo], now) is None, "those behind it fit"
    assert admission.recheck(long, load(long, 0), [slo], now) is None
    assert admission.recheck(short, load(short, 14), [slo], now) is None, "lengths like this can be carried"
    came_back = request_of(1900, arrival=now - 9.0, slo=slo, retry=True)
    assert admission.recheck(came_back, load(came_back, 14), [slo], now) is None
    assert admission.recheck(long, replace(load(long, 14), draining=True), [slo], now) is None, (
        "nobody is expected any more"
    )


@pytest.mark.parametrize(
    "options",
    [{"rule": Moore(anticipate=False)}, *({"rule": rule} for rule in RULES.values() if rule != Moore())],
)
def test_only_moores_rule_looks_ahead_and_only_where_requests_count_alike(
    overloaded, request_of, busy, options
) -> None:
    admission, slo, now = overloaded(**options)
    long = request_of(1900, arrival=now - 9.0, slo=slo)
    load = busy(long, *(request_of(500, arrival=now - 1.0, slo=slo) for _ in range(14)), backlog=1.0)
    assert admission.recheck(long, load, [slo], now) is None


def test_while_the_pool_carries_all_that_is_offered_nobody_is_refused_before_it_starts(
    overloaded, request_of, busy
) -> None:
    admission, slo, now = overloaded()
    long = request_of(1900, arrival=now - 9.0, slo=slo)
    crowd = [request_of(1000, arrival=now - 1.0, slo=slo) for _ in range(14)]
    assert admission.recheck(long, busy(long, *crowd, backlog=1.0), [slo], now) is not None
    assert admission.recheck(long, busy(long, *crowd, backlog=1.0, prefill_rate=2100.0), [slo], now) is None
    assert admission.recheck(long, busy(long, *crowd, backlog=1.0, prefill_rate=None), [slo], now) is None, (
        "unknown is no reason"
    )


def test_what_higher_classes_take_is_not_there_for_a_lower_one(priority_class, request_of, busy) -> None:
    low, high = priority_class(0, 10.0), priority_class(9, 10.0)
    admission = AdmissionController(margin=0.0)
    for index in range(1000):
        admission.offered(request_of(900, arrival=float(index), slo=low), float(index))
        admission.offered(request_of(600 if index % 2 else 200, arrival=float(index), slo=high), float(index))
    now = 999.0
    long = request_of(2000, arrival=now - 9.0, slo=low)
    waiting = (long, *(request_of(700, arrival=now - 1.0, slo=low) for _ in range(5)))
    alone = busy(*waiting, backlog=1.0)
    charged = replace(alone, higher_work=admission.higher_work([low, high], now))
    assert admission.recheck(long, alone, [low, high], now) is None, "900 of 1,000 tokens a second: all of it fits"
    assert admission.recheck(long, charged, [low, high], now) is not None
