"""Sequences of one prompt (a request for several answers): one leads, the others wait until its prompt can be reused.

Otherwise all would compute the prompt at the same time: only blocks that are full and published can be hit.
"""

from __future__ import annotations

from headway_core.batching.sequence import Sequence


class Groups:
    """Holds followers back until their leader's prompt is published, or their leader is gone and one of them leads."""

    def __init__(self) -> None:
        self._leaders: dict[int, int] = {}
        self._held: dict[int, dict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, seq: Sequence) -> bool:
        """Whether this newcomer has to be held back. The first of a group leads and is not."""
        if seq.group is None:
            return False
        if self._leaders.setdefault(seq.group, seq.seq_id) == seq.seq_id:
            return False
        self._held.setdefault(seq.group, {})[seq.seq_id] = seq
        return True

    def published(self, seq: Sequence) -> list[Sequence]:
        """The prompt of `seq` is published: those that waited for it, in arrival order. Later ones do not wait."""
        if seq.group is None or self._leaders.get(seq.group) != seq.seq_id:
            return []
        del self._leaders[seq.group]
        return list(self._held.pop(seq.group, {}).values())

    def leave(self, seq: Sequence) -> Sequence | None:
        """`seq` is gone. The follower that leads from now on, if it led and its prompt was not published."""
        if seq.group is None:
            return None
        held = self._held.get(seq.group, {})
        if held.pop(seq.seq_id, None) is not None or self._leaders.get(seq.group) != seq.seq_id:
            return None
        del self._leaders[seq.group]
        if not held:
            self._held.pop(seq.group, None)
            return None
        successor = held.pop(next(iter(held)))
        self._leaders[seq.group] = successor.seq_id
        return successor
