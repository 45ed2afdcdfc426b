"""The rules before one server, beside the exact optimum: small editions of `benchmarks/admission.py`."""

from __future__ import annotations

import random

import pytest
from headway_core.admission import RULES
from headway_core.admission.rules import LittlesLaw, Moore, OpenAdmission, PredictedTtft, QueuedTokens
from headway_sim.fifo import FifoConfig, run, works
from headway_sim.optimum import most_on_time
from headway_sim.synthetic import synthetic
from headway_sim.traces import TraceRequest


def optimum(trace, load: float) -> float:
    seconds, target = works(trace, load)
    return len(most_on_time([one.at for one in trace], seconds, target)) / len(trace)


@pytest.mark.parametrize(("family", "share", "roughly"), [("conv", 0.975, 0.96), ("code", 0.96, 0.94)])
def test_moore_comes_close_to_the_optimum_and_the_plain_rules_do_not(family: str, share: float, roughly: float) -> None:
    trace = synthetic(family, 2000, seed=3)
    for load in (0.9, 2.0):
        best = optimum(trace, load)
        found = {rule: run(trace, FifoConfig(load, rule)).attainment for rule in RULES.values()}
        assert best >= found[Moore()] > found[PredictedTtft()] > found[QueuedTokens()] > found[OpenAdmission()]
        assert found[PredictedTtft()] > found[LittlesLaw()] > found[OpenAdmission()]
        assert found[Moore()] >= share * best
        assert run(trace, FifoConfig(load, size_error=0.2, margin=0.05)).attainment >= roughly * best
        assert run(trace, FifoConfig(load, size_error=0.2, margin=None)).attainment >= roughly * best, "learned margin"
        assert found[PredictedTtft()] < 0.97 * best or load < 1


def test_checking_again_before_a_start_gains_where_more_is_offered_than_fits_and_costs_nothing_elsewhere() -> None:
    gained = 0
    for family, seed in (("conv", 1), ("conv", 2), ("code", 1)):
        trace = synthetic(family, 1500, seed=seed)
        for load in (0.5, 2.0):
            ahead, behind = (
                run(trace, FifoConfig(load, rule=Moore(anticipate=ahead_too))) for ahead_too in (True, False)
            )
            assert not ahead.late
            assert len(ahead.on_time) <= round(optimum(trace, load) * len(trace))
            if load < 1:
                assert len(ahead.on_time) >= len(behind.on_time)
            else:
                gained += len(ahead.on_time) - len(behind.on_time)
                assert 0 < ahead.refused_at_recheck < ahead.displaced / 4, "it stays the exception"
    assert gained >= 10


def test_nothing_that_is_decided_on_the_way_beats_the_optimum() -> None:
    rng = random.Random(9)
    looked_ahead = 0
    for seed in range(40):
        at, trace = 0.0, []
        for _ in range(rng.randint(150, 300)):
            at += rng.expovariate(1.0)
            trace.append(TraceRequest(at, rng.choice((50, 100, 200, 400, 800, 1600)), 1))
        load = rng.uniform(1.0, 4.0)
        seconds, target = works(trace, load)
        result = run(trace, FifoConfig(load, seed=seed))
        best = most_on_time([one.at for one in trace], seconds, target)
        assert len(result.on_time) <= len(best)
        assert not result.late
        assert len(result.on_time) + result.shed_on_arrival + result.displaced == len(trace), "each has one end"
        looked_ahead += result.refused_at_recheck > 0
    assert looked_ahead >= 10


def test_what_it_costs_is_shown_by_prompt_length() -> None:
    trace = synthetic("conv", 2000, seed=5)
    result = run(trace, FifoConfig(2.0))
    quartiles = result.by_quartile(trace)
    assert len(quartiles) == 4
    assert sum(quartiles) / 4 == pytest.approx(result.attainment, abs=0.002)
    assert quartiles[0] > 0.97
    assert quartiles[3] < 0.5, "few long prompts are spent for many short ones"
    assert result.displaced > 50
    assert result.waited_in_vain < 0.3, "they learn it early"
    assert not result.late, "with sizes known exactly nobody who is served is late"


def test_when_the_server_becomes_half_as_fast_promises_are_kept_after_a_moment() -> None:
    trace = synthetic("conv", 2000, seed=6)
    result = run(trace, FifoConfig(0.6, margin=None, slowdown=2.0))
    late_half = [index for index in result.late if index >= 1000]
    served_half = [index for index in result.on_time if index >= 1000]
    assert len(late_half) < 0.03 * len(served_half)
    assert len(served_half) > 0.8 * optimum(trace, 1.2) * 1000
    assert len(
        [index for index in run(trace, FifoConfig(0.6, OpenAdmission(), slowdown=2.0)).on_time if index >= 1000]
    ) < 0.4 * len(served_half)
