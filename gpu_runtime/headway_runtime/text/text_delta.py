"""A stretch of one choice's text that may go out: whole characters, nothing of a stop string, and the log-probabilities
of its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that stands, or could have stood, at a position. A special token has a name and no text, so its `raw` is
    empty."""

    name: bytes
    raw: bytes
    """The bytes that it adds to the text: joined over an output they are the text."""
    logprob: float

    @property
    def label(self) -> str:
        """The token for people, distinct for distinct tokens: its text, or ``bytes:\\xe2\\x80`` where it is not text by
        itself."""
        try:
            return self.name.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.name)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One output token with what was asked about it. `offset`: characters of text before it."""

    token: Candidate
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one choice gained. `finish` is set in its last piece only: "stop" or "length"."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish: str | None = None
