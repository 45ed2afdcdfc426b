"""The admission queue: order, bounds, ageing, and that everybody leaves exactly once."""

from __future__ import annotations

import math
import random

import pytest
from headway_core.admission import AdmissionQueue, QueueLimits


def test_the_highest_class_goes_first_and_within_a_class_the_order_is_that_of_arrival(
    priority_class, request_of
) -> None:
    low, high = priority_class(0), priority_class(5)
    queue = AdmissionQueue()
    made = [request_of(arrival=at, slo=slo) for at, slo in ((0, low), (1, high), (2, low), (3, high), (3, high))]
    for one in made:
        queue.push(one)
    assert [one.request_id for one in queue.order()] == [made[i].request_id for i in (1, 3, 4, 0, 2)]
    served = []
    while (first := queue.next(now=3.0)) is not None:
        served.append(first.request_id)
        queue.leave(first.request_id)
        queue.served(first)
    assert served == [made[i].request_id for i in (1, 3, 4, 0, 2)]


def test_one_that_comes_back_keeps_its_place(request_of) -> None:
    queue = AdmissionQueue()
    first, second, third = (request_of(arrival=at) for at in (0.0, 1.0, 2.0))
    for one in (second, third, first):
        queue.push(one)
    assert list(queue.order()) == [first, second, third]


def test_bounds_in_requests_and_bytes_hold_and_room_comes_back(request_of) -> None:
    queue = AdmissionQueue(QueueLimits(requests=2, bytes=100, seconds=10))
    big, small, other = request_of(size_bytes=90), request_of(size_bytes=10), request_of(size_bytes=1)
    queue.push(big)
    assert not queue.fits(request_of(size_bytes=11))
    queue.push(small)
    assert not queue.fits(other)
    with pytest.raises(ValueError, match="full"):
        queue.push(other)
    with pytest.raises(ValueError, match="already"):
        queue.push(small)
    assert queue.leave(big.request_id) is big
    assert queue.bytes == 10
    queue.push(other)
    assert len(queue) == 2


def test_bounds_in_seconds_are_the_classs_own_or_else_the_queues(priority_class, request_of) -> None:
    queue = AdmissionQueue(QueueLimits(seconds=10))
    patient = request_of(slo=priority_class(1, max_queue_time=60.0))
    usual = request_of(slo=priority_class(0))
    urgent = request_of(slo=priority_class(0))
    queue.push(patient, expiry=1000.0)
    queue.push(usual)
    queue.push(urgent, expiry=2.0)
    assert queue.expire(1.9) == []
    assert queue.expire(2.0) == [urgent]
    assert queue.expire(59.0) == [usual]
    assert queue.expire(60.0) == [patient], "no prediction may extend the class's limit"
    assert len(queue) == 0


def test_everybody_leaves_exactly_once_whatever_happens(priority_class, request_of) -> None:
    rng = random.Random(7)
    classes = [priority_class(rank, max_queue_time=rng.uniform(1, 5)) for rank in range(3)]
    queue = AdmissionQueue(QueueLimits(requests=50, bytes=10_000, seconds=5))
    entered: set[int] = set()
    left: list[int] = []
    now = 0.0
    for _ in range(6000):
        now += rng.expovariate(20)
        action = rng.random()
        if action < 0.5:
            one = request_of(
                tokens=rng.randint(1, 500), arrival=now, slo=rng.choice(classes), size_bytes=rng.randint(0, 400)
            )
            if queue.fits(one):
                queue.push(one, now + rng.uniform(0.01, 10))
                entered.add(one.request_id)
        elif action < 0.7 and len(queue):
            first = queue.next(now)
            assert first is not None
            queue.leave(first.request_id)
            queue.served(first)
            left.append(first.request_id)
        elif action < 0.8 and entered:
            which = rng.choice(sorted(entered))
            if queue.leave(which) is not None:
                left.append(which)
        elif action < 0.9 and len(queue):
            one = rng.choice(queue.order())
            queue.leave(one.request_id)
            queue.push(one, now + rng.uniform(0, 3))
        else:
            left += [one.request_id for one in queue.expire(now)]
        queue.check()
        assert queue.bytes <= 10_000
        assert len(queue) <= 50
    left += [one.request_id for one in queue.expire(math.inf)]
    assert sorted(left) == sorted(entered)
    assert len(left) > 1500
    assert (len(queue), queue.bytes, queue.order()) == (0, 0, [])


@pytest.mark.parametrize("shares", [(9, 1), (3, 1)])
def test_a_low_class_under_an_endless_stream_of_higher_ones_is_served_within_the_documented_bound(
    priority_class, request_of, shares
) -> None:
    high, low = (
        priority_class(10, shares=shares[0]),
        priority_class(0, shares=shares[1], target=None, max_queue_time=1e6),
    )
    queue = AdmissionQueue(QueueLimits(seconds=1e6), ageing=5.0)
    rate, now = 1000.0, 0.0
    waiting_low = [request_of(tokens=2000, arrival=0.0, slo=low) for _ in range(4)]
    for one in waiting_low:
        queue.push(one)
    started: dict[int, float] = {}
    given = {10: 0, 0: 0}
    while len(started) < len(waiting_low):
        while queue.depth(10) < 3:
            queue.push(request_of(tokens=500, arrival=now, slo=high))
        first = queue.next(now)
        assert first is not None
        queue.leave(first.request_id)
        queue.served(first)
        if first.priority == 0:
            started[first.request_id] = now
        given[first.priority] += first.prompt_tokens
        now += first.prompt_tokens / rate
        assert now < 1000, "starved"
    total = sum(shares) / shares[1]
    for place, one in enumerate(waiting_low):
        ahead = place * 2000
        assert started[one.request_id] <= 5.0 + (ahead + 2000) * total / rate + 2000 / rate
    assert given[0] / (given[0] + given[10]) <= 1.2 / total, "ageing guarantees a share, it does not reverse the order"


def test_a_fresh_low_request_never_goes_before_a_higher_class(priority_class, request_of) -> None:
    high, low = priority_class(10), priority_class(0)
    queue = AdmissionQueue(ageing=5.0)
    queue.push(request_of(tokens=10, arrival=0.0, slo=low))
    for step in range(40):
        now = step * 0.1
        queue.push(request_of(tokens=1000, arrival=now, slo=high))
        first = queue.next(now)
        assert first is not None
        assert first.priority == 10
        queue.leave(first.request_id)
        queue.served(first)
