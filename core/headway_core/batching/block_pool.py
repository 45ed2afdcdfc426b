"""The KV cache as numbered blocks: who holds which, which content can be found again, which may be reused.

Blocks are counted by reference. A full block never changes again, so it may be *published* under the digest of
everything up to its end, and others hold it too. A published block that nobody holds stays findable until it is
allocated again; the least recently released goes first. Nothing here knows what a block contains.

At any moment a block is in exactly one place:

* held: ``references > 0``, by block tables and by releases that wait for a plan;
* cached: no references, published, in the order of release;
* free: no references, no content.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool has at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.released = 0
        """Blocks that came back to free or cached since the beginning."""
        self._references = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._leaving: dict[int, list[int]] = {}
        self._completed = 0
        """The newest plan that is complete; plans are numbered from 1."""

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free, or cached and held by nobody."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody whose content can still be found."""
        return len(self._cached)

    @property
    def coming(self) -> int:
        """Blocks that become available when the plans in flight are complete."""
        return self.freed_by(()) if self._leaving else 0

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Published blocks of the longest run of `digests` from the first. Changes nothing: `hold` them first."""
        found: list[int] = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these (matched) blocks nobody holds: holding them makes that many fewer available."""
        return sum(not self._references[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Takes one more reference on each of these matched blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each and no content; cached ones are forgotten when the free ones run out.
        Raises ValueError when fewer are `available`."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a full, computed, held block findable. Where its content is known already, the first block stays."""
        if not self._references[block]:
            raise ValueError(f"block {block} is held by nobody: it cannot be published")
        if self._digest[block] is None and digest not in self._published:
            self._published[digest] = block
            self._digest[block] = digest

    def release(self, blocks: Sequence[int], after: int | None = None) -> None:
        """Gives back one reference on each block: at once, or once plan `after`, which may still touch it, is complete.

        `blocks` is a block table from its beginning. Its end is forgotten first: it is useless without the beginning.
        """
        if after is not None and after > self._completed:
            self._leaving.setdefault(after, []).extend(reversed(blocks))
        else:
            for block in reversed(blocks):
                self._drop(block)

    def complete(self, plan_id: int) -> None:
        """Plan `plan_id` and those before it are complete: what was released after them comes back."""
        self._completed = plan_id
        for waited_for in [known for known in self._leaving if known <= plan_id]:
            for block in self._leaving.pop(waited_for):
                self._drop(block)

    def freed_by(self, tables: Iterable[Sequence[int]], apart_from: Container[int] = ()) -> int:
        """Blocks that would become available if these tables were released and all plans in flight were complete."""
        counts = Counter(block for table in tables for block in table)
        for leaving in self._leaving.values():
            counts.update(leaving)
        return sum(self._references[block] == count and block not in apart_from for block, count in counts.items())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the counts with all live block tables. Raises AssertionError, saying what is wrong."""
        counts = Counter(block for table in tables for block in table)
        for leaving in self._leaving.values():
            counts.update(leaving)
        for block, (references, digest) in enumerate(zip(self._references, self._digest, strict=True)):
            if references != counts[block]:
                raise AssertionError(f"block {block} has {references} references and {counts[block]} holders")
            if references > 1 and digest is None:
                raise AssertionError(f"block {block} is shared and not published")
            if digest is not None and self._published.get(digest) != block:
                raise AssertionError(f"block {block} is not found under its digest")
            places = (references > 0) + (block in self._cached) + self._free.count(block)
            if places != 1:
                raise AssertionError(f"block {block} is in {places} places")
            if not references and (digest is None) == (block in self._cached):
                raise AssertionError(f"block {block} is cached without a digest, or free with one")
        if len(self._published) != self.num_blocks - self._digest.count(None):
            raise AssertionError("a digest leads to no block")

    def _drop(self, block: int) -> None:
        if self._references[block] < 1:
            raise ValueError(f"block {block} is held by nobody: it cannot be released")
        self._references[block] -= 1
        if self._references[block]:
            return
        self.released += 1
        if self._digest[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._published[digest]
            self._digest[block] = None
