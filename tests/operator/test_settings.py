import pytest
from headway_operator.settings import parse


def test_defaults():
    settings = parse(["--namespace", "prod"])
    assert (settings.namespaces, settings.lease_namespace, settings.interval, settings.stale_after) == (
        ("prod",),
        "prod",
        5.0,
        15.0,
    )


def test_every_namespace_needs_a_place_for_the_lease():
    settings = parse(["--lease-namespace", "headway-system"])
    assert (settings.namespaces, settings.lease_namespace) == ((), "headway-system")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--namespace", "BAD"], "must be at most 63 lower-case letters"),
        (["--interval", "5"], "must be a duration such as 500ms"),
        (["--interval", "0s"], "must be more than 0s"),
        (["--port", "70000"], "must be from 0 to 65535, not 70000"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--lease-duration", "2s"], "must be at least 3s, not 2s"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_a_bad_flag_is_named(flags, words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(flags)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    for word in ("ServingSLO", "lease", "ConfigMap", "examples:", "--namespace prod"):
        assert word in text
