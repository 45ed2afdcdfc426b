"""Names for the content of KV blocks: each full block is named by the digest of everything up to its end.

blake2b over (the digest before it, its token ids as little-endian int32), salted; never ``hash()``, which differs
between processes and can be collided at will. The salt, at most 16 bytes, is the tenant's
(`headway_core.contract.header_names.tenant_salt`), so that nobody learns by timing what others asked. Only hashing:
what is cached under a digest is `headway_core.batching.block_pool`'s business.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 16
"""128 bits: two different prefixes among 2^40 meet with probability 2^-49."""


def extend_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> None:
    """Appends the digests of the full blocks of `token_ids` that `digests` does not have yet.

    `token_ids` are all tokens known so far, prompt first, as a list or an integer array. What `digests` names already
    is not hashed again: extending a sequence by a token costs nothing until a block is full.

    Raises:
        struct.error: a token id is no int32.
        ValueError: the salt is longer than 16 bytes.
    """
    pack = struct.Struct(f"<{block_size}i").pack
    parent = digests[-1] if digests else b""
    for index in range(len(digests), len(token_ids) // block_size):
        ids = token_ids[index * block_size : (index + 1) * block_size]
        parent = hashlib.blake2b(parent + pack(*ids), digest_size=DIGEST_BYTES, salt=salt).digest()
        digests.append(parent)


def prefix_digests(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """The digests of the full blocks of `token_ids`, the first block's first."""
    digests: list[bytes] = []
    extend_digests(digests, token_ids, block_size, salt)
    return digests
