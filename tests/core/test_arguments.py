"""Values of flags: the rule and what arrived are in every message."""

from argparse import ArgumentTypeError

import pytest
from headway_core.arguments import dns_label, duration, port, seconds, size, step_time_coefficients, whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("5", 5), ("1KiB", 1024), ("1kB", None), ("2G", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("-1", None), ("1e9", None)],
)
def test_sizes(text, number):
    if number is None:
        with pytest.raises(ArgumentTypeError, match="not a size"):
            size(text)
    else:
        assert size(text) == number


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (port, "0", 0),
        (port, "65535", 65535),
        (whole_number(1), "1000000000000", 10**12),
        (seconds(0.0), "0", 0.0),
        (seconds(0.01), "86400", 86400.0),
        (duration(), "1m30s", 90.0),
        (duration(3.0), "3s", 3.0),
        (dns_label, "a" * 63, "a" * 63),
        (step_time_coefficients, "0.03,0,2e-3,0", (0.03, 0.0, 0.002, 0.0)),
    ],
)
def test_the_bounds_are_within(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (port, "65536", "must be from 0 to 65535, not 65536"),
        (port, "²", "must be a whole number, not '²'"),
        (whole_number(1), "0", "must be at least 1, not 0"),
        (whole_number(1), "1.0", "must be a whole number, not '1.0'"),
        (seconds(0.01), "0", "must be from 0.01 to 86400 seconds, not '0'"),
        (seconds(0.0), "nan", "must be from 0 to 86400 seconds, not 'nan'"),
        (seconds(0.0), "soon", "must be from 0 to 86400 seconds, not 'soon'"),
        (duration(), "5", "must be a duration such as 500ms, 2s or 1m30s, not '5'"),
        (duration(), "0s", "must be more than 0s, not 0s"),
        (duration(3.0), "2s", "must be at least 3s, not 2s"),
        (size, "0", "must be at least 1 byte, not 0"),
        (dns_label, "a" * 64, "must be at most 63 lower-case letters, digits and '-'"),
        (dns_label, "a-", "must be at most 63 lower-case letters, digits and '-', not 'a-'"),
        (step_time_coefficients, "0,1,1,1", "(a above 0, none negative)"),
        (step_time_coefficients, "1,2,3", "'1,2,3' is not four numbers"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_words(parse, text, says):
    with pytest.raises(ArgumentTypeError) as refused:
        parse(text)
    assert says in str(refused.value)
