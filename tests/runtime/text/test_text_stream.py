"""Tokens to deltas: whole characters, no part of a stop string, log-probabilities with their text, the same whenever
deltas are taken."""

import itertools
import random

import pytest
from headway_runtime.ipc.messages import TokenLogprobs
from headway_runtime.text.text_stream import TextStream
from headway_runtime.text.tokenizer import Tokenizer

TEXT = "한국어 테스트 👩‍👩‍👧 e\u0301 .A"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return Tokenizer.open(tiny_llama)


def run(stream, ids, *, take_every=1, reason="length", logprobs=False):
    """Feeds all ids, taking deltas now and then; returns them."""
    deltas = []
    for at, token in enumerate(ids):
        if stream.finish is None:
            stream.feed(token, TokenLogprobs(-1.0, ()) if logprobs else None)
        if at % take_every == 0:
            deltas.append(stream.take())
    stream.end(reason)
    deltas.append(stream.take())
    return [delta for delta in deltas if delta is not None]


@pytest.mark.parametrize("take_every", [1, 2, 5, 100])
def test_pieces_join_to_the_whole_text_and_one_of_them_ends_it(tokenizer, take_every):
    ids = tokenizer.encode(TEXT, add_special=False)
    assert len(ids) > 2 * len(TEXT), "every character is made of several tokens"
    deltas = run(TextStream(tokenizer, (), 0), ids, take_every=take_every)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [delta.finish for delta in deltas if delta.finish] == [deltas[-1].finish] == ["length"]


def test_a_cut_anywhere_replaces_at_most_the_last_character(tokenizer):
    ids = tokenizer.encode(TEXT, add_special=False)
    for length in range(1, len(ids)):
        *before, last = run(TextStream(tokenizer, (), 0), ids[:length])
        assert all("\ufffd" not in delta.text for delta in before)
        assert TEXT.startswith((("".join(delta.text for delta in before)) + last.text).rstrip("\ufffd"))


def test_interleaved_streams_share_nothing(tokenizer):
    texts = [TEXT[at:] + TEXT[:at] for at in range(8)]
    streams = [TextStream(tokenizer, (), 0) for _ in texts]
    encoded = [tokenizer.encode(text, add_special=False) for text in texts]
    for tokens in itertools.zip_longest(*encoded):
        for stream, token in zip(streams, tokens, strict=True):
            if token is not None:
                stream.feed(token, None)
    for stream, text in zip(streams, texts, strict=True):
        stream.end("length")
        assert stream.take().text == text


def test_stop_strings_agree_with_a_search_of_the_whole_text(tokenizer):
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices("abc", k=30))
        stops = tuple({"".join(draw.choices("abc", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 5))})
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        deltas = run(
            TextStream(tokenizer, stops, 0), tokenizer.encode(text, add_special=False), take_every=draw.randrange(1, 6)
        )
        assert "".join(delta.text for delta in deltas) == (text if cut is None else text[:cut])
        assert deltas[-1].finish == ("length" if cut is None else "stop")


def test_tokens_after_a_stop_string_do_not_count(tokenizer):
    stream = TextStream(tokenizer, ("c",), 0)
    for token in tokenizer.encode("abcdef", add_special=False):
        stream.feed(token, None)
    assert (stream.num_tokens, stream.finish, stream.take().text) == (3, "stop", "ab")


def test_every_token_delivers_its_logprobs_once_even_those_held_back(tokenizer):
    ids = tokenizer.encode(TEXT + "xyx", add_special=False)
    deltas = run(TextStream(tokenizer, ("xyz",), 0), ids, logprobs=True)
    entries = [entry for delta in deltas for entry in delta.entries]
    assert len(entries) == len(ids)
    assert b"".join(entry.token.raw for entry in entries).decode() == TEXT + "xyx"
    stopped = run(TextStream(tokenizer, ("xy",), 0), ids, logprobs=True)
    entries = [entry for delta in stopped for entry in delta.entries]
    assert b"".join(entry.token.raw for entry in entries).decode() == TEXT == "".join(delta.text for delta in stopped)


def test_special_tokens_are_counted_and_are_no_text(tokenizer):
    stream = TextStream(tokenizer, (), 0)
    for token in (2, *tokenizer.encode("ab", add_special=False), 3):
        stream.feed(token, TokenLogprobs(float("-inf"), ()))
    stream.end("length")
    delta = stream.take()
    assert (delta.text, stream.num_tokens) == ("ab", 4)
    assert [entry.token.raw for entry in delta.entries] == [b"", b"a", b"b", b""]
    assert {entry.token.logprob for entry in delta.entries} == {-9999.0}, "JSON has no infinity"
