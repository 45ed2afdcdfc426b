"""Anti-starvation: a sequence that has waited `promote_after` seconds in all is promoted and goes before all others.

* Waiting and being paused count, all its pauses together.
* Only a sequence that a later arrival has overtaken is promoted: a long queue alone is no reason.
* One sequence at a time is promoted, whatever its class, and stays so until it ends.

So a low class still ends under endless load of higher ones: after `promote_after` seconds of waiting, plus the time of
those that were overdue before it, one after the other. The cost for the higher classes is one sequence's share.
"""

from __future__ import annotations

import heapq
import math

from headway_core.batching.sequence import Sequence, State


class Ageing:
    """Who waits since when. `promote_after` in seconds; None promotes nobody."""

    def __init__(self, promote_after: float | None) -> None:
        self._promote_after = promote_after
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._promoted: Sequence | None = None
        self._newest_arrival = -math.inf
        """Of those that have been in an iteration."""

    def idle(self, seq: Sequence, now: float) -> None:
        """It waits from now on, or is paused."""
        if self._promote_after is None or seq.idle_since is not None:
            return
        seq.idle_since = now
        heapq.heappush(self._deadlines, (now + self._promote_after - seq.waited, seq.seq_id, seq))

    def working(self, seq: Sequence, now: float) -> None:
        """It is in an iteration."""
        self._newest_arrival = max(self._newest_arrival, seq.arrival)
        if seq.idle_since is not None:
            seq.waited += now - seq.idle_since
            seq.idle_since = None

    def overdue(self, now: float) -> Sequence | None:
        """The one to promote now, if somebody is overdue and nobody is promoted; from then on it counts as promoted."""
        if self._promote_after is None or (self._promoted is not None and self._promoted.state is not State.FINISHED):
            return None
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, seq = self._deadlines[0]
            still_waits = seq.idle_since is not None and seq.idle_since + self._promote_after - seq.waited == deadline
            if still_waits and seq.state is not State.FINISHED:
                if seq.arrival >= self._newest_arrival:
                    return None  # Nobody has overtaken it, and so none of the later ones.
                self._promoted = seq
                heapq.heappop(self._deadlines)
                return seq
            heapq.heappop(self._deadlines)
        return None
