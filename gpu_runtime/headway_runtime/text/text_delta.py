"""New text of one choice: whole characters, no part of a stop string, and the log-probabilities of its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that was chosen, or could have been, at a position. A special token has a name and an empty `raw`."""

    name: bytes
    raw: bytes
    """The bytes that it adds to the text."""
    logprob: float

    @property
    def label(self) -> str:
        """Distinct for distinct tokens: the token's text, or ``bytes:\\xe2\\x80`` where it is not text by itself."""
        try:
            return self.name.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.name)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One output token with its log-probability and the likeliest others. `offset`: characters of text before it."""

    token: Candidate
    top: tuple[Candidate, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice. `finish`, the finish reason "stop" or "length", is set in a choice's last delta only."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish: str | None = None
