"""`headway plan` against arithmetic done here, and against what a person may get wrong."""

import json
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from headway_cli.__main__ import main
from headway_cli.replica_options import on_paper, parse_coefficients
from headway_core.contract.documents import dump
from headway_core.contract.policy import Endpoint, Knobs, Policy, Pool
from headway_core.contract.reports import ClassReport, GatewayReport, Mix, PoolReport, ReplicaState
from headway_core.slo import Objectives, PriorityClass, TpotObjective

A, B, D, E = 0.02, 0.0001, 0.0005, 0.000001
COEFFICIENTS = f"{A},{B},{D},{E}"
MIX = ["--prompt-tokens", "512", "--output-tokens", "128"]
SLO = """
apiVersion: headway.dev/v1alpha1
kind: ServingSLO
metadata: {name: chat}
spec:
  targetRef: {name: chat-runtime}
  objectives: {tpot: {target: 50ms}}
  bounds: {replicas: {min: 1, max: 40}}
"""


@pytest.fixture
def slo(tmp_path):
    path = tmp_path / "slo.yaml"
    path.write_text(SLO)
    return path


def planned(tmp_path, *words):
    out = tmp_path / "plan.json"
    code = main(["plan", "--json", str(out), *words])
    return code, json.loads(out.read_text())


def test_the_plan_is_what_the_formulas_give(tmp_path, slo, capsys):
    code, plan = planned(tmp_path, "--slo", str(slo), "--coefficients", COEFFICIENTS, *MIX, "--rate", "30")
    assert code == 0
    prompt, output, target, rho = 512, 128, 0.05, 0.8
    context = prompt + output / 2
    sequences = (target - A) / (B * prompt / (rho * output) + D + E * context)
    rate = sequences / (output * target)
    # The model prices the row that a completed prompt samples, the formula does not: half a per cent here.
    assert math.floor(0.98 * sequences) <= plan["maxNumSeqs"] <= sequences
    assert plan["prefillTokenBudget"] == pytest.approx(sequences * prompt / (rho * output), rel=0.03)
    assert plan["requestsPerSecondOfOneReplica"] == pytest.approx(rate, rel=0.02)
    assert plan["replicas"] == math.ceil(30 / rate)
    assert plan["binding"] == "TPOT"
    said = capsys.readouterr().out
    assert f"max_num_seqs          {plan['maxNumSeqs']}" in said
    assert "30 requests/s arrive, one replica carries" in said


def test_more_replicas_than_bounds_allow_is_said(tmp_path, slo):
    slo.write_text(SLO.replace("max: 40", "max: 3"))
    _, plan = planned(tmp_path, "--slo", str(slo), "--coefficients", COEFFICIENTS, *MIX, "--rate", "30")
    assert plan["replicas"] == 3
    assert {"AtMax"} == {known["reason"] for known in plan["conditions"] if known["type"] == "WithinBounds"}


def test_fewer_replicas_are_planned_at_once_since_the_load_is_taken_to_last(tmp_path, slo):
    _, plan = planned(
        tmp_path, "--slo", str(slo), "--coefficients", COEFFICIENTS, *MIX, "--rate", "3", "--replicas", "8"
    )
    assert plan["replicas"] == 2


@pytest.mark.parametrize(
    ("words", "binding"),
    [
        (["--kv-tokens", "2560"], "KV blocks"),
        (["--max-num-seqs", "3"], "start-up capacity"),
        (["--prefill-token-budget", "8"], "prefill token budget"),
    ],
)
def test_what_binds_is_named_with_what_would_help(tmp_path, slo, words, binding, capsys):
    code, plan = planned(tmp_path, "--slo", str(slo), "--coefficients", COEFFICIENTS, *MIX, *words)
    assert (code, plan["binding"], plan["replicas"]) == (0, binding, None)
    assert "would" in capsys.readouterr().out


def test_a_promise_that_no_setting_keeps_ends_with_1_and_the_reason(tmp_path, slo, capsys):
    code, plan = planned(tmp_path, "--slo", str(slo), "--coefficients", "0.2,0,0,0", *MIX)
    assert (code, plan["maxNumSeqs"]) == (1, None)
    assert "TPOT 50ms unreachable: one sequence already takes 200ms" in capsys.readouterr().out


def test_a_load_report_from_a_file_gives_the_same_plan_as_its_coefficients(tmp_path, slo):
    report = tmp_path / "replica.json"
    report.write_text(dump(on_paper(parse_coefficients(COEFFICIENTS))))
    _, typed = planned(tmp_path, "--slo", str(slo), "--coefficients", COEFFICIENTS, *MIX, "--rate", "9")
    _, read = planned(tmp_path, "--slo", str(slo), "--from", str(report), *MIX, "--rate", "9")
    assert read == typed


def test_without_requests_seen_the_plan_is_unknown_and_says_what_to_add(tmp_path, slo, capsys):
    report = tmp_path / "replica.json"
    report.write_text(dump(on_paper(parse_coefficients(COEFFICIENTS))))
    assert main(["plan", "--slo", str(slo), "--from", str(report)]) == 1
    assert "--prompt-tokens" in capsys.readouterr().out


@contextmanager
def control_port(answers):
    """A control port that answers GET with `answers`: path → function."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers[self.path]().encode() if self.path in answers else b"{}"
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_gateway_leads_to_its_replicas_and_its_demand(tmp_path, slo):
    runtime = replace(
        on_paper(parse_coefficients(COEFFICIENTS)), mix=Mix(50, 512, 0, 128, 576), effective=Knobs(64, 4096)
    )
    offered = iter(range(0, 100_000, 300))

    def reports():
        report = PoolReport("chat-runtime", {"default": ClassReport(offered=next(offered))})
        return dump(GatewayReport("g", "boot", 1, 0.0, ReplicaState.READY, (report,)))

    with control_port({"/load": lambda: dump(runtime)}) as behind:
        classes = (PriorityClass("default", 0, Objectives(tpot=TpotObjective(0.05))),)
        policy = Policy(1, "uid", 1, Pool("chat-runtime", (Endpoint("127.0.0.1", 1, behind),)), classes, "default")
        with control_port({"/load": reports, "/policy": lambda: f'{{"chat-runtime": {dump(policy)}}}'}) as gateway:
            code, plan = planned(tmp_path, "--slo", str(slo), "--from", f"http://127.0.0.1:{gateway}", "--watch", "0.2")
            assert code == 0
            # At least 300 requests in at most a few seconds: more than the one replica that is there carries.
            assert plan["replicas"] > 1
            assert abs(plan["maxNumSeqs"] - 18.9) <= 1
            slo.write_text(SLO.replace("chat-runtime", "another"))
            assert main(["plan", "--slo", str(slo), "--from", f"http://127.0.0.1:{gateway}", "--watch", "0"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--coefficients a,b,d,e"),
        (["--coefficients", "1,2,3", *MIX], "four numbers"),
        (["--coefficients", "0,1,1,1", *MIX], "a above 0"),
        (["--coefficients", "nan,1,1,1", *MIX], "four numbers"),
        (["--coefficients", COEFFICIENTS], "--prompt-tokens N"),
        (["--coefficients", COEFFICIENTS, "--prompt-tokens", "9"], "go together"),
        (
            ["--coefficients", COEFFICIENTS, "--prompt-tokens", "0", "--output-tokens", "9"],
            "--prompt-tokens must be at least 1, not 0",
        ),
        (["--coefficients", COEFFICIENTS, *MIX, "--rate", "-1"], "--rate"),
        (["--coefficients", COEFFICIENTS, *MIX, "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--coefficients", COEFFICIENTS, *MIX, "--json", "/nowhere/plan.json"], "folder does not exist"),
        (["--coefficients", COEFFICIENTS, *MIX, "--slo", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--from", "/nowhere.json"], "cannot be read"),
        (["--from", "http://127.0.0.1:9"], "does not answer"),
        (["--from", __file__], "is not a load report"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(words, message, capsys):
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headway plan: ")
    assert message in said
