"""The tokenizer inside a GGUF file: tokens, types and merges from its metadata, the pre-tokenizer by name.

llama.cpp's rules are the reference for the ids: `tokenizer.ggml.pre` names a set of regular expressions that only its
source defines. A name that is not in the table here is refused: another split would silently give other ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_core.errors import CheckpointError

from headway_runtime.gguf_metadata import read_metadata
from headway_runtime.text.tokenizer_source import TokenizerSource

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type for tokens written whole in text; user-defined ones are not special."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How llama.cpp splits text for one name of `tokenizer.ggml.pre`."""

    definition: dict[str, Any]
    """In the form of tokenizer.json."""
    ignore_merges: bool = False
    """A word that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Where the file has no tokenizer.ggml.add_bos_token."""


def _byte_level(split: bool) -> dict[str, Any]:
    """Text to bytes, written as printable characters; with `split` first into words, by GPT-2's expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


_LLAMA_3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = PreTokenizer(
    _sequence(
        {"type": "Split", "pattern": {"Regex": _LLAMA_3}, "behavior": "Isolated", "invert": False},
        _byte_level(split=False),
    ),
    ignore_merges=True,
    add_bos=True,
)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(_byte_level(split=True)),
    "smollm": PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _byte_level(split=True))),
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
}


def read_gguf(path: Path) -> TokenizerSource:
    """The tokenizer of a GGUF file. Raises CheckpointError naming the metadata key."""
    value = read_metadata(path).get

    def refuse(key: str, message: str) -> CheckpointError:
        return CheckpointError(str(path), f"tokenizer.ggml.{key}", message)

    model, pre = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if model != "gpt2":
        raise refuse("model", f"must be gpt2, not {model!r}: others need a safetensors folder with a tokenizer.json")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise refuse("pre", f"must be one of {known}, not {pre!r}: how that one splits text is not known here")
    pre_tokenizer = PRE_TOKENIZERS[pre]
    tokens, types, merges = (value(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if not isinstance(tokens, list) or not tokens or len(set(tokens)) != len(tokens):
        raise refuse("tokens", "must list the tokens, each once")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise refuse("token_type", f"must hold one type for each of the {len(tokens)} tokens")
    pairs = [merge.split(" ", 1) for merge in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise refuse("merges", "must hold pairs of tokens with a space between")
    named: dict[str, str] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = value(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            if not isinstance(token, int) or not 0 <= token < len(tokens):
                raise refuse(f"{key}_token_id", f"must be an id below {len(tokens)}, not {token!r}")
            named[name] = tokens[token]
    more_eos = (value(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))
    return TokenizerSource(
        path=str(path),
        definition=_definition(tokens, types, pairs, pre_tokenizer),
        named=named,
        more_eos=tuple(tokens[token] for token in more_eos if isinstance(token, int) and 0 <= token < len(tokens)),
        add_bos=bool(value("tokenizer.ggml.add_bos_token", pre_tokenizer.add_bos)),
        add_eos=bool(value("tokenizer.ggml.add_eos_token", False)),
        template=value("tokenizer.chat_template"),
    )


def _definition(
    tokens: list[str], types: list[int], merges: list[list[str]], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """The metadata in the form of tokenizer.json."""
    flags = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": token, "content": tokens[token], "special": kind != _USER_DEFINED, **flags}
        for token, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": pre_tokenizer.definition,
        "decoder": _byte_level(split=True),
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": pre_tokenizer.ignore_merges,
        },
    }
