"""`headway calibrate` on a real runtime whose pace is known, and the line that it draws through a measured model."""

import re
from dataclasses import replace

import pytest
import tiny_model
from headway_cli.__main__ import main
from headway_cli.linear_fit import fit_line
from headway_cli.replica_options import on_paper, parse_coefficients
from headway_core.contract.documents import load_runtime_report
from headway_core.contract.reports import EngineLimits

PACE = (0.03, 0.0005, 0.002, 0.00001)
LIMITS = EngineLimits(max_num_seqs=32, prefill_token_budget=512, max_model_len=4096, block_size=16, total_blocks=4096)
SHAPES = ((0, 1, 16), (0, 8, 2000), (256, 0, 0), (64, 8, 800))
"""Prefill tokens, decodes, context tokens."""


def seconds(line, shape):
    return line[0] + sum(b * x for b, x in zip(line[1:], shape, strict=True))


@pytest.mark.timeout(240)
def test_a_runtime_of_known_pace_is_measured_to_have_it(tmp_path, capsys):
    model = tiny_model.write(tmp_path / "model")
    file = tmp_path / "replica.json"
    limits = ["--threads", "1", "--max-num-seqs", "8", "--num-blocks", "512", "--prefill-token-budget", "256"]
    pace = ",".join(map(str, PACE))
    assert main(["calibrate", "--model", str(model), "--json", str(file), "--", *limits, "--pace", pace]) == 0
    printed = re.search(r"^--coefficients (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    line = [float(number) for number in printed.split(",")]
    # The forward pass of a busy machine may take longer than the pace now and then, never less.
    for shape in SHAPES:
        assert seconds(PACE, shape) * 0.95 <= seconds(line, shape) <= seconds(PACE, shape) * 1.25
    report = load_runtime_report(file.read_text())
    assert report.emulated_pace == pace
    assert main(["plan", "--from", str(file), "--prompt-tokens", "64", "--output-tokens", "32", "--rate", "1"]) == 0
    assert (
        main(["plan", "--coefficients", printed, "--prompt-tokens", "64", "--output-tokens", "32", "--rate", "1"]) == 0
    )


def test_a_straight_model_gives_its_own_line_and_a_bent_one_says_how_far_off_it_is():
    model = parse_coefficients(",".join(map(str, PACE)))
    found = fit_line(model, LIMITS)
    for shape in SHAPES:
        assert seconds(found.coefficients, shape) == pytest.approx(seconds(PACE, shape), rel=0.05)
    assert found.error < 0.02
    assert all(number >= 0 for number in found.coefficients)
    bent = fit_line(replace(model, per_row=0.0, per_row_above=0.005, knee=100), LIMITS)
    assert bent.error > found.error
    assert parse_coefficients(str(bent)) is not None


def test_a_model_that_cannot_be_served_ends_with_1_and_the_runtimes_own_words(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert main(["calibrate", "--model", str(folder)]) == 1
    assert "tokenizer.json: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--json", "/nowhere/replica.json"], "folder does not exist"),
        (["--", "--max-num-seqs", "0"], "--max-num-seqs: must be from 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, message, capsys):
    assert main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_replica_on_paper_prefills_as_much_as_half_a_second_holds():
    limits = [
        on_paper(parse_coefficients(f"0.1,{b},0.002,0")).limits.prefill_token_budget for b in (0.01, 0.001, 0.00001)
    ]
    assert limits == [64, 400, 8192]
