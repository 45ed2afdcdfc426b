"""Output tokens to text, one at a time: no character is split, and each token costs the same in any output."""

from __future__ import annotations

import codecs

from headway_runtime.text.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one output: what `push` and `flush` return, joined, is `Tokenizer.decode` of all tokens.

    Bytes that may still become a character are held back, three at most; U+FFFD stands for bytes that no continuation
    can mend, and at the end for a character that was cut off. Spaces stay as the tokens have them. `at_start`: the text
    begins here instead of going on from a prompt, so a sentencepiece-style tokenizer's first space is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _Decoder(errors="replace")
        self._drop_space = at_start and tokenizer.strips_leading_space

    def push(self, token: int) -> str:
        """The text that this token completes; often empty in the middle of a character."""
        if token in self._skipped:
            return ""
        return self._first_space(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """The output is over: U+FFFD if a character was cut off, else nothing. A second call returns nothing."""
        return self._first_space(self._decoder.decode(b"", final=True))

    def _first_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
