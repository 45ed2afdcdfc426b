"""The TPOT targets of the sequences that decode: which of them an iteration has to keep.

Deadlines count from the actual first token, not from its target: a first token that came early must not become slack
for one long prefill. A sequence is past recovery when its last token would be late even if no iteration from now on
carried prefill. It leaves the minimum then: it would hold prefill back for ever and still miss its target.
"""

from __future__ import annotations

from headway_core.batching.sequence import Sequence


class TokenDeadlines:
    """The decoding sequences that have a TPOT target, by target."""

    def __init__(self) -> None:
        self._by_target: dict[float, dict[int, Sequence]] = {}

    def join(self, seq: Sequence) -> None:
        """It has had its first token and decodes."""
        if seq.tpot_target is not None:
            self._by_target.setdefault(seq.tpot_target, {})[seq.seq_id] = seq

    def leave(self, seq: Sequence) -> None:
        """It ended or was preempted; nothing happens if it is not here."""
        if seq.tpot_target is None:
            return
        members = self._by_target.get(seq.tpot_target)
        if members is not None and members.pop(seq.seq_id, None) is not None and not members:
            del self._by_target[seq.tpot_target]

    def tightest(self, fastest: float, now: float) -> float | None:
        """The smallest target, seconds, that somebody can still keep; None when there is none.

        `fastest`: least seconds of an iteration. Drops those past recovery on the way, so each is visited in vain once.
        """
        for target in sorted(self._by_target):
            for seq in list(self._by_target[target].values()):
                if now + seq.remaining_outputs * fastest <= last_deadline(seq, target, now):
                    return target
                self.leave(seq)
        return None


def last_deadline(seq: Sequence, target: float, now: float) -> float:
    """When its last token is due: first token (or now, before it came) + (most tokens it can generate - 1)·TPOT."""
    first = now if seq.first_token_at is None else seq.first_token_at
    return first + (seq.num_outputs + seq.remaining_outputs - 1) * target
