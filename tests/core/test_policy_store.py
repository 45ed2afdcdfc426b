import dataclasses

import pytest
from headway_core.contract.documents import dump
from headway_core.contract.policy import Knobs, Policy, Pool
from headway_core.policy_store import PolicyStore
from headway_core.slo import Objectives, PriorityClass, TtftObjective

POLICY = Policy(
    revision=5,
    slo_uid="u",
    generation=1,
    pool=Pool("chat"),
    classes=(PriorityClass("default", 0, Objectives(TtftObjective(1.0))),),
    default_class="default",
    knobs=Knobs(max_num_seqs=8),
)


def revised(revision, pool="chat"):
    return dataclasses.replace(POLICY, revision=revision, pool=Pool(pool))


def test_only_a_higher_revision_comes_into_force():
    store = PolicyStore()
    assert store.offer({"chat.json": dump(POLICY)}, 1.0) == (POLICY,)
    assert store.offer({"chat.json": dump(POLICY)}, 2.0) == ()
    assert store.offer({"chat.json": dump(revised(4))}, 3.0) == ()
    assert store.policies["chat"].revision == 5
    assert store.offer({"chat.json": dump(revised(6))}, 4.0) == (revised(6),)


def test_a_broken_document_keeps_the_last_good_one_and_its_age_grows():
    store = PolicyStore()
    store.offer({"chat.json": dump(POLICY)}, 1.0)
    for broken in (b"", b"{", b'{"revision": 9}'):
        assert store.offer({"chat.json": broken}, 5.0) == ()
        assert store.policies["chat"] == POLICY
        assert "chat.json" in store.acknowledgement("chat", Knobs(8), {}, 5.0).error
        assert store.age("chat", 5.0) == 4.0
    store.offer({}, 6.0)
    assert store.policies["chat"] == POLICY
    store.offer({"chat.json": dump(POLICY)}, 7.0)
    assert store.age("chat", 7.0) == 0.0
    assert store.acknowledgement("chat", Knobs(8), {}, 7.0).error is None


@pytest.mark.parametrize("revision", [2**31, 10**30, 10**4000, -1])
def test_a_revision_that_would_shut_out_every_later_one_is_refused(revision):
    store = PolicyStore()
    store.offer({"chat.json": dump(POLICY)}, 1.0)
    assert store.offer({"chat.json": dump(POLICY).replace('"revision":5', f'"revision":{revision}')}, 2.0) == ()
    assert "revision must be from 1 to 2147483647" in store.errors["chat.json"]
    assert len(store.errors["chat.json"]) < 200
    assert store.policies["chat"] == POLICY and store.age("chat", 2.0) == 1.0
    assert store.offer({"chat.json": dump(revised(6))}, 3.0) == (revised(6),)


def test_a_broken_neighbour_does_not_hold_back_the_others():
    store = PolicyStore()
    assert store.offer({"a.json": b"junk", "b.json": dump(revised(1, "code")), "c.json": dump(POLICY)}, 0.0) == (
        revised(1, "code"),
        POLICY,
    )


def test_two_documents_for_one_pool_the_higher_revision_wins_whatever_their_order():
    for names in (("a", "b"), ("b", "a")):
        store = PolicyStore()
        store.offer({names[0]: dump(revised(7)), names[1]: dump(revised(9))}, 0.0)
        assert store.policies["chat"].revision == 9


def test_no_policy_yet_is_unknown_and_not_revision_zero():
    store = PolicyStore()
    assert store.acknowledgement("chat", Knobs(), {}, 0.0) is None
    assert store.age("chat", 0.0) is None
