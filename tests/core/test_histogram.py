import math
import random

import pytest
from headway_core.histogram import GROWTH, SMALLEST, LogHistogram, bucket, bucket_middle


def test_a_quantile_is_within_half_a_bucket_of_the_truth():
    rng = random.Random(1)
    values = [rng.lognormvariate(-1, 2) for _ in range(5000)] + [70.0, 400.0]
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    for q in (0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        truth = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
        if truth > SMALLEST:
            assert histogram.quantile(q) == pytest.approx(truth, rel=math.sqrt(GROWTH) - 1 + 1e-9)


def test_bucket_edges_belong_to_the_bucket_below():
    for index in (1, 2, 50, 200):
        edge = SMALLEST * GROWTH**index
        assert bucket(edge) == index
        assert bucket(edge * 1.0001) == index + 1
        assert bucket(bucket_middle(index)) == index
    assert bucket(0.0) == bucket(SMALLEST) == 0


def test_nothing_observed_is_unknown_not_zero():
    assert LogHistogram().quantile(0.95) is None


def test_since_gives_what_was_added_and_merge_adds_it_back():
    histogram = LogHistogram()
    histogram.add(0.5, 3)
    earlier = dict(histogram.counts)
    histogram.add(0.5)
    histogram.add(2.0)
    newer = histogram.since(earlier)
    assert newer.total == 2
    restored = LogHistogram(earlier)
    restored.merge(newer.counts)
    assert restored.counts == histogram.counts
    assert LogHistogram({1: 5}).since({1: 9}).total == 0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_values_that_are_no_durations_are_refused(bad):
    with pytest.raises(ValueError):
        LogHistogram().add(bad)
