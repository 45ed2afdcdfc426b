"""The sequences that wait to start or to resume, in the policy's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from headway_core.batching.sequence import Sequence

Key = tuple[float, ...]
"""What a policy orders by: smaller goes first; ends with the sequence's number, so that no two are equal."""


class WaitingQueue:
    """Sorted once, on entry: a key must not change while its sequence is here."""

    def __init__(self, order: Callable[[Sequence], Key]) -> None:
        self._order = order
        self._keys: list[Key] = []
        self._by_key: dict[Key, Sequence] = {}
        self._key_of: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._key_of

    def add(self, seq: Sequence) -> None:
        """Puts it in its place."""
        key = self._order(seq)
        insort(self._keys, key)
        self._by_key[key] = seq
        self._key_of[seq.seq_id] = key

    def remove(self, seq: Sequence) -> None:
        """Takes it out. Raises KeyError when it is not here."""
        key = self._key_of.pop(seq.seq_id)
        del self._by_key[key]
        del self._keys[bisect_left(self._keys, key)]

    def at(self, index: int) -> tuple[Key, Sequence] | None:
        """The sequence at this place of the order, with its key; None past the end."""
        if index >= len(self._keys):
            return None
        key = self._keys[index]
        return key, self._by_key[key]
