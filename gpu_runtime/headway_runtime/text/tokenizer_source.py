"""What a checkpoint says about its tokenizer, in one shape: `TokenizerSource`, read from a model folder.

Only reading and checking. A GGUF file gives the same shape in `gguf_tokenizer`; `tokenizer.Tokenizer` makes it encode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway_core.errors import CheckpointError

NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer before it is built."""

    path: str
    """The file to name in errors."""
    definition: dict[str, Any]
    """In the form of tokenizer.json."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Name (`NAMED_SPECIALS`) → text of the special token; only those that the checkpoint sets."""
    more_specials: tuple[str, ...] = ()
    """Further texts that the checkpoint declares special."""
    more_eos: tuple[str, ...] = ()
    """End tokens besides `eos_token`."""
    add_bos: bool | None = None
    """Whether raw text starts with the BOS token; None leaves it to the definition's post-processor."""
    add_eos: bool | None = None
    template: str | None = None
    """The chat template's Jinja source."""


def read_folder(folder: Path) -> TokenizerSource:
    """The tokenizer and chat template of a model folder's JSON and Jinja files. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(str(path), "", "is missing from the checkpoint: only tokenizers in this form are read")
    definition = _read_object(path)
    config_path = folder / "tokenizer_config.json"
    config = _read_object(config_path) if config_path.exists() else {}
    map_path = folder / "special_tokens_map.json"
    declared = {**(_read_object(map_path) if map_path.exists() else {}), **config}
    texts = {name: _token_text(declared.get(name), config_path, name) for name in NAMED_SPECIALS}
    named = {name: text for name, text in texts.items() if text is not None}
    more: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more += _token_list(declared.get(key), config_path, key)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(isinstance(entry, dict) for entry in decoder.values()):
        raise CheckpointError(str(config_path), "added_tokens_decoder", "must map ids to token objects")
    more += [str(entry.get("content")) for entry in decoder.values() if entry.get("special") is True]
    return TokenizerSource(
        path=str(path),
        definition=definition,
        named=named,
        more_specials=tuple(more),
        add_bos=_flag(config, "add_bos_token", config_path),
        add_eos=_flag(config, "add_eos_token", config_path),
        template=_template(folder, config, config_path),
    )


def _template(folder: Path, config: Mapping[str, Any], config_path: Path) -> str | None:
    """chat_template.jinja, else the member chat_template: text, or a list of named ones of which ``default`` counts."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in value
    ):
        return next((str(entry["template"]) for entry in value if entry.get("name") == "default"), None)
    raise CheckpointError(str(config_path), "chat_template", "must be text or a list of {name, template} objects")


def _token_text(value: object, path: Path, key: str) -> str | None:
    """A token written as text, or as an object with the text in `content`; null is none."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise CheckpointError(str(path), key, f"must be a token's text or an object with it, not {type(value).__name__}")


def _token_list(value: object, path: Path, key: str) -> list[str]:
    entries = list(value.values()) if isinstance(value, dict) else value or []
    if not isinstance(entries, list):
        raise CheckpointError(str(path), key, f"must be a list of tokens, not {type(value).__name__}")
    return [text for entry in entries if (text := _token_text(entry, path, key)) is not None]


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(str(path), key, f"must be true, false or absent, not {value!r}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), "", f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "", f"must hold a JSON object, not {type(content).__name__}")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), "", f"cannot be read: {error}") from error
