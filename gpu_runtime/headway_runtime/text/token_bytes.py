"""The bytes that each token id stands for, read from a tokenizer's definition once: decoding joins them.

Two families: byte-level BPE, where every character of a token stands for a byte, and sentencepiece style, where
``▁`` is a space and ``<0x0A>`` a byte. A decoder that does something else is refused rather than imitated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_core.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al., 2019): printable Latin-1 as it is, the rest from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    alphabet.update((chr(0x100 + offset), byte) for offset, byte in enumerate(others))
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`table[id]` is the token's bytes, empty for an id without a token."""

    table: tuple[bytes, ...]
    strips_leading_space: bool = False
    """The text of a whole sequence loses one space at its start, which encoding put there."""
    unwritable: bytes = b""
    """Byte values that no token can express and that encoding would drop."""


def read_token_bytes(definition: Mapping[str, Any], vocab: Mapping[str, int], path: str) -> TokenBytes:
    """The table of a tokenizer.json's definition; `vocab` includes the added tokens. Raises CheckpointError."""
    steps = _decoder_steps(definition)
    kinds = {str(step.get("type")) for step in steps}
    added = {entry["content"] for entry in definition.get("added_tokens") or []}
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    if kinds == {"ByteLevel"}:
        for text, token in vocab.items():
            table[token] = text.encode() if text in added else _from_alphabet(text)
        model = definition.get("model") or {}
        drops = not model.get("byte_fallback") and model.get("unk_token") is None
        unwritable = bytes(sorted(byte for char, byte in BYTE_ALPHABET.items() if char not in vocab)) if drops else b""
        return TokenBytes(tuple(table), unwritable=unwritable)
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        message = f"must be ByteLevel or made of Replace, ByteFallback, Fuse, Strip and Metaspace, not {kinds or None}"
        raise CheckpointError(path, "decoder", message)
    replacements: list[tuple[str, str]] = []
    strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                strips = strips or step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if start <= 1:
                strips = strips or start == 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise CheckpointError(path, "decoder", f"has a step that is not known: {step}")
    falls_back = "ByteFallback" in kinds
    for text, token in vocab.items():
        table[token] = text.encode() if text in added else _from_piece(text, replacements, falls_back)
    return TokenBytes(tuple(table), strips_leading_space=strips)


def _decoder_steps(definition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    decoder = definition.get("decoder")
    if decoder is None:
        before: Mapping[str, Any] = definition.get("pre_tokenizer") or {}
        return [part for part in (before, *(before.get("pretokenizers") or [])) if part.get("type") == "ByteLevel"][:1]
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _from_alphabet(text: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[char] for char in text)
    except KeyError:  # outside the alphabet: a token that was put into the vocabulary as text
        return text.encode()


def _from_piece(text: str, replacements: list[tuple[str, str]], falls_back: bool) -> bytes:
    found = _BYTE_TOKEN.fullmatch(text) if falls_back else None
    if found:
        return bytes([int(found[1], 16)])
    for old, new in replacements:
        text = text.replace(old, new)
    return text.encode()
