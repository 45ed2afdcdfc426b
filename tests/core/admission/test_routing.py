"""Which replica serves: least predicted TTFT, prefixes, windows, and no crowd on a newcomer."""

from __future__ import annotations

from headway_core.admission import Fleet, PoolAdmission, PoolLoad, PrefixIndex, prefix_chain
from headway_core.admission.routing import choose
from headway_core.contract.header_names import tenant_salt


def test_the_least_predicted_ttft_wins_and_equals_go_to_the_one_with_less_in_flight(request_of, replica_load) -> None:
    slow = replica_load("slow", prefill_rate=500.0)
    fast = replica_load("fast", backlog={0: 400.0}, running={0: 1}, budget=512)
    assert choose(request_of(1000), PoolLoad((slow, fast))).replica_id == "fast"
    pair = PoolLoad((replica_load("a", in_flight=3), replica_load("b", in_flight=1)))
    assert choose(request_of(1000), pair).replica_id == "b"


def test_a_warm_replica_wins_as_long_as_it_saves_more_than_it_makes_one_wait(request_of, replica_load) -> None:
    one = request_of(1000, prefix=(1, 2, 3), prefix_chunk_tokens=300)
    cold = replica_load("cold")
    for backlog, winner in ((500.0, "warm"), (1000.0, "cold")):
        warm = replica_load("warm", backlog={0: backlog}, running={0: 1}, budget=2000)
        route = choose(one, PoolLoad((cold, warm)), {"warm": 3})
        assert route.replica_id == winner
    assert choose(one, PoolLoad((replica_load("warm"),)), {"warm": 3}).cached_tokens == 900


def test_windows_of_tokens_slots_and_blocks_keep_the_engines_queue_short(request_of, replica_load) -> None:
    one = request_of(1000)
    running = {"running": {0: 1}}
    assert replica_load(backlog={0: 512.0}, budget=512, **running).accepts(one)
    assert not replica_load(backlog={0: 513.0}, budget=512, **running).accepts(one)
    assert replica_load(backlog={0: 600.0}, budget=512, slack=0.1, **running).accepts(one), (
        "what is computed before it can arrive"
    )
    assert not replica_load(free_slots=2, waiting={0: 2}, **running).accepts(one)
    assert replica_load(free_slots=0, waiting={}, completion_rate=10.0, slack=0.1, **running).accepts(one)
    assert not replica_load(free_blocks=62, **running).accepts(one)
    assert replica_load(free_blocks=63, **running).accepts(one)
    assert choose(one, PoolLoad((replica_load(free_slots=0, **running),))) is None


def test_a_higher_class_looks_past_lower_work_and_may_take_a_lower_slot(
    priority_class, request_of, replica_load
) -> None:
    full = replica_load(backlog={0: 9000.0}, waiting={0: 5}, running={0: 8}, free_slots=0, budget=512)
    assert full.accepts(request_of(1000, slo=priority_class(10)))
    assert not full.accepts(request_of(1000, slo=priority_class(0)))


def test_an_unmeasured_replica_is_tried_when_idle_and_is_otherwise_the_last_choice(request_of, replica_load) -> None:
    known = replica_load("known", backlog={0: 300.0}, running={0: 1}, budget=512)
    unknown = replica_load("unknown", prefill_rate=None)
    assert choose(request_of(100), PoolLoad((known, unknown))).replica_id == "unknown"
    occupied = replica_load("unknown", prefill_rate=None, in_flight=1, running={0: 1})
    assert choose(request_of(100), PoolLoad((known, occupied))).replica_id == "known"


def test_a_crowd_does_not_fall_upon_a_replica_that_has_just_come_up(priority_class, request_of, report) -> None:
    slo = priority_class(target=100.0)
    admission = PoolAdmission((slo,), "gw", fleet=Fleet("gw", interval=1.0))
    admission.report(report("old"), 0.0)
    for _ in range(60):
        admission.submit(request_of(400, slo=slo), 0.0)
    held = len(admission.queue)
    assert held > 50
    admission.report(report("new", prefill_rate=None), 0.1)
    sent = admission.poll(0.1).dispatches
    # One iteration's budget of 512, in prompts of 400, and no more until it has reported again.
    assert [one.replica_id for one in sent].count("new") == 2
    assert not [one for one in admission.poll(0.2).dispatches if one.replica_id == "new"]
    assert len(admission.queue) >= held - 4


def test_prefix_chains_tell_heads_and_tenants_apart() -> None:
    prompt = bytes(range(256)) * 16
    chain = prefix_chain(prompt)
    assert len(chain) == 4
    assert prefix_chain(prompt + b"more") == chain
    other = prefix_chain(prompt[:2048] + b"x" + prompt[2049:])
    assert other[:2] == chain[:2]
    assert not set(other[2:]) & set(chain)
    assert not set(prefix_chain(prompt, tenant_salt("a"))) & set(prefix_chain(prompt, tenant_salt("b")))
    assert prefix_chain(b"short") == ()
    assert len(prefix_chain(b"a" * 10_000_000)) == 256


def test_the_index_remembers_who_was_sent_what_within_its_bound() -> None:
    index = PrefixIndex(capacity=5)
    index.sent((1, 2, 3), "a")
    index.sent((1, 2, 9), "b")
    assert index.matches((1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert index.matches((7, 1)) == {}
    index.sent((1, 20, 21), "c")
    assert len(index) == 5
    assert index.matches((1, 20, 21)) == {"a": 1, "b": 1, "c": 3}
    index.forget("c")
    assert index.matches((1, 20, 21)) == {"a": 1, "b": 1}
    index.forget("a")
    index.forget("b")
    assert len(index) == 0
