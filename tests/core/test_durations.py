import pytest
from headway_core.durations import format_duration, parse_duration
from headway_core.errors import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1s", 1.0),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("0s", 0.0),
        ("1s500ms", 1.5),
        ("10m", 600.0),
        ("99999ms", 99.999),
    ],
)
def test_durations_mean_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "bad", ["", "1", "1.5s", "-1s", "+1s", "1 s", "1d", "s", "1s2", "100000s", "1s1s1s1s1s", None, 1, 1.5, True, "1s\n"]
)
def test_anything_else_is_refused_naming_the_field(bad):
    with pytest.raises(SpecError) as caught:
        parse_duration(bad, "spec.objectives.ttft.target")
    assert caught.value.field == "spec.objectives.ttft.target"
    assert "500ms" in str(caught.value)


def test_format_is_shortest_and_rounds_to_milliseconds():
    assert format_duration(0) == "0s"
    assert format_duration(90.0004) == "1m30s"
    assert format_duration(0.0416) == "42ms"
    assert format_duration(3661.001) == "1h1m1s1ms"
    for bad in (-1, 1e12):
        with pytest.raises(ValueError):
            format_duration(bad)
