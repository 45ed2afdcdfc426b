"""Rates are measured where they are a capacity, and unknown elsewhere."""

import pytest
from headway_core.batching.iteration_plan import IterationPlan, IterationShape
from headway_core.batching.scheduler_load import SchedulerLoad
from headway_core.engine_rates import EngineRates


def plan(prefill, budget):
    return IterationPlan(1, (), (), IterationShape(prefill_tokens=prefill, decode_rows=4), prefill_budget=budget)


def load(free_slots):
    return SchedulerLoad(running=4, waiting=0, free_slots=free_slots, free_blocks=9, cached_blocks=0, classes=())


def test_nothing_seen_is_unknown():
    rates = EngineRates()
    assert rates.prefill(0.0) is None
    assert rates.completions(0.0) is None
    assert rates.block_releases(0.0) is None
    assert rates.iteration_seconds is None


def test_prefill_is_counted_only_where_the_budget_was_filled():
    rates = EngineRates()
    for i in range(10):
        rates.observe(plan(30, 512), load(1), seconds=0.05, finished=0, released_blocks=0, now=float(i))
    assert rates.prefill(10.0) is None
    for i in range(10, 14):
        rates.observe(plan(512, 512), load(1), seconds=0.1, finished=0, released_blocks=0, now=float(i))
    assert rates.prefill(14.0) == pytest.approx(5120)


def test_an_iteration_without_prefill_is_no_sign_of_slow_prefill():
    rates = EngineRates()
    for i in range(10):
        rates.observe(plan(0, 0), load(1), seconds=0.05, finished=0, released_blocks=0, now=float(i))
    assert rates.prefill(10.0) is None


def test_completions_are_counted_while_the_slots_are_taken():
    rates = EngineRates()
    for i in range(10):
        rates.observe(plan(0, 0), load(1), seconds=1.0, finished=5, released_blocks=2, now=float(i))
    assert rates.completions(10.0) is None
    assert rates.block_releases(10.0) == pytest.approx(2.0)
    for i in range(10, 14):
        rates.observe(plan(0, 0), load(0), seconds=0.5, finished=i % 2, released_blocks=2, now=float(i))
    assert rates.completions(14.0) == pytest.approx(1.0)


def test_no_completion_yet_bounds_a_rate_and_does_not_measure_it():
    rates = EngineRates()
    for i in range(10):
        rates.observe(plan(0, 0), load(0), seconds=1.0, finished=0, released_blocks=0, now=float(i))
    assert rates.completions(10.0) is None
    assert rates.block_releases(10.0) is None


def test_what_is_older_than_the_window_is_forgotten():
    rates = EngineRates(window=10.0)
    for i in range(5):
        rates.observe(plan(100, 100), load(0), seconds=0.1, finished=1, released_blocks=1, now=float(i))
    assert rates.prefill(5.0) == pytest.approx(1000)
    for i in range(9, 14):
        rates.observe(plan(100, 100), load(0), seconds=0.2, finished=1, released_blocks=1, now=float(i))
    assert rates.prefill(15.0) == pytest.approx(500)
    assert rates.prefill(40.0) is None
    assert 0.1 < rates.iteration_seconds < 0.2
