"""`headway plan`: what the operator would set for a promise, with the reason, without setting it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headway_core.contract.policy import Knobs
from headway_core.contract.reports import Mix, RuntimeReport
from headway_core.errors import InvalidInput
from headway_core.formatting import format_seconds
from headway_core.planning.capacity import Binding, ReplicaCapacity, Workload, step_seconds
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Memory, Plan, plan
from headway_core.planning.scaling import ScaleMemory
from headway_core.planning.snapshot import Demand, ObservedReplica, Phase, Snapshot, Traffic
from headway_core.slo import Mode, Range, ServingSLO

from headway_cli.replica_options import (
    add_replica_options,
    check_replica_options,
    on_paper,
    parse_coefficients,
    with_limits,
)
from headway_cli.result_file import check_result_file
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.slo_text import slo_in_words
from headway_cli.traffic_source import SOURCES, ObservedPool, observe

EPILOG = """\
examples:
  headway plan --coefficients 0.03,0.0005,0.002,0.00001 --prompt-tokens 512 --output-tokens 128 --rate 3
  headway plan --slo my-slo.yaml --from http://127.0.0.1:8001           a runtime that serves: its own step time and mix
  headway plan --slo my-slo.yaml --from http://127.0.0.1:8001 --rate 12 ... at another load
  headway calibrate --json replica.json && headway plan --from replica.json --prompt-tokens 512 --output-tokens 128

--from a gateway's control port takes the replicas behind it and counts what arrives for --watch seconds. In a cluster:
  kubectl port-forward pod/PODNAME 8001 &

It is the same planner that the operator and `headway up` run. Exit code 0: there is a setting that keeps the promise;
1: there is none, or too little is known; 2: it was asked for something impossible.
"""

_ADVICE = {
    Binding.TPOT: "a looser TPOT target, shorter prompts or a faster step would allow more",
    Binding.ITERATION: "no class has a TPOT objective, so only the length of an iteration holds it",
    Binding.PREFILL: "a larger prefill token budget at the replicas' start (or in "
    "spec.bounds.prefillTokenBudget.max) would allow more",
    Binding.KV: "more KV memory (headway-runtime --kv-cache-memory-bytes) would allow more",
    Binding.CAPACITY: "replicas started with a larger --max-num-seqs would carry more",
    Binding.BOUNDS: "a larger spec.bounds.maxNumSeqs.max would allow more",
    Binding.EXPERIENCE: "it goes no further than twice what was seen in one iteration; under load it is raised "
    "step by step",
}
_EVER = 1e9
"""Seconds: the demand is taken to have been so for longer than any window."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="what the operator would set for a promise, and why: max_num_seqs, prefill token budget, replicas",
        description="Say what the operator would set to keep a promise, and what binds it. Nothing is set.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--slo", type=Path, metavar="FILE", help="the ServingSLO to keep (default: that of `headway up`)"
    )
    add_replica_options(parser, SOURCES)
    load = parser.add_argument_group("load")
    load.add_argument("--prompt-tokens", type=float, metavar="N", help="mean prompt (default: of what finished lately)")
    load.add_argument("--output-tokens", type=float, metavar="N", help="mean output (default: of what finished lately)")
    load.add_argument(
        "--context",
        type=float,
        metavar="N",
        help="mean tokens that a decoding sequence holds (default: its prompt and half of its output)",
    )
    load.add_argument(
        "--rate", type=float, metavar="R", help="requests per second that arrive (default: counted at the gateway)"
    )
    load.add_argument(
        "--replicas", type=int, metavar="N", help="replicas that there are now (default: those found, or 1)"
    )
    load.add_argument(
        "--watch",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to count what arrives at a gateway (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan")


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What the planner decides from."""

    slo: ServingSLO
    replicas: tuple[RuntimeReport, ...]
    traffic: Traffic | None
    gateways: int
    scale: int


def run(given: argparse.Namespace) -> int:
    """Prints the plan; 0 when it keeps the promise, 1 when no plan does or too little is known.

    Raises:
        InvalidInput: with a sentence for the person at the terminal.
    """
    _check(given)
    slo = read_slo(given.slo or DEFAULT)
    inputs = plan_input(given, slo)
    found = recommend(inputs)
    for line in explain(inputs, found):
        print(line)
    if given.json:
        given.json.write_text(json.dumps(document(inputs, found), indent=1))
    return 0 if found.knob_plan.estimate.capacity is not None else 1


def _check(given: argparse.Namespace) -> None:
    check_replica_options(given)
    check_result_file(given.json, "--json")
    if not given.sources and not given.coefficients:
        raise InvalidInput(
            "needs a replica to plan for: --from URL|FILE, or --coefficients a,b,d,e (`headway calibrate` "
            "measures them)"
        )
    for flag, value, least in (
        ("--prompt-tokens", given.prompt_tokens, 1.0),
        ("--output-tokens", given.output_tokens, 1.0),
        ("--context", given.context, 1.0),
        ("--replicas", given.replicas, 1),
        ("--rate", given.rate, 0.0),
        ("--watch", given.watch, 0.0),
    ):
        if value is not None and not least <= value < math.inf:
            raise InvalidInput(f"{flag} must be at least {least:g}, not {value:g}")
    if (given.prompt_tokens is None) != (given.output_tokens is None):
        raise InvalidInput("--prompt-tokens and --output-tokens go together: both, or neither")
    if given.coefficients and given.prompt_tokens is None:
        raise InvalidInput("--coefficients say nothing of the requests: add --prompt-tokens N and --output-tokens N")
    if given.context is not None and given.prompt_tokens is None:
        raise InvalidInput("--context goes with --prompt-tokens and --output-tokens")


def plan_input(given: argparse.Namespace, slo: ServingSLO) -> PlanInput:
    """The inputs, from what was observed and what the command line says instead."""
    if given.coefficients:
        seen = ObservedPool({"on-paper": on_paper(parse_coefficients(given.coefficients))})
    else:
        watch = given.watch if given.rate is None else 0.0
        seen = observe(
            given.sources,
            slo.target_name if given.slo else None,
            slo.window,
            watch,
            lambda line: print(line, file=sys.stderr),
        )
    reports = [with_limits(report, given) for report in seen.replicas.values()]
    if given.prompt_tokens is not None:
        prompt, output = given.prompt_tokens, given.output_tokens
        mix = Mix(slo.min_samples, prompt, 0.0, output, given.context or prompt + output / 2)
        reports = [replace(report, mix=mix) for report in reports]
    traffic = seen.traffic
    if given.rate is not None:
        # A whole count, over as long as it takes: the rate stays exactly what was asked.
        count = math.ceil(given.rate * slo.window)
        demand = Demand(count, count / given.rate if count else slo.window)
        traffic = Traffic(slo.window, {}, demand, demand)
    return PlanInput(slo, tuple(reports), traffic, max(1, len(seen.gateways)), given.replicas or len(reports))


def recommend(inputs: PlanInput) -> Plan:
    """The planner's answer to a recommendation, as if the load had long been so: no window has to pass first."""
    slo = inputs.slo
    bounds = slo.bounds if slo.bounds.replicas is not None else replace(slo.bounds, replicas=Range(1, 10_000))
    replicas = tuple(ObservedReplica(report.boot_id, Phase.READY, report, 0.0) for report in inputs.replicas)
    snapshot = Snapshot(
        replicas=replicas,
        scale=inputs.scale,
        traffic=inputs.traffic,
        gateways=inputs.gateways,
        gateways_reporting=inputs.gateways,
    )
    memory = Memory(scaling=ScaleMemory(known_since=-_EVER, known_at=0.0))
    return plan(snapshot, replace(slo, mode=Mode.RECOMMEND, bounds=bounds), memory, now=0.0)


def explain(inputs: PlanInput, found: Plan) -> list[str]:
    """The plan for people."""
    capacity = found.knob_plan.estimate.capacity
    lines = [f"promise: {slo_in_words(known)}" for known in inputs.slo.classes]
    mixes = [report.mix for report in inputs.replicas if report.mix is not None]
    load = Workload.of(mixes)
    if load is not None:
        lines.append(
            f"requests: {load.prompt:.0f} prompt tokens ({load.cached:.0f} of them cached), {load.output:.0f} "
            "output tokens on average"
        )
    if capacity is None:
        return [*lines, "", f"no plan: {_why_not(found)}", *_conditions(found)]
    knobs = _knobs(inputs, found)
    lines += ["", f"max_num_seqs          {knobs.max_num_seqs}", f"prefill token budget  {knobs.prefill_token_budget}"]
    if inputs.traffic is None:
        lines.append("replicas              –  (add --rate R, or --from a gateway's control port)")
    else:
        lines.append(f"replicas              {found.replicas}  ({inputs.scale} now; {found.replicas_message})")
        if inputs.slo.bounds.replicas is None:
            lines.append(
                "                      the SLO has no spec.bounds.replicas, so the operator would leave them to you"
            )
    lines += [
        "",
        f"one replica carries {capacity.rate:.3g} requests/s",
        f"{found.knob_plan.message}",
        _ADVICE[capacity.binding],
    ]
    lines += _iteration(inputs, load, capacity)
    return [*lines, *_conditions(found)]


def _why_not(found: Plan) -> str:
    estimate = found.knob_plan.estimate
    if estimate.unreachable is not None:
        return f"{estimate.unreachable.message}. Relax the target, or serve a smaller model"
    return (
        f"{estimate.unknown}. Send some requests first, or say what they are with --prompt-tokens and --output-tokens"
    )


def _knobs(inputs: PlanInput, found: Plan) -> Knobs:
    """As decided; what is close enough to stay is what is in force."""
    effective = inputs.replicas[0].effective
    return Knobs(
        found.knobs.max_num_seqs or effective.max_num_seqs,
        found.knobs.prefill_token_budget or effective.prefill_token_budget,
    )


def _iteration(inputs: PlanInput, load: Workload | None, capacity: ReplicaCapacity) -> list[str]:
    """Where the time of a full iteration goes."""
    model = next((report.step_time for report in inputs.replicas if report.step_time is not None), None)
    if model is None or load is None:
        return []
    decodes = step_seconds(model, load, 0.0, capacity.sequences)
    context = model.per_context_token * capacity.sequences * load.context
    return [
        f"a full iteration takes {format_seconds(capacity.iteration)}: "
        f"{format_seconds(model.base)} whatever it carries, "
        f"{format_seconds(decodes - context - model.base)} for its sequences, "
        f"{format_seconds(context)} for their context, "
        f"{format_seconds(max(0.0, capacity.iteration - decodes))} for prefill"
    ]


def _conditions(found: Plan) -> list[str]:
    words = {True: "True", False: "False", None: "Unknown"}
    return ["", *(f"{one.type} {words[one.status]} ({one.reason}): {one.message}" for one in _shown(found))]


def _shown(found: Plan) -> list[Condition]:
    return [condition for condition in found.conditions if condition.type in ("Feasible", "WithinBounds")]


def document(inputs: PlanInput, found: Plan) -> dict[str, object]:
    """The plan for programs. What is not known is null."""
    capacity = found.knob_plan.estimate.capacity
    knobs = _knobs(inputs, found)
    return {
        "maxNumSeqs": knobs.max_num_seqs if capacity else None,
        "prefillTokenBudget": knobs.prefill_token_budget if capacity else None,
        "replicas": found.replicas if inputs.traffic is not None else None,
        "requestsPerSecondOfOneReplica": capacity.rate if capacity else None,
        "iterationSeconds": capacity.iteration if capacity else None,
        "binding": capacity.binding.value if capacity else None,
        "knobsMessage": found.knob_plan.message,
        "replicasMessage": found.replicas_message,
        "conditions": [asdict(condition) for condition in _shown(found)],
    }
