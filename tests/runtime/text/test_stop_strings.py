"""Stop strings: the stream is the text before the earliest match, however it is cut into pieces; nothing is lost and
nothing leaks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from headway_runtime.text.stop_strings import StopStringMatcher
from hypothesis import example, given, settings
from hypothesis import strategies as st

TEXT = "She said: abcabd, and then abcabcabd.\n\nUser: 한국어 abab"


def oracle(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """By string search: the text before the earliest match, and where that match ends (the shortest of those that start
    there)."""
    matches = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not matches:
        return text, None
    start, length = min(matches)
    return text[:start], start + length


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, int, bool, list[str]]:
    matcher = StopStringMatcher(stops)
    parts = []
    for piece in pieces:
        parts.append(matcher.push(piece))
        if matcher.stopped:
            break
    parts.append(matcher.flush())
    return "".join(parts), matcher.num_tokens, matcher.stopped, parts


def tokens_up_to(pieces: Sequence[str], end: int | None) -> int:
    if end is None:
        return len(pieces)
    return next(count for count, length in enumerate(itertools.accumulate(map(len, pieces)), 1) if length >= end)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_every_substring_as_a_stop_gives_what_string_search_gives(size: int) -> None:
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    for length in range(1, 13):
        for at in range(len(TEXT) - length + 1):
            stop = TEXT[at : at + length]
            text, tokens, stopped, _ = run(pieces, [stop])
            expected, end = oracle(TEXT, [stop])
            assert (text, stopped, tokens) == (expected, True, tokens_up_to(pieces, end)), stop


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
@example(pieces=["a", "b", "c", "d"], stops=["bcd", "c"])
@example(pieces=["a", "b", "c", "x"], stops=["bcd", "c"])
@example(pieces=["a", "b", "c"], stops=["bcd", "c"])
@example(pieces=["abc"], stops=["ab", "abc"])
@example(pieces=["", "ab", "", ""], stops=["abc"])
def test_any_stops_in_any_pieces_agree_with_string_search(pieces: list[str], stops: list[str]) -> None:
    """Overlapping and nested stops too; and what goes out at any time is the beginning of the final text."""
    text, tokens, stopped, parts = run(pieces, stops)
    expected, end = oracle("".join(pieces), stops)
    assert (text, stopped) == (expected, end is not None)
    assert tokens == tokens_up_to(pieces, end)
    assert all(expected.startswith("".join(parts[:count])) for count in range(len(parts)))


@settings(deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=3), max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_still_be_a_stop(pieces: list[str], stop: str) -> None:
    matcher = StopStringMatcher([stop])
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += matcher.push(piece)
        if matcher.stopped:
            return
        heads = [length for length in range(len(stop)) if seen.endswith(stop[:length])]
        assert seen.removeprefix(sent) == stop[: max(heads)]


def test_a_half_match_is_flushed_at_the_end() -> None:
    matcher = StopStringMatcher(["END"])
    assert [matcher.push("the E"), matcher.push("N"), matcher.flush()] == ["the ", "", "EN"]
    assert not matcher.stopped and matcher.num_tokens == 2


def test_the_last_text_of_the_detokenizer_takes_part_without_being_a_token() -> None:
    matcher = StopStringMatcher(["b\ufffd"])
    assert [matcher.push("ab"), matcher.push(""), matcher.flush("\ufffd")] == ["a", "", ""]
    assert matcher.stopped and matcher.num_tokens == 2


def test_a_stop_at_the_very_start_leaves_an_empty_answer_of_one_token() -> None:
    assert run(["User: hi"], ["User"])[:3] == ("", 1, True)


def test_tokens_after_the_deciding_one_do_not_count() -> None:
    """Nested stops: the inner one wins only once the outer one has failed, and counts up to its own end."""
    text, tokens, stopped, parts = run(["a", "b", "c", "x", "y"], ["bcd", "c"])
    assert (text, tokens, stopped) == ("ab", 3, True)
    assert parts == ["a", "", "", "b", ""]


def test_nothing_may_follow_a_stop() -> None:
    matcher = StopStringMatcher(["a"])
    matcher.push("a")
    with pytest.raises(ValueError, match="ended"):
        matcher.push("b")


def test_stops_within_min_tokens_are_text() -> None:
    matcher = StopStringMatcher(["ab"], min_tokens=2)
    assert [matcher.push("ab"), matcher.push("a"), matcher.push("b")] == ["ab", "a", "b"]
    assert matcher.push("xab") == "x"
    assert matcher.stopped and matcher.num_tokens == 4


def test_without_stops_text_passes_through() -> None:
    matcher = StopStringMatcher([])
    assert [matcher.push("ab"), matcher.push(""), matcher.flush()] == ["ab", "", ""]
    assert matcher.num_tokens == 2


def test_a_long_stop_that_keeps_almost_matching_costs_no_more_per_character() -> None:
    def seconds(length: int) -> float:
        matcher = StopStringMatcher(["a" * length + "b"])
        start = time.perf_counter()
        for _ in range(4000):
            matcher.push("a")
        return time.perf_counter() - start

    assert min(seconds(1000) for _ in range(3)) < 10 * min(seconds(10) for _ in range(3))
