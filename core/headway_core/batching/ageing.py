"""Nobody waits for ever: the sequence that has waited longest past the policy's patience goes before everybody.

Waiting and being paused count, over all its pauses together, and only for those that a later arrival has overtaken: a
long queue alone is no injustice. One sequence at a time is promoted, whatever its class, and keeps that place until it
ends. So under endless load of higher classes a low one still ends: after `patience` seconds of waiting, plus the time
that those take that were overdue before it, one after the other. And the toll on the higher classes is one sequence's
share, never more.
"""

from __future__ import annotations

import heapq
import math

from headway_core.batching.sequence import Sequence, State


class Ageing:
    """Who waits since when. `patience` in seconds; None promotes nobody."""

    def __init__(self, patience: float | None) -> None:
        self._patience = patience
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._promoted: Sequence | None = None
        self._newest_arrival = -math.inf
        """Of those that have been in an iteration."""

    def idle(self, seq: Sequence, now: float) -> None:
        """It waits from now on, or is paused."""
        if self._patience is None or seq.idle_since is not None:
            return
        seq.idle_since = now
        heapq.heappush(self._deadlines, (now + self._patience - seq.waited, seq.seq_id, seq))

    def working(self, seq: Sequence, now: float) -> None:
        """It is in an iteration."""
        self._newest_arrival = max(self._newest_arrival, seq.arrival)
        if seq.idle_since is not None:
            seq.waited += now - seq.idle_since
            seq.idle_since = None

    def overdue(self, now: float) -> Sequence | None:
        """The one to promote now, if somebody is overdue and nobody is promoted; from then on it counts as promoted."""
        if self._patience is None or (self._promoted is not None and self._promoted.state is not State.FINISHED):
            return None
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, seq = self._deadlines[0]
            still_waits = seq.idle_since is not None and seq.idle_since + self._patience - seq.waited == deadline
            if still_waits and seq.state is not State.FINISHED:
                if seq.arrival >= self._newest_arrival:
                    return None  # Nobody has overtaken it, and so none of the later ones.
                self._promoted = seq
                heapq.heappop(self._deadlines)
                return seq
            heapq.heappop(self._deadlines)
        return None
