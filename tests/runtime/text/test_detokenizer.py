"""Ids to text while it streams: characters whole, the joined stream equal to decoding at once, the same cost for every
token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from headway_runtime.text.detokenizer import IncrementalDetokenizer
from headway_runtime.text.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = "한국어 테스트 👩‍👩‍👧 e\u0301 .A"


def stream(tokenizer: Tokenizer, ids: Iterable[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    parts = [detokenizer.push(token) for token in ids]
    return [*parts, detokenizer.flush()]


def test_no_part_of_a_stream_holds_a_broken_character(tokenizer: Tokenizer, default_tokenizer: Tokenizer) -> None:
    for one in (tokenizer, default_tokenizer):
        ids = one.encode(TEXT, add_special=False)
        parts = stream(one, ids, at_start=True)
        assert "".join(parts) == TEXT
        assert "\ufffd" not in "".join(parts)
        assert sum(1 for part in parts if part) > 10  # it streams, and does not wait for the end


def test_output_cut_anywhere_ends_in_at_most_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special=False)
    for end in range(len(ids) + 1):
        *parts, tail = stream(tokenizer, ids[:end], at_start=True)
        assert "\ufffd" not in "".join(parts)
        assert tail in ("", "\ufffd")
        assert TEXT.startswith("".join(parts))
        assert "".join(parts) + tail == tokenizer.decode(ids[:end], at_start=True)


def test_a_second_flush_gives_nothing(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in tokenizer.encode("é", add_special=False)[:-1]:
        detokenizer.push(token)
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


@settings(deadline=None)
@given(data=st.data(), skip_special=st.booleans(), at_start=st.booleans())
def test_the_joined_stream_is_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool, at_start: bool
) -> None:
    """For any ids: special ones in the middle of characters, invalid bytes, ids that do not exist."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    joined = "".join(stream(tokenizer, ids, skip_special=skip_special, at_start=at_start))
    assert joined == tokenizer.decode(ids, skip_special=skip_special, at_start=at_start)


def test_streams_side_by_side_do_not_mix(tokenizer: Tokenizer) -> None:
    texts = [f"{number} {TEXT} {'é' * number}" for number in range(8)]
    streams = [
        (IncrementalDetokenizer(tokenizer, at_start=True), tokenizer.encode(text, add_special=False)) for text in texts
    ]
    written = [""] * 8
    turns = [number for number, (_, ids) in enumerate(streams) for _ in ids]
    random.Random(1).shuffle(turns)
    for number in turns:
        detokenizer, ids = streams[number]
        written[number] += detokenizer.push(ids.pop(0))
    assert [text + detokenizer.flush() for text, (detokenizer, _) in zip(written, streams, strict=True)] == texts


def test_undecodable_bytes_are_replaced_as_they_come_and_cost_the_same_to_the_end(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    detokenizer = IncrementalDetokenizer(tokenizer)

    def hundred(raw: bytes) -> tuple[int, float]:
        start = time.perf_counter()
        text = "".join(detokenizer.push(ids[raw]) for _ in range(100))
        return len(text), time.perf_counter() - start

    invalid = [hundred(b"\xff") for _ in range(20)]
    assert [count for count, _ in invalid] == [100] * 20
    starts = [hundred(b"\xe2") for _ in range(20)]  # each one shows that the one before stays incomplete
    assert sum(count for count, _ in starts) == 1999
    for times in ([seconds for _, seconds in invalid], [seconds for _, seconds in starts]):
        assert min(times[-5:]) < 5 * min(times[:5])


def test_special_tokens_are_left_out_or_kept_alike_in_both_modes(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode(" hello", add_special=False), 4]
    for skip, start, end in ((True, "", ""), (False, "<s>", "<|im_end|>")):
        joined = "".join(stream(tokenizer, ids, skip_special=skip))
        assert joined == tokenizer.decode(ids, skip_special=skip)
        assert joined.startswith(start) and joined.endswith("hello" + end)


def test_the_first_space_of_a_continuation_is_kept(
    folder: Callable[..., Path], pieces_kind: Callable[..., object]
) -> None:
    """A sentencepiece decoder drops one space at the start of a text; output that goes on with a prompt needs it."""
    tokenizer = Tokenizer.open(folder(pieces_kind))
    ids = tokenizer.encode("hello world", add_special=False)
    assert "".join(stream(tokenizer, ids[1:])) == " world"
    assert tokenizer.decode(ids, at_start=True) == "hello world"
    assert tokenizer.decode(ids) == " hello world"


def test_spaces_before_punctuation_stay(default_tokenizer: Tokenizer) -> None:
    text = "Well , he said . Yes ! n't 's  ."
    assert "".join(stream(default_tokenizer, default_tokenizer.encode(text))) == text


@pytest.mark.parametrize("raw", [b"\xed\xa0\x80", b"\xf0\x80", b"\xc0\xaf", b"\xe2\x82", b"\xf4\x90\x80\x80"])
def test_broken_utf_8_is_replaced_as_python_does(tokenizer: Tokenizer, raw: bytes) -> None:
    ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    assert "".join(stream(tokenizer, [ids[bytes([byte])] for byte in raw])) == raw.decode(errors="replace")
