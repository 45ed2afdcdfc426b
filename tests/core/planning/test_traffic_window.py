import dataclasses

from headway_core.contract.reports import ClassReport, GatewayReport, PoolReport, ReplicaState
from headway_core.planning.traffic_window import TrafficWindow


def report(boot, **counts):
    return GatewayReport(
        "gw", boot, 1, 0.0, ReplicaState.READY, (PoolReport("chat-runtime", {"default": ClassReport(**counts)}),)
    )


def test_books_of_two_gateways_are_differenced_and_summed():
    window = TrafficWindow("chat-runtime", 60.0)
    start = report(
        "g",
        offered=1000,
        retries=100,
        outcomes={"ok": 900},
        attained={"all": 800},
        judged={"all": 900},
        ttft={5: 900},
        tpot={7: 3},
    )
    later = report(
        "g",
        offered=1060,
        retries=110,
        outcomes={"ok": 950, "shed": 10},
        shed={"slot_wait": 10},
        attained={"all": 840},
        judged={"all": 950},
        ttft={5: 940, 6: 10},
        tpot={7: 3},
    )
    window.record({"a": start, "b": start}, ["a", "b"], 0.0)
    assert window.traffic(0.0) is None
    window.record({"a": later, "b": later}, ["a", "b"], 10.0)
    traffic = window.traffic(10.0)
    known = traffic.classes["default"]
    assert (known.offered, known.retries, known.shed) == (120, 20, 20)
    assert (dict(known.outcomes), dict(known.attained)) == ({"ok": 100, "shed": 20}, {"all": 80})
    assert known.ttft.counts == {5: 80, 6: 20}
    assert traffic.demand.rate == 10.0, "retries are no demand"


def test_other_pools_do_not_count():
    window = TrafficWindow("other", 60.0)
    for now, offered in [(0.0, 0), (10.0, 500)]:
        window.record({"a": report("g", offered=offered)}, ["a"], now)
    traffic = window.traffic(10.0)
    assert (traffic.demand.count, traffic.classes) == (0, {})


def test_the_answer_to_a_restart_is_the_same_in_every_figure():
    window = TrafficWindow("chat-runtime", 60.0)
    window.record({"a": report("g1", offered=500, ttft={5: 500})}, ["a"], 0.0)
    window.record({"a": dataclasses.replace(report("g2", offered=20, ttft={5: 20}))}, ["a"], 10.0)
    known = window.traffic(10.0).classes["default"]
    assert (known.offered, known.ttft.total) == (20, 20)


def test_a_reading_that_is_looked_at_twice_counts_once():
    window = TrafficWindow("chat-runtime", 60.0)
    for now, offered in [(0.0, 0), (10.0, 50), (10.0, 50), (20.0, 100)]:
        window.record({"a": report("g", offered=offered)}, ["a"], now)
    traffic = window.traffic(20.0)
    assert (traffic.demand.count, traffic.seconds) == (100, 20.0)
