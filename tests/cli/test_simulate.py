"""`headway simulate` in small: the rules rank as they must, the optimum bounds them, classes are told apart, mistakes
are named."""

import json
from dataclasses import replace

import pytest
from headway_cli.__main__ import main
from headway_cli.replica_options import on_paper, parse_coefficients
from headway_core.contract.documents import dump
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits

COEFFICIENTS = "0.01,0.0001,0.0005,0.000001"
SLO = """
apiVersion: headway.dev/v1alpha1
kind: ServingSLO
metadata: {name: chat}
spec:
  targetRef: {name: chat-runtime}
  objectives: {ttft: {target: 1s, perThousandPromptTokens: 250ms}, tpot: {target: 50ms}}
  defaultClass: interactive
  classes:
    - {name: interactive, priority: 100, shares: 8}
    - {name: batch, priority: 0, objectives: {ttft: {target: 60s}}}
"""


def simulated(tmp_path, *words):
    out = tmp_path / "run.json"
    assert main(["simulate", "--json", str(out), *words]) == 0
    return json.loads(out.read_text())


def test_under_overload_the_default_rule_keeps_most_and_nobody_beats_the_optimum(tmp_path, capsys):
    run = simulated(tmp_path, "--trace", "code", "--requests", "250", "--rho", "1.2", "--beside", "prediction,open")
    kept = {rule: report["total"]["ttft_attainment"] for rule, report in run["rules"].items()}
    assert list(kept) == ["moore", "prediction", "open"]
    assert kept["moore"] > kept["prediction"] > kept["open"]
    assert run["rho"] == pytest.approx(1.2)
    alone = run["oneServer"]
    assert alone["optimum"] >= alone["rules"]["moore"] > alone["rules"]["open"]
    assert run["rules"]["open"]["total"]["shed"] == {}
    said = capsys.readouterr()
    assert "moore turned away: " in said.out
    assert "exact optimum" in said.out
    assert "prompts Q4" in said.out
    assert "simulating: open" in said.err
    # The same words give the same run.
    assert run == simulated(
        tmp_path, "--trace", "code", "--requests", "250", "--rho", "1.2", "--beside", "prediction,open"
    )


def test_classes_are_judged_by_their_own_promise_and_knobs_come_from_the_planner(tmp_path, capsys):
    slo = tmp_path / "slo.yaml"
    slo.write_text(SLO)
    words = [
        "--slo",
        str(slo),
        "--mix",
        "interactive=0.7,batch=0.3",
        "--coefficients",
        COEFFICIENTS,
        "--beside",
        "none",
    ]
    run = simulated(tmp_path, *words, "--requests", "60", "--scale-lengths", "0.25")
    classes = run["rules"]["moore"]["classes"]
    assert set(classes) == {"interactive", "batch"}
    assert sum(known["offered"] for known in classes.values()) == 60
    assert run["oneServer"] is None
    said = capsys.readouterr().out
    assert "no exact optimum" in said
    assert (
        f"max_num_seqs {run['maxNumSeqs']}, prefill token budget {run['prefillTokenBudget']} (as the planner "
        "sets them: TPOT 50ms" in said
    )
    assert said.index("class interactive") < said.index("class batch")
    assert (
        main(
            [
                "plan",
                "--slo",
                str(slo),
                "--coefficients",
                COEFFICIENTS,
                "--prompt-tokens",
                "250",
                "--output-tokens",
                "50",
            ]
        )
        == 0
    )


def test_knobs_and_memory_of_a_load_report_are_those_simulated(tmp_path):
    report = on_paper(parse_coefficients(COEFFICIENTS))
    report = replace(report, limits=EngineLimits(32, 1024, 4096, 24, 40), effective=Knobs(7, 96))
    file = tmp_path / "replica.json"
    file.write_text(dump(report))
    run = simulated(tmp_path, "--from", str(file), "--requests", "50", "--beside", "none", "--rate", "1")
    assert (run["maxNumSeqs"], run["prefillTokenBudget"]) == (7, 96)
    # 960 tokens of KV: some of these conversations are longer, and are counted as what they are.
    total = run["rules"]["moore"]["total"]
    assert 0 < total["unschedulable"] < 50
    assert total["ttft_attainment"] <= 1 - total["unschedulable"] / 50
    changed = simulated(
        tmp_path, "--from", str(file), "--requests", "50", "--beside", "none", "--rate", "1", "--max-num-seqs", "2"
    )
    assert (changed["maxNumSeqs"], changed["prefillTokenBudget"]) == (2, 96)


def test_the_traces_own_pace_is_kept_when_asked(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"2024-01-01 00:00:{second:02}.0000000,2000,100" for second in range(0, 40, 2)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    run = simulated(tmp_path, "--trace", str(trace), "--requests", "0", "--speed", "2", "--beside", "none")
    assert run["requests"] == 20
    assert run["rules"]["moore"]["seconds"] == pytest.approx(19, abs=4)
    assert run["rho"] < 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
        (["--trace", __file__], "a trace ends in"),
        (["--requests", "1"], "at least 2"),
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--rho", "0"], "--rho must be positive"),
        (["--rate", "nan"], "--rate must be positive"),
        (["--speed", "-1"], "--speed must be positive"),
        (["--beside", "best"], "the rules are moore, prediction"),
        (["--size-error", "1"], "--size-error"),
        (["--mix", "vip=1"], "has the classes default"),
        (["--slo", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--json", "/nowhere/run.json"], "folder does not exist"),
        (["--kv-tokens", "1", "--requests", "5"], "no request of this trace fits"),
        (["--coefficients", "0.03"], "four numbers"),
        (["--from", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(words, message, capsys):
    assert main(["simulate", *words]) == 2
    said = capsys.readouterr().err
    assert "headway simulate: " in said
    assert message in said


def test_requests_that_come_all_at_once_have_no_pace(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-01-01 00:00:00.0000000,100,10\n" * 3)
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "all come at one instant" in capsys.readouterr().err
