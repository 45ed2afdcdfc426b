"""Stop strings in a text that streams: no part of a stop string is released, and all text before it is.

The rule: of the matches in the text as it would be without stopping, the one that starts first ends the text; of those
that start together, the shortest. So the result does not depend on how the text is split into tokens or deltas.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """One output against its stop strings: O(1) amortised per character and stop string (Knuth, Morris, Pratt).

    `push` text until `stopped`, then or at the end of the output `flush`. Text that may be the beginning of a stop
    string is held back. A stop string inside a longer one that started before it waits for that one to complete or
    fail: with "bcd" and "c", the text "abc" is undecided, "abcd" ends as "a" and "abcx" as "ab".
    """

    def __init__(self, stops: Sequence[str], min_tokens: int = 0) -> None:
        """`stops`: none empty. Tokens up to `min_tokens` go out unseen: a stop string must lie wholly after them."""
        self._trackers = [_Tracker(stop) for stop in stops]
        self._min_tokens = min_tokens
        self._held = ""
        self._length = 0
        """Characters seen; `_held` are the last of them."""
        self._start: int | None = None
        self._token: int | None = None
        self._tokens = 0
        self.stopped = False
        """The output ends here: later tokens are neither sent nor counted."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count: all pushed so far, or those up to the one in which the deciding stop string ended."""
        return self._tokens if self._token is None else self._token + 1

    def push(self, text: str) -> str:
        """The next token completed this text (perhaps none). Returns what may go out now. ValueError once `stopped`."""
        if self.stopped:
            raise ValueError("the output has ended at a stop string: nothing may follow")
        token = self._tokens
        self._tokens += 1
        if token < self._min_tokens:
            return text
        for char in text:
            self._length += 1
            for tracker in self._trackers:
                start = tracker.feed(char, self._length)
                if start is not None and (self._start is None or start < self._start):
                    self._start, self._token = start, token
        self._held += text
        self.stopped = self._start is not None and all(
            tracker.start(self._length) >= self._start for tracker in self._trackers
        )
        return self._release(self._safe())

    def flush(self, tail: str = "") -> str:
        """The output is over, for whatever reason, with `tail` as its last text: returns the rest of the text."""
        if not self.stopped and tail:
            self._tokens -= 1
            out = self.push(tail)
        else:
            out = ""
        self.stopped = self._start is not None
        return out + self._release(self._length if self._start is None else self._start)

    def _safe(self) -> int:
        """The position up to which nothing can be part of a match any more."""
        starts = [tracker.start(self._length) for tracker in self._trackers]
        return min([self._length, *starts] if self._start is None else [self._start, *starts])

    def _release(self, end: int) -> str:
        count = max(0, end - (self._length - len(self._held)))
        out, self._held = self._held[:count], self._held[count:]
        return out


class _Tracker:
    """The longest beginning of one stop string that the text so far ends in; done after its first match."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._matched = 0
        self._done = False
        self._fallback = [0] * len(stop)
        """For each matched length - 1, the next shorter beginning that is also an ending."""
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[at] == stop[length]
            self._fallback[at] = length

    def feed(self, char: str, position: int) -> int | None:
        """One more character, the text's `position`-th. Where the first match starts, if this completes it."""
        if self._done:
            return None
        while self._matched and char != self._stop[self._matched]:
            self._matched = self._fallback[self._matched - 1]
        self._matched += char == self._stop[self._matched]
        if self._matched < len(self._stop):
            return None
        self._done = True
        return position - len(self._stop)

    def start(self, position: int) -> int:
        """The earliest start of a match that is possible after `position` characters; `position` if none began."""
        return position if self._done else position - self._matched
