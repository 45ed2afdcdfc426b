import argparse

import pytest
from headway_cli import bench
from headway_cli.__main__ import main
from headway_cli.bench_figures import figures
from headway_cli.bench_plot import page
from headway_cli.load_generator import PlannedRequest, RequestResult
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.trace_options import choose_trace, parse_mix
from headway_core.errors import InvalidInput

SLO = read_slo(DEFAULT)
CLASSES = {known.name: known for known in SLO.classes}


def arguments(*words):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *words])


def test_lengths_are_cut_to_the_context_and_classes_drawn_by_their_share():
    given = arguments("--requests", "400", "--mix", "interactive=0.75,batch=0.25")
    planned = bench.plan(choose_trace(given), given, 512, CLASSES, parse_mix(given.mix, SLO.classes, SLO.default_class))
    assert len(planned) == 400
    assert all(request.prompt_tokens + request.output_tokens <= 512 for request in planned)
    assert max(request.output_tokens for request in planned) == 256
    share = sum(request.class_name == "batch" for request in planned) / 400
    assert 0.18 < share < 0.32
    assert {request.service_tier for request in planned} == {"auto", "flex"}
    assert planned == bench.plan(
        choose_trace(given), given, 512, CLASSES, parse_mix(given.mix, SLO.classes, SLO.default_class)
    ), "seeded"


def test_pace_is_a_speed_or_a_rate():
    slow, fast = (choose_trace(arguments("--speed", speed)) for speed in ("1", "4"))
    assert slow[-1].at == pytest.approx(4 * fast[-1].at)
    timed = choose_trace(arguments("--rate", "7", "--requests", "300"))
    assert len(timed) / timed[-1].at == pytest.approx(7, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "1"], "at least 2"),
        (["--speed", "0"], "must be positive"),
        (["--rate", "-1"], "must be positive"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_words(words, message):
    with pytest.raises(InvalidInput, match=message):
        choose_trace(arguments(*words))


def test_where_nothing_can_be_written_is_refused_before_the_load(capsys):
    for flag in ("--json", "--plot"):
        assert main(["bench", "--url", "http://127.0.0.1:9", flag, "/nowhere/run"]) == 2
        assert f"{flag} /nowhere/run: its folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("mix", ["nobody=1", "batch", "batch=x", "batch=-1", "batch=0", "batch=nan"])
def test_a_mix_names_known_classes_and_positive_shares(mix):
    with pytest.raises(InvalidInput):
        parse_mix(mix, SLO.classes, SLO.default_class)


def test_the_page_stands_alone_and_escapes_names():
    record = RequestResult(PlannedRequest(0.0, 10, 2, class_name="interactive"), sent=0.0)
    record.status, record.finish_reason, record.first_token, record.token_times = 200, "stop", 0.3, [0.3, 0.4]
    lost = RequestResult(PlannedRequest(1.0, 10, 2, class_name="interactive"), sent=1.0)
    lost.status = 429
    objectives = {known.name: known.objectives for known in SLO.classes}.__getitem__
    text = page("<run>", {"a & b": figures([record, lost], objectives, 0.0)}, [record, lost], objectives)
    assert "&lt;run&gt;" in text and "a &amp; b" in text
    assert "http" not in text and "<script" not in text
    assert text.count("<figure>") == 3
    assert [tick for tick in ("0.5", "1", "2") if f">{tick}<" not in text] == [], "marks between powers of ten"
    empty = page("x", {"all": figures([lost], objectives, 0.0)}, [lost], objectives)
    assert "nothing was served" in empty
