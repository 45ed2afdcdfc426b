import pytest
from headway_core.formatting import format_number, format_seconds, format_series, format_share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0, "0ms"),
        (0.0312, "31.2ms"),
        (0.9994, "999ms"),
        (0.9995, "1s"),
        (1.254, "1.25s"),
        (-2.5, "-2.5s"),
        (999.6, "1000s"),
        (86_400.0, "86400s"),
    ],
)
def test_seconds_have_three_digits_and_never_an_exponent(seconds, text):
    assert format_seconds(seconds) == text


def test_what_is_not_known_is_a_dash():
    assert format_share(0.9704) == "97.0%" and format_share(None) == "–"
    assert format_number(2.04) == "2.0" and format_number(None) == "–"
    assert format_series((0.1234, None, 0.98), 1000, 0) == "123 / – / 980"
