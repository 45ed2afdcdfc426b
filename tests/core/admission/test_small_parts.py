"""Ejection, Retry-After, token estimates, rates."""

from __future__ import annotations

import math
import random

import pytest
from headway_core.admission import Outliers, TokenEstimator
from headway_core.admission.outliers import LONGEST_EJECTION
from headway_core.admission.rate_meter import RateMeter
from headway_core.admission.retry_after import LONGEST, RetrySchedule, retry_after, spread


def test_consecutive_server_errors_eject_for_a_time_that_grows_and_success_starts_over() -> None:
    out = Outliers(errors=3)
    names = ["a", "b"]
    assert [out.server_error("a", 0.0) for _ in range(2)] == [False, False]
    out.success("a", 0.0)
    assert [out.server_error("a", 0.0) for _ in range(3)] == [False, False, True]
    assert out.ejected(names, 4.9) == {"a"}
    assert not out.server_error("a", 1.0), "answers that were under way change nothing"
    out.success("a", 1.0)
    assert out.ejected(names, 4.9) == {"a"}
    assert out.ejected(names, 5.0) == frozenset()
    # One error after its return is enough, and it stays away twice as long.
    assert out.server_error("a", 6.0)
    assert out.ejected(names, 15.9) == {"a"}
    assert out.ejected(names, 16.0) == frozenset()
    now = 16.0
    for _ in range(12):
        assert out.server_error("a", now)
        now += LONGEST_EJECTION
    assert out.ejected(names, now) == frozenset(), "no ejection lasts longer than the longest"
    out.success("a", now)
    assert not out.server_error("a", now)


def test_at_most_half_are_out_and_a_lone_replica_never() -> None:
    out = Outliers(errors=1)
    names = ["a", "b", "c", "d", "e"]
    for index, name in enumerate(names):
        out.server_error(name, index * 0.1)
    assert out.ejected(names, 1.0) == {"d", "e"}
    assert out.ejected(["a"], 1.0) == frozenset()


def test_retry_after_is_a_whole_number_bounded_jittered_and_never_falls_as_the_backlog_grows() -> None:
    rng = random.Random(3)
    for _ in range(300):
        jitter = rng.random()
        told = [retry_after(seconds, jitter) for seconds in (*(number / 7 for number in range(0, 600)), math.inf)]
        assert told == sorted(told)
        assert all(type(value) is int and 1 <= value <= LONGEST for value in told)
    assert retry_after(0.0, 0.5) == 1
    assert len({retry_after(20.0, spread(0, number)) for number in range(100)}) >= 8
    # At the bound too: an outage must not end in a stampede.
    assert len({retry_after(math.inf, spread(0, number)) for number in range(200)}) >= 5
    with pytest.raises(ValueError, match="NaN"):
        retry_after(math.nan, 0.5)
    with pytest.raises(ValueError, match="jitter"):
        retry_after(1.0, 1.0)


def test_each_one_told_to_come_back_is_given_a_later_time_until_the_earlier_had_theirs() -> None:
    schedule = RetrySchedule()
    assert schedule.wait(100.0) == 0.0
    waits = []
    for _ in range(5):
        waits.append(schedule.wait(100.0))
        schedule.add(1.0, 100.0)
    assert waits == sorted(waits)
    assert waits[4] > 4.0
    assert schedule.wait(100.0 + waits[4] + 60) == 0.0
    for _ in range(1000):
        schedule.add(5.0, 200.0)
    assert schedule.wait(200.0) == LONGEST


def test_jitter_is_uniform_and_the_same_when_asked_again() -> None:
    values = [spread(1, number) for number in range(2000)]
    assert values == [spread(1, number) for number in range(2000)]
    assert 0.47 < sum(values) / len(values) < 0.53
    assert min(values) >= 0
    assert max(values) < 1


def test_bytes_per_token_are_learned_per_model_ascii_and_other_apart() -> None:
    estimator = TokenEstimator()
    rng = random.Random(5)
    assert estimator.estimate("m", "a" * 400) == 100

    def text() -> tuple[str, int]:
        ascii_bytes, other = rng.randint(50, 4000), rng.randint(0, 1500)
        return "a" * ascii_bytes + "漢" * other, round(ascii_bytes / 5 + other * 3 / 2)

    for _ in range(200):
        estimator.observe("m", *text())
    errors = [abs(estimator.estimate("m", sample) - exact) / exact for sample, exact in (text() for _ in range(200))]
    assert max(errors) < 0.05
    assert estimator.estimate("other", "a" * 400) == 100
    # It follows when prompts change, and odd counts do not break it.
    for _ in range(300):
        estimator.observe("m", "b" * 1000, 500)
    assert estimator.estimate("m", "b" * 1000) == pytest.approx(500, rel=0.05)
    estimator.observe("m", "", 5)
    estimator.observe("m", "x", 0)
    estimator.observe("m", "y" * 10, 10**9)
    assert estimator.estimate("m", "") == 1
    assert estimator.estimate("m", "b" * 1000) <= 4000
    assert estimator.estimate("m", "\ud800 lone") >= 1


def test_a_rate_needs_a_past_and_forgets_it() -> None:
    meter = RateMeter(span=10.0)
    assert meter.rate(0.0) is None
    meter.add(1, 0.0)
    assert meter.rate(0.5) is None
    for step in range(1, 200):
        meter.add(2.0, step * 0.1)
    assert meter.rate(19.9) == pytest.approx(20.0, rel=0.1)
    assert meter.rate(70.0) == pytest.approx(0.0, abs=0.2)
