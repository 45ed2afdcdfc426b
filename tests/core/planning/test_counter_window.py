import random

import pytest
from headway_core.planning.counter_window import CounterReading, CounterWindow


def test_a_source_seen_once_has_no_rate():
    counters = CounterWindow(60)
    counters.record({"a": CounterReading("b1", {"x": 1_000_000})}, ["a"], 0)
    assert counters.total(60, 0) is None


def test_increments_not_levels():
    counters = CounterWindow(60)
    for now in range(0, 50, 10):
        counters.record({"a": CounterReading("b1", {"x": 1_000_000 + 5 * now})}, ["a"], now)
    total = counters.total(60, 40)
    assert (total.get("x"), total.seconds) == (200, 40)


def test_a_restart_counts_from_zero_and_never_negative():
    counters = CounterWindow(60)
    for now, boot, count in [(0, "b1", 100), (10, "b1", 150), (20, "b2", 30), (30, "b2", 80)]:
        counters.record({"a": CounterReading(boot, {"x": count})}, ["a"], now)
    assert counters.total(60, 30).get("x") == 50 + 30 + 50
    assert counters.steady_total(60, 30).get("x") / counters.steady_total(60, 30).seconds == 5, (
        "the span of the restart says nothing exact"
    )


def test_a_counter_that_fell_is_fresh_even_with_the_same_boot():
    counters = CounterWindow(60)
    counters.record({"a": CounterReading("b", {"x": 100})}, ["a"], 0)
    counters.record({"a": CounterReading("b", {"x": 7})}, ["a"], 10)
    assert counters.total(60, 10).get("x") == 7


def test_a_removed_source_takes_nothing_back_and_leaves_with_the_window():
    counters = CounterWindow(60)
    counters.record({"a": CounterReading("a", {"x": 0}), "b": CounterReading("b", {"x": 0})}, ["a", "b"], 0)
    counters.record({"a": CounterReading("a", {"x": 50}), "b": CounterReading("b", {"x": 50})}, ["a", "b"], 10)
    counters.record({"a": CounterReading("a", {"x": 100})}, ["a"], 20)
    assert counters.total(60, 20).get("x") == 150
    for now in range(30, 100, 10):
        counters.record({"a": CounterReading("a", {"x": 5 * now})}, ["a"], now)
    assert counters.total(60, 90).get("x") == 300


def test_a_newcomer_is_no_burst():
    counters = CounterWindow(60)
    counters.record({"a": CounterReading("a", {"x": 0})}, ["a"], 0)
    counters.record({"a": CounterReading("a", {"x": 50}), "b": CounterReading("b", {"x": 9_000})}, ["a", "b"], 10)
    assert counters.total(60, 10).get("x") == 50


def test_silence_is_not_zero_the_next_answer_covers_the_gap():
    counters = CounterWindow(60)
    both = lambda count: {"a": CounterReading("a", {"x": count}), "b": CounterReading("b", {"x": count})}  # noqa: E731
    counters.record(both(0), ["a", "b"], 0)
    counters.record(both(50), ["a", "b"], 10)
    counters.record({"a": CounterReading("a", {"x": 100})}, ["a", "b"], 20)
    steady = counters.steady_total(60, 20)
    assert steady.get("x") / steady.seconds == 10, "b's silence must not halve the rate"
    counters.record(both(150), ["a", "b"], 30)
    assert counters.total(60, 30).get("x") == 300
    steady = counters.steady_total(60, 30)
    assert (steady.get("x"), steady.seconds) == (300, 30)


def test_a_long_window_is_kept_in_few_spans_and_loses_nothing():
    counters = CounterWindow(3600)
    for now in range(0, 7200, 5):
        counters.record({"a": CounterReading("a", {"x": 3 * now})}, ["a"], now)
        assert len(counters._spans) <= 2 * 60
    total = counters.total(3600, 7195)
    assert total.get("x") == 3 * total.seconds
    assert 3500 <= total.seconds <= 3700
    recent = counters.total(900, 7195)
    assert recent.get("x") == 3 * recent.seconds
    assert 840 <= recent.seconds <= 960


def test_when_nothing_stood_still_a_lower_bound_is_better_than_nothing():
    counters = CounterWindow(60)
    counters.record({"a": CounterReading("a0", {"x": 0})}, ["a"], 0)
    for number in range(1, 5):
        counters.record({"a": CounterReading(f"a{number}", {"x": 10})}, ["a"], 10 * number)
    assert counters.steady_total(60, 40).get("x") == 40


@pytest.mark.parametrize("phase", [0.0, 1.3, 4.9])
@pytest.mark.parametrize("period", [2.0, 5.0])
def test_constant_load_reads_constant_while_gateways_are_killed_and_renamed(phase, period):
    """5 requests a second through two gateways; every 20 s one of them dies and comes back under a new name 3 s
    later."""
    rng = random.Random(7)
    sources = {"gw-0": 0, "gw-1": 0}
    names = 2
    rebirth = None
    counters = CounterWindow(60)
    polled, seen = phase, []
    for tick in range(3000):
        now = tick / 10
        if tick % 200 == 199:
            del sources[rng.choice(sorted(sources))]
            rebirth = now + 3
        if rebirth is not None and now >= rebirth:
            sources[f"gw-{names}"], rebirth = 0, None
            names += 1
        if tick % 2 == 0:  # one request each 0.2 s
            sources[rng.choice(sorted(sources))] += 1
        if now >= polled:
            polled += period
            counters.record(
                {name: CounterReading(name, {"x": count}) for name, count in sources.items()}, list(sources), now
            )
            total = counters.steady_total(60, now)
            if total is not None and total.seconds >= 20:
                seen.append(total.get("x") / total.seconds)
    assert len(seen) > 40
    assert 4.0 <= min(seen) <= max(seen) <= 6.0, (min(seen), max(seen))
