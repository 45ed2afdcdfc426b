"""Blocks are never lost, never in two places, and never used again while a plan still touches them."""

import random

import pytest
from headway_core.batching.block_pool import BlockPool


def digest(number):
    return number.to_bytes(16, "big")


def test_all_blocks_can_be_taken_and_come_back():
    pool = BlockPool(5)
    table = pool.allocate(5)
    assert sorted(table) == list(range(5))
    assert pool.available == 0
    with pytest.raises(ValueError, match="1 blocks asked for, 0 available"):
        pool.allocate(1)
    pool.check([table])
    pool.release(table)
    assert pool.available == pool.released == 5
    pool.check([])


def test_a_published_block_is_found_held_or_not():
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.publish(table[0], digest(0))
    pool.publish(table[1], digest(1))
    assert pool.match([digest(0), digest(1), digest(2)]) == table[:2]
    pool.release(table)
    assert (pool.num_cached, pool.available) == (2, 4)
    hits = pool.match([digest(0), digest(1)])
    assert hits == table[:2]
    assert pool.unheld(hits) == 2
    pool.hold(hits)
    assert (pool.available, pool.unheld(hits)) == (2, 0)
    pool.check([hits])


def test_a_match_ends_at_the_first_gap():
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.publish(table[0], digest(0))
    pool.publish(table[2], digest(2))
    assert pool.match([digest(0), digest(1), digest(2)]) == table[:1]
    assert pool.match([digest(1)]) == []


def test_matching_changes_nothing():
    pool = BlockPool(4)
    table = pool.allocate(2)
    for index, block in enumerate(table):
        pool.publish(block, digest(index))
    pool.release(table)
    pool.match([digest(1), digest(0)])
    pool.match([digest(0), digest(1)])
    assert pool.allocate(4)[2:] == [table[1], table[0]]


def test_the_room_of_cached_blocks_is_used_last_the_least_recently_released_first_and_a_chain_from_its_end():
    pool = BlockPool(6)
    old, new = pool.allocate(2), pool.allocate(2)
    for index, block in enumerate(old + new):
        pool.publish(block, digest(index))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(2) == [4, 5]
    assert pool.allocate(1) == [old[1]]
    assert pool.match([digest(0), digest(1)]) == old[:1]
    assert pool.allocate(2) == [old[0], new[1]]
    assert pool.match([digest(0)]) == []
    assert pool.match([digest(2), digest(3)]) == new[:1]


def test_content_known_already_stays_where_it_was():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, digest(0))
    pool.publish(second, digest(0))
    assert pool.match([digest(0)]) == [first]
    pool.release([second])
    assert (pool.num_cached, pool.available) == (0, 2)
    pool.check([[first]])


def test_a_shared_block_comes_back_when_the_last_holder_lets_go():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.publish(table[0], digest(0))
    pool.hold(table)
    pool.release(table)
    assert pool.available == 1
    assert pool.freed_by([table]) == 1
    pool.release(table)
    assert pool.available == 2


def test_a_block_in_flight_is_not_used_again_before_its_plan_is_complete():
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.release(table, after=7)
    assert (pool.available, pool.coming) == (0, 2)
    pool.check([])
    pool.complete(6)
    assert pool.available == 0
    pool.complete(7)
    assert (pool.available, pool.coming) == (2, 0)
    again = pool.allocate(1)
    pool.release(again, after=7)
    assert pool.available == 2


def test_a_published_block_in_flight_can_be_shared_at_once():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.publish(table[0], digest(0))
    pool.release(table, after=3)
    hits = pool.match([digest(0)])
    pool.hold(hits)
    pool.complete(3)
    pool.check([hits])
    assert pool.available == 1


def test_how_much_tables_free_together():
    pool = BlockPool(6)
    shared = pool.allocate(2)
    for index, block in enumerate(shared):
        pool.publish(block, digest(index))
    pool.hold(shared)
    one, other = shared + pool.allocate(1), shared + pool.allocate(2)
    assert pool.freed_by([one]) == 1
    assert pool.freed_by([other]) == 2
    assert pool.freed_by([one, other]) == 5
    assert pool.freed_by([one, other], apart_from=shared) == 3


@pytest.mark.parametrize(
    "misuse", [lambda pool: pool.release([0]), lambda pool: pool.publish(0, digest(0)), lambda pool: BlockPool(0)]
)
def test_misuse_is_refused(misuse):
    with pytest.raises(ValueError, match=r"held by nobody|at least 1"):
        misuse(BlockPool(1))


def test_random_use_loses_nothing():
    for seed in range(100):
        rng = random.Random(seed)
        pool = BlockPool(rng.randint(1, 20))
        tables: list[list[int]] = []
        plan = 0
        for _ in range(150):
            action = rng.random()
            if action < 0.4:
                hits = pool.match([digest(i) for i in range(rng.randint(0, 6))])
                fresh = rng.randint(0, 4)
                if fresh + pool.unheld(hits) <= pool.available and hits + [0] * fresh:
                    pool.hold(hits)
                    tables.append(hits + pool.allocate(fresh))
            elif action < 0.7 and tables:
                table = rng.choice(tables)
                index = rng.randrange(len(table))
                pool.publish(table[index], digest(index))
            elif action < 0.9 and tables:
                pool.release(tables.pop(rng.randrange(len(tables))), after=rng.choice([None, plan, plan + 1]))
            else:
                pool.complete(plan)
                plan += 1
            pool.check(tables)
        for table in tables:
            pool.release(table)
        pool.complete(plan + 1)
        pool.check([])
        assert pool.available == pool.num_blocks
