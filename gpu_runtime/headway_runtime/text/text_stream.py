"""One output's tokens as text to send: whole characters, no part of a stop string, log-probabilities with their text.

Pure: tokens in, deltas out. Joined, the deltas are the same whenever they are taken: stream and whole response agree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headway_runtime.ipc.messages import TokenLogprobs
from headway_runtime.text.detokenizer import IncrementalDetokenizer
from headway_runtime.text.stop_strings import StopStringMatcher
from headway_runtime.text.text_delta import Candidate, TextDelta, TokenEntry
from headway_runtime.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What an impossible token is reported as: JSON has no infinity."""


@dataclass(slots=True)
class _Held:
    """An entry whose text has not gone out yet; `end`: characters of text up to and including the token."""

    entry: TokenEntry
    end: int


class TextStream:
    """`feed` tokens until `finish` is set by a stop string or the output ends, then `end`; `take` at any time."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(stops, min_tokens) if stops else None
        self._ready: list[str] = []
        self._held: deque[_Held] = deque()
        self._seen = 0
        """Characters decoded."""
        self._released = 0
        """Characters that may have gone out."""
        self._tokens = 0
        self._reported = False
        self.finish: str | None = None
        """Why the output ended; None while it goes on."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count: none of those after the one that completed a stop string."""
        if self._matcher is not None and self._matcher.stopped:
            return self._matcher.num_tokens
        return self._tokens

    def feed(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """The next token. Ignored once the output has ended."""
        if self.finish is not None:
            return
        self._tokens += 1
        text = self._detokenizer.push(token)
        if logprobs is not None:
            self._held.append(_Held(self._entry(token, logprobs, text), self._seen + len(text)))
        self._seen += len(text)
        if self._matcher is None:
            self._release(text)
            return
        self._release(self._matcher.push(text))
        if self._matcher.stopped:
            self._release(self._matcher.flush())
            self.finish = "stop"

    def count_end_token(self) -> None:
        """The end token: it was generated, and is no text."""
        if self.finish is None:
            self._tokens += 1

    def end(self, reason: str) -> None:
        """No token follows, because of `reason`. Releases held-back text; an undecided stop string may now count."""
        if self.finish is not None:
            return
        tail = self._detokenizer.flush()
        self._seen += len(tail)
        self._release(tail if self._matcher is None else self._matcher.flush(tail))
        self.finish = "stop" if self._matcher is not None and self._matcher.stopped else reason

    def take(self) -> TextDelta | None:
        """The text and entries since the last call; None without any."""
        entries = self._due_entries()
        finish = None if self._reported else self.finish
        if not self._ready and not entries and finish is None:
            return None
        self._reported = finish is not None
        text, self._ready = "".join(self._ready), []
        return TextDelta(text, entries, finish)

    def _release(self, text: str) -> None:
        if text:
            self._ready.append(text)
            self._released += len(text)

    def _due_entries(self) -> tuple[TokenEntry, ...]:
        """Entries whose text is out. At the end those of text that was cut off are dropped with it."""
        due: list[TokenEntry] = []
        while self._held and self._held[0].end <= self._released:
            due.append(self._held.popleft().entry)
        if self.finish is not None:
            whole = self._released == self._seen
            due += [held.entry for held in self._held if whole or held.entry.offset < self._released]
            self._held.clear()
        return tuple(due)

    def _entry(self, token: int, logprobs: TokenLogprobs, text: str) -> TokenEntry:
        """`text` is what this token completed; a broken character from before it may stand in front of its own."""
        top = tuple(self._candidate(other, logprob) for other, logprob in logprobs.top)
        chosen = self._candidate(token, logprobs.logprob)
        own = chosen.raw.decode("utf-8", errors="ignore")
        before = len(text) - len(own) if text.endswith(own) else 0
        return TokenEntry(chosen, top, self._seen + before)

    def _candidate(self, token: int, logprob: float) -> Candidate:
        raw = self._tokenizer.token_bytes(token)
        shown = b"" if token in self._tokenizer.special_ids else raw
        return Candidate(name=raw, raw=shown, logprob=max(LEAST_LOGPROB, logprob))
