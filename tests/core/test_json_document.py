"""Request bodies read strictly, small and large by the same rules."""

import pytest
from headway_core.errors import RequestError
from headway_core.json_document import LARGE_BYTES, MAX_CONTAINERS, parse_object

GOOD = [
    '{"a": 1, "b": [1.5, -2e3, true, false, null, "\\u00e9\\n\\ud83d\\ude00"], "c": {"d": {}, "e": []}}',
    ' {"a" : [ 1 , 2 ] , "b":{ "c" : "d" } } \n',
    '{"é": "가", "lone": "\\ud83d", "big": 123456789012345678901234567890}',
    "{}",
]
BAD = [
    "",
    "[1]",
    "5",
    "null",
    '{"a": 1,}',
    '{"a": [1, 2}',
    '{"a" 1}',
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": 1e999}',
    '{"a": 1, "a": 2}',
    '{"a": {"b": 1, "b": 1}}',
    '{"a": "\\x"}',
    '{"a": "tab\t"}',
    '{"a": 01}',
    '{"a": 1} trailing',
    '\ufeff{"a": 1}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}",
    '{"a": ' + '{"b":' * 20_000 + "1" + "}" * 20_000 + "}",
    '{"a": ' + "[" * 100_000,
]


def outcome(body):
    """What comes of reading: the object, or the complaint without places, which differ with padding."""
    try:
        return parse_object(body)
    except RequestError as error:
        return str(error).split(": line")[0].split(" (char")[0], error.code


@pytest.mark.parametrize("text", [*GOOD, *BAD], ids=lambda text: ascii(text[:20]))
def test_a_large_body_is_read_by_the_same_rules_as_a_small_one(text):
    small = outcome(text.encode())
    assert isinstance(small, dict) == (text in GOOD)
    # White space after a document changes nothing but its size.
    assert outcome(text.encode() + b" " * LARGE_BYTES) == small


def test_what_is_not_utf_8_is_refused_at_any_size():
    for padding in (0, LARGE_BYTES):
        assert outcome(b'{"a": "\xff' + b"x" * padding + b'"}')[1] == "invalid_json"


@pytest.mark.parametrize("item", ["[]", "{}", "[[]]", '{"a":[1]}'])
def test_lists_and_objects_are_counted_in_a_large_body(item):
    each = item.count("[") + item.count("{")
    fits = (MAX_CONTAINERS - 2) // each

    def body(count):
        return ('{"a":[' + ",".join([item] * count) + "]}").ljust(LARGE_BYTES).encode()

    assert len(parse_object(body(fits))["a"]) == fits
    with pytest.raises(RequestError, match="more than 100000 lists and objects"):
        parse_object(body(fits + 1))
