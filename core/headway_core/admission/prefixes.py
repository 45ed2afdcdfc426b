"""Which replica probably holds which prompt heads in its prefix cache, from what was sent where; bounded memory.

The runtime's own cache is the truth; this is a guess that costs nothing when wrong but a slower prefill. Digests are
seeded by the tenant's salt, as in the runtime, so that two tenants' equal prompts do not attract each other.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

CHUNK_BYTES = 1024
MAX_CHUNKS = 256
"""A head of 256 KiB tells prompts apart; hashing it takes well under a millisecond."""


def prefix_chain(prompt: bytes, salt: bytes = b"", chunk: int = CHUNK_BYTES) -> tuple[bytes, ...]:
    """Chained 8-byte digests of the whole chunks at the prompt's head: equal i-th digests mean equal first i chunks.

    `salt`: `header_names.tenant_salt`, at most 16 bytes.
    """
    chain: list[bytes] = []
    parent = b""
    for start in range(0, min(len(prompt), chunk * MAX_CHUNKS) - chunk + 1, chunk):
        parent = hashlib.blake2b(prompt[start : start + chunk], digest_size=8, key=parent, salt=salt).digest()
        chain.append(parent)
    return tuple(chain)


class PrefixIndex:
    """Digest → replicas, least recently used digests forgotten first."""

    def __init__(self, capacity: int = 65_536) -> None:
        """`capacity`: digests remembered, each with the replicas that hold it."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._holders: OrderedDict[Hashable, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def sent(self, prefix: Sequence[Hashable], replica_id: str) -> None:
        """A prompt with this chain went to `replica_id`. Longer heads are forgotten before the shorter ones in them."""
        for digest in reversed(prefix):
            self._holders.setdefault(digest, set()).add(replica_id)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def matches(self, prefix: Sequence[Hashable]) -> Mapping[str, int]:
        """Replica → how many leading elements of the chain it probably holds; replicas with none are absent."""
        found: dict[str, int] = {}
        for length, digest in enumerate(prefix, start=1):
            holders = self._holders.get(digest)
            if not holders:
                break
            going = [replica_id for replica_id in holders if found.get(replica_id, 0) == length - 1]
            if not going:
                break
            for replica_id in going:
                found[replica_id] = length
        return found

    def forget(self, replica_id: str) -> None:
        """The replica restarted or went away: what it held is gone."""
        for digest, holders in list(self._holders.items()):
            holders.discard(replica_id)
            if not holders:
                del self._holders[digest]
