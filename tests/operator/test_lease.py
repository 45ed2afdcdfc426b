"""The hold on the lease, under a clock of the test's own: real time is only what a call on the loopback takes."""

import asyncio

import pytest
from headway_operator.kube import Kube, KubeError
from headway_operator.lease import DURATION, Lease


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
async def pair(api_server):
    """Two operators with one clock."""
    kube, clock = Kube(), Clock()
    yield Lease(kube, "ns", "l", "one", clock), Lease(kube, "ns", "l", "two", clock), clock
    await kube.close()


async def test_the_first_holds_it_and_the_second_does_not(api_server, pair):
    one, two, clock = pair
    await one.attempt()
    await two.attempt()
    assert (one.held, two.held) == (True, False)
    for _ in range(20):
        clock.now += 2
        await one.attempt()
        await two.attempt()
        assert (one.held, two.held) == (True, False)
    assert api_server.leases["l"]["spec"]["leaseTransitions"] == 1
    assert one.term == 1


async def test_silence_is_waited_out_and_the_holder_stops_first(pair):
    one, two, clock = pair
    await one.attempt()
    await two.attempt()
    both, taken_at = [], None
    for tick in range(40):
        clock.now += 0.5
        await two.attempt()
        both.append(one.held and two.held)
        if two.held and taken_at is None:
            taken_at = (tick + 1) * 0.5
    assert not any(both)
    assert DURATION <= taken_at <= DURATION + 2


async def test_given_back_it_is_taken_at_once(pair):
    one, two, _ = pair
    await one.attempt()
    await two.attempt()
    await one.release()
    assert not one.held
    await two.attempt()
    assert two.held
    assert two.term == 1


async def test_an_outage_ends_the_hold_and_the_same_holder_goes_on_with_its_term(api_server, pair):
    one, _, clock = pair
    await one.attempt()
    api_server.down = True
    clock.now += DURATION * 2 / 3 + 1
    with pytest.raises(KubeError):
        await one.attempt()
    assert not one.held
    api_server.down = False
    clock.now += 30
    await one.attempt()
    assert one.held
    assert one.term == 1, "nobody acted in between: what is remembered still holds"


async def test_coming_back_after_another_is_a_new_term(pair):
    one, two, clock = pair
    await one.attempt()
    await two.attempt()
    clock.now += DURATION + 1
    await two.attempt()
    await one.attempt()
    assert (one.held, two.held) == (False, True)
    await two.release()
    await one.attempt()
    assert one.held
    assert one.term == 2


async def test_two_that_grab_at_the_same_moment(pair):
    """Both have read the same record; only one replacement fits its resourceVersion."""
    one, two, _ = pair
    await one.attempt()
    await two.attempt()
    await one.release()
    await asyncio.gather(one.attempt(), two.attempt())
    assert [one.held, two.held].count(True) == 1
