"""Digests name content: equal prefixes are equal, everything else differs, in every process."""

import random
import struct

import pytest
from headway_core.batching.digests import extend_digests, prefix_digests


def test_only_full_blocks_have_digests():
    for length in range(20):
        assert len(prefix_digests(list(range(length)), 4)) == length // 4


def test_a_digest_names_everything_up_to_the_end_of_its_block():
    rng = random.Random(1)
    tokens = [rng.randrange(50_000) for _ in range(64)]
    plain = prefix_digests(tokens, 8)
    for position in range(64):
        changed = list(tokens)
        changed[position] += 1
        other = prefix_digests(changed, 8)
        block = position // 8
        assert other[:block] == plain[:block]
        assert not set(other[block:]) & set(plain[block:])


def test_equal_blocks_in_other_places_have_other_digests():
    assert len(set(prefix_digests([7] * 40, 4))) == 10


def test_extending_by_a_token_at_a_time_is_the_same_as_hashing_all():
    rng = random.Random(2)
    tokens = [rng.randrange(50_000) for _ in range(50)]
    grown: list[bytes] = []
    for length in range(1, 51):
        extend_digests(grown, tokens[:length], 8, b"salt")
    assert grown == prefix_digests(tokens, 8, b"salt")


def test_what_is_known_is_not_hashed_again():
    tokens = [1] * 32
    digests = prefix_digests(tokens, 8)
    pretended = [b"x" * 16, *digests[1:]]
    extend_digests(pretended, tokens, 8)
    assert pretended == [b"x" * 16, *digests[1:]]


def test_salts_separate_tenants_block_size_separates_too():
    tokens = list(range(32))
    assert not set(prefix_digests(tokens, 8, b"a")) & set(prefix_digests(tokens, 8, b"b"))
    assert not set(prefix_digests(tokens, 8)) & set(prefix_digests(tokens, 16))


def test_the_same_in_every_process():
    assert prefix_digests([1, 2, 3, 4], 4, b"tenant")[0].hex() == "cefa79645b5cce4522e9a36fc0bd03be"


def test_a_token_id_that_is_no_int32_is_refused():
    with pytest.raises(struct.error):
        prefix_digests([2**31], 1)
