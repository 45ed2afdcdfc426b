"""The tokenizer inside a GGUF file: ids as llama.cpp's rule gives them, derived here a second time; unknown names
refused."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from gguf import GGUFReader, GGUFWriter
from headway_core.errors import CheckpointError, RequestError
from headway_runtime.gguf_metadata import read_metadata
from headway_runtime.text.tokenizer import Tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class SecondOpinion:
    """BPE by rank in its plainest form, over the words of llama.cpp's expressions: each splits the pieces that the last
    one left."""

    def __init__(
        self, tokens: list[str], merges: list[str], expressions: list[str], ignore_merges: bool = False
    ) -> None:
        self._ids = {text: token for token, text in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._expressions = expressions
        self._ignore_merges = ignore_merges

    def encode(self, text: str) -> list[int]:
        words = [text]
        for expression in self._expressions:
            words = [part for word in words for part in regex.split(f"({expression})", word) if part]
        return [token for word in words for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        symbols = [_disguise(byte) for byte in word.encode()]
        if self._ignore_merges and "".join(symbols) in self._ids:
            return [self._ids["".join(symbols)]]
        while len(symbols) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in itertools.pairwise(symbols)]
            best = min(ranks)
            if best == len(self._ranks):
                break
            at = ranks.index(best)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return [self._ids[symbol] for symbol in symbols]


def _disguise(byte: int) -> str:
    """GPT-2's character for a byte, from its definition."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte)
        if byte in printable
        else chr(256 + [other for other in range(256) if other not in printable].index(byte))
    )


@pytest.fixture(scope="module")
def second_opinion(default_model: Path) -> SecondOpinion:
    metadata = read_metadata(default_model)
    return SecondOpinion(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], [r"\p{N}", GPT_2])


SAMPLES = (
    "Hello, we can use",
    "\n\n1. First\n2. Second\n\n\n10) x",
    "In 2024, 3.14159 ≈ π; ½ + ² = Ⅷ? ٣٤",
    "  leading,   inner   and trailing  ",
    "don't WON'T we'll they've I'm he'd it's",
    "한국어 테스트 👩‍👩‍👧 e\u0301 .A",
    "def f(x):\n\treturn x**2  # comment\r\n",
    "https://example.org/a?b=1&c=%20",
    "\u00a0\u2003nbsp \u200bzero\ufeff",
    "Ünïcödé Привет 你好，世界。 שלום",
)


@pytest.mark.parametrize("text", SAMPLES)
def test_the_default_models_ids_follow_the_rule_of_llama_cpp(
    default_tokenizer: Tokenizer, second_opinion: SecondOpinion, text: str
) -> None:
    ids = default_tokenizer.encode(text)
    assert ids == second_opinion.encode(text)
    assert default_tokenizer.decode(ids) == text


WRITABLE = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=40)


@settings(deadline=None)
@given(text=WRITABLE)
@example(text="1 2 3 12 123")
@example(text=" \t x 9\n")
def test_any_text_follows_the_rule(default_tokenizer: Tokenizer, second_opinion: SecondOpinion, text: str) -> None:
    """Or is refused because the vocabulary lacks a byte; either way nothing is lost."""
    try:
        ids = default_tokenizer.encode(text)
    except RequestError:
        assert any(_disguise(byte) not in second_opinion._ids for byte in text.encode())
        return
    assert ids == second_opinion.encode(text)
    assert default_tokenizer.decode(ids) == text


def test_digits_stand_alone(default_tokenizer: Tokenizer) -> None:
    """What tells this split from GPT-2's: three digits are three tokens."""
    assert len(default_tokenizer.encode("123")) == 3
    assert len(default_tokenizer.encode("\n\n1.")) == 3


def test_a_byte_without_a_token_is_refused_by_its_value(default_tokenizer: Tokenizer) -> None:
    for text, shown in (("a\x13b", "0x13"), ("\U00040000", "0xF1"), ("\x04\x06", "0x04, 0x06")):
        with pytest.raises(RequestError, match=shown) as caught:
            default_tokenizer.encode(text, field="prompt")
        assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match="0x13"):
        default_tokenizer.encode_chat(default_tokenizer.chat_template.render([{"role": "user", "content": "a\x13b"}]))
    writable = [
        byte
        for byte in range(256)
        if any(default_tokenizer.token_bytes(token) == bytes([byte]) for token in range(1000))
    ]
    assert len(writable) == 256 - 21


def test_control_tokens_and_ends_of_the_default_model(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.special_ids == set(range(17))
    assert (default_tokenizer.bos_id, default_tokenizer.eos_ids, default_tokenizer.vocab_size) == (1, {2}, 49152)
    ids = default_tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(1) == 1
    assert 1 not in default_tokenizer.encode("hi")  # the file says so


ALPHABET = sorted(ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "Ġ a", "a b", "b c", "h e", "l l", "he ll", "hell o"]
TOKENS = ["<unk>", "<s>", "</s>", "<|eot|>", "<tool>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "abc"]
TYPES = [2, 3, 3, 3, 4, *[1] * (len(TOKENS) - 5)]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with a small tokenizer; a keyword changes a metadata value (`None` leaves it out)."""

    def write(**changes: Any) -> Path:
        values = {
            "model": "gpt2",
            "pre": "smollm",
            "tokens": TOKENS,
            "token_type": TYPES,
            "merges": MERGES,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "eot_token_id": 3,
            "add_bos_token": None,
            **changes,
        }
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        for key, value in values.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                (writer.add_uint32 if value < 2**32 else writer.add_uint64)(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_array(name, value)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


def test_metadata_is_what_the_gguf_package_reads(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(numbers=[1, -2], ratios=[0.5], huge=2**40)
    expected = {
        name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")
    }
    assert read_metadata(path) == expected
    assert read_metadata(gguf_file(nested=[[1, 2], [3]]))["tokenizer.ggml.nested"] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("pre", "expressions", "whole"),
    [
        ("smollm", [r"\p{N}", GPT_2], False),
        ("gpt-2", [GPT_2], False),
        ("llama-bpe", [LLAMA_3], True),
        ("llama3", [LLAMA_3], True),
    ],
)
def test_each_named_pre_tokenizer_splits_by_its_expressions(
    gguf_file: Callable[..., Path], pre: str, expressions: list[str], whole: bool
) -> None:
    tokenizer = Tokenizer.open(gguf_file(pre=pre, add_bos_token=False))
    reference = SecondOpinion(TOKENS, MERGES, expressions, whole)
    for text in (*SAMPLES, "abc abc 1234 123", "hello\n\n\nhello", "'ſ 'S"):
        assert tokenizer.encode(text) == reference.encode(text), text
    assert (len(tokenizer.encode("123")), len(tokenizer.encode("abc"))) == {"smollm": (3, 2), "gpt-2": (1, 2)}.get(
        pre, (1, 1)
    )


def test_bos_follows_the_flag_and_else_the_name(gguf_file: Callable[..., Path]) -> None:
    for pre, flag, expected in (
        ("smollm", None, 0),
        ("smollm", True, 1),
        ("llama-bpe", None, 1),
        ("llama-bpe", False, 0),
    ):
        assert Tokenizer.open(gguf_file(pre=pre, add_bos_token=flag)).encode("hello").count(1) == expected


def test_user_defined_tokens_are_whole_but_not_special(gguf_file: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.open(gguf_file())
    assert tokenizer.eos_ids == {2, 3}
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.encode("<tool>") == [4]
    assert tokenizer.decode([4]) == "<tool>"


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("pre", {"pre": "banana"}),
        ("pre", {"pre": None}),
        ("model", {"model": "llama"}),
        ("tokens", {"tokens": None}),
        ("tokens", {"tokens": [*TOKENS[:-1], "h"]}),
        ("token_type", {"token_type": TYPES[:-1]}),
        ("merges", {"merges": None}),
        ("merges", {"merges": ["ab"]}),
        ("eos_token_id", {"eos_token_id": 10**6}),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(
    gguf_file: Callable[..., Path], key: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(gguf_file(**changes))
    assert caught.value.key == f"tokenizer.ggml.{key}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"NOPE" + bytes(40),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    ],
    ids=["empty", "short", "other", "version", "length"],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="GGUF"):
        Tokenizer.open(path)


def test_a_file_cut_off_anywhere_in_its_tokenizer_is_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file()
    whole = path.read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            Tokenizer.open(path)
