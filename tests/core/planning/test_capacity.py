"""Knobs against an oracle of the test's own: every pair (n, p) is tried with the step-time formula of the load
report."""

import dataclasses
import math

import pytest
from headway_core.contract.reports import EngineLimits, StepTimeReport
from headway_core.planning.capacity import (
    Binding,
    MeasuredRange,
    ReplicaCapacity,
    Targets,
    Unreachable,
    Workload,
    solve,
    step_seconds,
)
from headway_core.slo import Bounds, Objectives, Range, TpotObjective, TtftObjective

WIDE = EngineLimits(4096, 8192, 131072, 16, 1_000_000)
LINE = StepTimeReport(0.012, 4e-5, 4e-5, 1.5e-7, 0.0, 0.0, 1, 1000, 256, 4096)


def measured(r, n, p, s, cached, o, c):
    """Seconds of an iteration, from the documentation of the report's fields, in a spelling of its own."""
    m = n + p
    fresh = s - cached
    pairs_per_token = (s * s - cached * cached) / 2 / fresh
    return (
        r.base
        + (r.per_row * m if m <= r.knee else r.per_row * r.knee + r.per_row_above * (m - r.knee))
        + r.per_context_token * n * c
        + r.per_prefill_pair * pairs_per_token * p
        + r.per_sampled_row * (n + p / fresh)
    )


def sweep(r, load, target, rho):
    """The largest n (in steps of 0.05) for which some p both feeds it and leaves the iteration within the target, and
    the least such p."""
    best, p = (0.0, 0.0), 1.0
    for step in range(1, 20 * WIDE.max_num_seqs):
        n = step / 20
        while rho * p / (load.prompt - load.cached) < n / load.output:  # prefill would fall behind
            p = max(p + 0.01, p * 1.002)
        if measured(r, n, p, load.prompt, load.cached, load.output, load.context) > target:
            return best
        best = (n, p)
    return best


MODELS = {
    "line": LINE,
    "floor and slope": StepTimeReport(0.008, 1e-6, 6e-5, 2e-7, 1e-9, 5e-5, 48, 1000, 256, 4096),
    "knee far out": StepTimeReport(0.02, 3e-5, 9e-5, 1e-7, 5e-10, 0.0, 400, 1000, 256, 4096),
    "context heavy": StepTimeReport(0.005, 2e-5, 4e-5, 4e-6, 2e-9, 1e-4, 32, 1000, 256, 4096),
    "paced": StepTimeReport(0.02, 1e-3, 1e-3, 1e-6, 0.0, 0.0, 1, 1000, 64, 512),
}
LOADS = {
    "chat": Workload(400, 0, 120, 460),
    "prompts ×4": Workload(1600, 0, 120, 1660),
    "cached": Workload(2000, 1500, 200, 2100),
    "long answers": Workload(64, 0, 800, 464),
    "fixed": Workload(64, 0, 32, 80),
}


@pytest.mark.parametrize("target", [0.03, 0.05, 0.12])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_knobs_equal_a_sweep_of_all_settings(model, load, target):
    found = solve(model, load, Targets(target, None), WIDE, rho=0.8)
    assert isinstance(found, ReplicaCapacity)
    n, p = sweep(model, load, target, 0.8)
    assert abs(found.sequences - n) <= 1.0, (found, n, p)
    p = max(p, WIDE.block_size)
    assert abs(found.budget - p) <= max(1.0, 0.05 * p), (found, n, p)
    assert found.iteration <= target * (1 + 1e-6)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_on_a_straight_line_the_answer_is_the_formula(load):
    a, b, d, e = LINE.base, LINE.per_row, LINE.per_row, LINE.per_context_token
    target, rho = 0.06, 0.8
    s, o = load.prompt - load.cached, load.output
    n = (target - a) / (b * s / (rho * o) + d + e * load.context)
    found = solve(LINE, load, Targets(target, None), WIDE, rho=rho)
    assert found.sequences == pytest.approx(n, rel=1e-4)
    assert found.budget == pytest.approx(max(16.0, n * s / (rho * o)), rel=1e-4)
    assert found.rate == pytest.approx(n / (o * target), rel=1e-3)


def test_the_step_time_is_the_one_of_the_report():
    for model in MODELS.values():
        for load in LOADS.values():
            for n, p in [(1, 0), (10, 30), (300, 900.5)]:
                want = measured(model, n, p, load.prompt, load.cached, load.output, load.context)
                assert step_seconds(model, load, p, n) == pytest.approx(want)


CHAT = LOADS["chat"]
BOUND = {
    "TPOT": (WIDE, Bounds(), None, Binding.TPOT, "TPOT 60ms"),
    "KV": (dataclasses.replace(WIDE, total_blocks=330), Bounds(), None, Binding.KV, "330 KV blocks"),
    "start-up": (dataclasses.replace(WIDE, max_num_seqs=9), Bounds(), None, Binding.CAPACITY, "max_num_seqs 9"),
    "budget": (
        dataclasses.replace(WIDE, prefill_token_budget=32),
        Bounds(),
        None,
        Binding.PREFILL,
        "32 prefill tokens",
    ),
    "bounds": (WIDE, Bounds(max_num_seqs=Range(1, 5)), None, Binding.BOUNDS, "spec.bounds.maxNumSeqs.max is 5"),
    "measured": (WIDE, Bounds(), MeasuredRange(12, 4096), Binding.EXPERIENCE, "12 sequences"),
}


@pytest.mark.parametrize(("capacity", "bounds", "measured", "binding", "words"), BOUND.values(), ids=BOUND)
def test_the_binding_term_is_named(capacity, bounds, measured, binding, words):
    found = solve(LINE, CHAT, Targets(0.06, None), capacity, bounds=bounds, measured=measured)
    assert found.binding is binding
    assert words in found.message
    if binding is Binding.KV:
        assert found.max_num_seqs == 330 // math.ceil((400 + 120) / 16)


def test_without_tpot_an_iteration_is_still_bounded():
    found = solve(LINE, CHAT, Targets(None, 5.0), WIDE)
    assert found.binding is Binding.ITERATION
    assert found.iteration <= 0.5 * (1 + 1e-6)


def test_what_no_setting_can_keep_is_refused_in_numbers():
    slow = dataclasses.replace(LINE, base=0.0308)
    found = solve(slow, CHAT, Targets(0.020, None), WIDE)
    assert isinstance(found, Unreachable)
    assert found.reason == "TPOTUnreachable"
    assert found.message == "TPOT 20ms unreachable: one sequence already takes 30.9ms"
    long = solve(LINE, Workload(100_000, 0, 100, 100_050), Targets(0.05, 1.0), WIDE)
    assert isinstance(long, Unreachable)
    assert long.reason == "TTFTUnreachable"
    assert "TTFT 1s unreachable: the 100000 prefill tokens" in long.message


def test_a_short_ttft_raises_the_budget_over_what_the_mix_needs():
    load = Workload(64, 0, 2000, 1064)  # next to no prefill on average
    lazy = solve(LINE, load, Targets(0.05, None), WIDE)
    prompt = solve(LINE, load, Targets(0.05, 0.1), WIDE)
    assert lazy.prefill_token_budget < 64 * 0.05 / 0.1 < prompt.prefill_token_budget
    assert prompt.iteration <= 0.05 * (1 + 1e-6)


SHORT = Workload(60, 50, 100, 110)  # ten tokens to compute for a hundred of answer
TIMID = MeasuredRange(20, 3)
FLOORS = {
    "a block": (WIDE, Bounds(), None, 0.05, TIMID, 16),
    "a larger block": (dataclasses.replace(WIDE, block_size=64), Bounds(), None, 0.05, TIMID, 64),
    "bounds.min": (WIDE, Bounds(prefill_token_budget=Range(100, None)), None, 0.05, TIMID, 100),
    "what TTFT needs": (WIDE, Bounds(), 0.01, 0.05, None, 100),
    "bounds.max comes first": (WIDE, Bounds(prefill_token_budget=Range(None, 7)), None, 0.05, TIMID, 7),
    "start-up capacity comes first": (dataclasses.replace(WIDE, prefill_token_budget=9), Bounds(), None, 0.05, None, 9),
    "TPOT leaves room for three tokens": (WIDE, Bounds(), None, 0.012 + 4 * 4e-5 + 110 * 1.5e-7, None, 16),
}


@pytest.mark.parametrize(("capacity", "bounds", "ttft", "tpot", "measured", "least"), FLOORS.values(), ids=FLOORS)
def test_a_short_cached_mix_still_leaves_a_block_for_a_prompt_that_is_neither(
    capacity, bounds, ttft, tpot, measured, least
):
    found = solve(LINE, SHORT, Targets(tpot, ttft), capacity, bounds=bounds, measured=measured)
    assert found.prefill_token_budget == least
    assert found.sequences >= 1 - 1e-6
    assert found.rate > 0


def test_a_minimum_that_breaks_the_promise_is_obeyed_and_said():
    found = solve(LINE, CHAT, Targets(0.02, None), WIDE, bounds=Bounds(max_num_seqs=Range(500, None)))
    assert found.max_num_seqs == 500
    assert "spec.bounds.maxNumSeqs.min 500 is more than" in found.out_of_bounds


def test_the_tightest_class_rules():
    objectives = [
        Objectives(TtftObjective(1.0, per_thousand_prompt_tokens=0.5), TpotObjective(0.05)),
        Objectives(TtftObjective(60.0)),
        Objectives(None, TpotObjective(0.2)),
    ]
    assert Targets.tightest(objectives, 2000) == Targets(0.05, 2.0)


def test_the_mix_is_weighted_by_requests_and_unknown_without_any(make):
    few = dataclasses.replace(make.mix, requests=10, prompt_tokens=1000.0)
    many = dataclasses.replace(make.mix, requests=90, prompt_tokens=100.0)
    assert Workload.of([few, many]).prompt == pytest.approx(190)
    assert Workload.of([dataclasses.replace(make.mix, requests=0)]) is None
    assert Workload.of([]) is None
