"""Text to token ids and back, for one checkpoint.

Three ways in, with different trust:

* `encode`, raw text of a completion: special tokens written out in it count as special tokens, since whoever sends raw
  text writes the template too. BOS is put in front if the checkpoint wants it, but never a second one where the text
  itself begins with it.
* `encode_chat`, text that `chat_template` rendered: nothing is added, special tokens come from the template. What users
  wrote is guarded by `GUARD` marks (see `ChatTemplate`) and cannot become a special token.
* ids, which nobody touches.

Text is never dropped: what the vocabulary cannot express, and what is not text (a lone surrogate), is a RequestError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway_core.errors import CheckpointError, RequestError
from tokenizers import Tokenizer as Backend

from headway_runtime.text.chat_template import GUARD, ChatTemplate
from headway_runtime.text.gguf_tokenizer import read_gguf
from headway_runtime.text.token_bytes import read_token_bytes
from headway_runtime.text.tokenizer_source import TokenizerSource, read_folder


class Tokenizer:
    """Read-only once built, so threads may share it."""

    def __init__(self, source: TokenizerSource) -> None:
        """Raises CheckpointError."""
        definition = _guarded(source)
        try:
            self._backend = Backend.from_str(json.dumps(definition))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(source.path, "", f"is not a tokenizer definition: {error}") from error
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._bytes = read_token_bytes(definition, vocab, source.path)
        self._writable = bytes(byte for byte in range(256) if byte not in self._bytes.unwritable)
        specials = {entry["content"]: entry["id"] for entry in definition["added_tokens"] if entry["special"]}
        self.special_ids = frozenset(specials.values())
        """Ids that stand for no text: left out when output is written."""
        for name in ("bos_token", "eos_token"):
            if name in source.named and source.named[name] not in vocab:
                raise CheckpointError(source.path, name, f"{source.named[name]!r} is not in the vocabulary")
        self.bos_id = vocab.get(source.named.get("bos_token", ""))
        ends = [source.named.get("eos_token"), *source.more_eos]
        self.eos_ids = frozenset(vocab[text] for text in ends if text is not None and text in vocab)
        """End tokens that the tokenizer itself names; config and generation config may know more."""
        self._prefix, self._suffix = self._prefix_and_suffix(source, vocab)
        self.chat_template = ChatTemplate(source.template, source.named, specials, source.path)

    @classmethod
    def open(cls, path: Path) -> Tokenizer:
        """The tokenizer of a model folder or of a .gguf file. Raises CheckpointError."""
        return cls(read_folder(path) if path.is_dir() else read_gguf(path))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's own table may be longer."""
        return len(self._bytes.table)

    @property
    def strips_leading_space(self) -> bool:
        """Text from the start of a sequence loses the space that encoding put there."""
        return self._bytes.strips_leading_space

    def encode(self, text: str, *, add_special: bool = True, field: str = "prompt") -> list[int]:
        """Ids of raw text; with `add_special` as the checkpoint frames it. Raises RequestError, which names `field`."""
        if GUARD in text:
            message = f"holds U+{ord(GUARD):04X}, a noncharacter that Unicode reserves for internal use"
            raise RequestError(message, field)
        ids = self._encode(text, field)
        if not add_special:
            return ids
        before = [] if self._prefix and ids[: len(self._prefix)] == self._prefix else self._prefix
        return [*before, *ids, *self._suffix]

    def encode_chat(self, text: str, *, field: str = "messages") -> list[int]:
        """Ids of rendered chat text. Raises RequestError, which names `field`."""
        return self._encode(text, field)

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            message = f"holds a lone surrogate (U+{ord(text[error.start]):04X}), which is not text"
            raise RequestError(message, field) from None
        if self._bytes.unwritable:
            lost = sorted(set(raw.translate(None, self._writable)))
            if lost:
                shown = ", ".join(f"0x{byte:02X}" for byte in lost)
                message = f"cannot be written in this model's vocabulary, which has no token for the byte {shown}"
                raise RequestError(message, field)
        # A batch of one: unlike `encode` it lets other threads run meanwhile, a second for a text of a megabyte.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, those of a special token's name included; empty for an id that has no token."""
        return self._bytes.table[token] if 0 <= token < len(self._bytes.table) else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = False) -> str:
        """The text of ids; what is not UTF-8 becomes U+FFFD. `at_start`: the ids begin a text, not go on with one."""
        kept = (token for token in ids if not (skip_special and token in self.special_ids))
        text = b"".join(self.token_bytes(token) for token in kept).decode(errors="replace")
        return text[1:] if at_start and self.strips_leading_space and text.startswith(" ") else text

    def _prefix_and_suffix(self, source: TokenizerSource, vocab: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Special ids before and after raw text: by the post-processor, unless add_bos and add_eos say otherwise."""
        plain, framed = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), 0) if plain else 0
        before, after = framed[:at], framed[at + len(plain) :]
        for flag, key, ends in ((source.add_bos, "bos_token", before), (source.add_eos, "eos_token", after)):
            if flag is None:
                continue
            ends.clear()
            if flag and key in source.named:
                ends.append(vocab[source.named[key]])
        return before, after


def _guarded(source: TokenizerSource) -> dict[str, Any]:
    """The definition to run: all specials marked, guards removed after special tokens are found, no truncation."""
    definition = dict(source.definition)
    added = [dict(entry) for entry in definition.get("added_tokens") or []]
    declared = {*source.named.values(), *source.more_specials}
    vocab = (definition.get("model") or {}).get("vocab")
    ids = vocab if isinstance(vocab, dict) else {}
    for entry in added:
        entry["special"] = bool(entry.get("special")) or entry.get("content") in declared
        # A special token is found in the text as it came, before guards are taken out and before normalisation.
        entry["normalized"] = bool(entry.get("normalized")) and not entry["special"]
    known = {entry.get("content") for entry in added}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [{"id": ids[text], "content": text, **flags} for text in sorted(declared - known) if text in ids]
    remove_guards = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
    normalizer = definition.get("normalizer")
    definition["added_tokens"] = sorted(added, key=lambda entry: int(entry["id"]))
    definition["normalizer"] = (
        remove_guards if normalizer is None else {"type": "Sequence", "normalizers": [remove_guards, normalizer]}
    )
    definition["truncation"] = definition["padding"] = None
    return definition
