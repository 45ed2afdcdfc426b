"""`headway simulate`: an SLO and a load tried on simulated replicas under a virtual clock, by every admission rule."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from headway_core.admission import RULES, AdmissionRule
from headway_core.batching.scheduling_policies import SCHEDULING_POLICIES
from headway_core.contract.reports import RuntimeReport
from headway_core.errors import InvalidInput
from headway_core.slo import DEFAULT_CLASS, PriorityClass
from headway_sim.simulated_replica import ACCELERATOR
from headway_sim.simulation import SimulationConfig
from headway_sim.traces import mean_rate
from rich.console import Console

from headway_cli import comparison, comparison_figures
from headway_cli.replica_options import (
    add_replica_options,
    check_replica_options,
    on_paper,
    parse_coefficients,
    with_limits,
)
from headway_cli.result_file import check_result_file
from headway_cli.slo_file import read_slo
from headway_cli.slo_text import slo_in_words
from headway_cli.trace_options import add_trace_options, choose_trace, parse_mix
from headway_cli.traffic_source import SOURCES, observe

EPILOG = """\
examples:
  headway simulate
      500 requests like Azure's conversations, at 0.9 of what a replica carries
  headway simulate --trace code --rho 1.2 --replicas 2
      overload: who is shed, and which targets are met for the others
  headway simulate --slo my-slo.yaml --mix interactive=0.8,batch=0.2 --trace code --requests 1000 --rate 20
  headway calibrate --json replica.json && headway simulate --from replica.json --scale-lengths 0.25
  headway simulate --coefficients 0.03,0.0005,0.002,0.00001 --scale-lengths 0.1

Admission and schedulers are those that serve; only the clock and the forward pass are simulated. So a run is repeatable
and says what a policy does, not how fast this machine is. Shares are over all offered requests: shed ones are misses.
The default replica is computed: an 8-billion-parameter model on one accelerator. The optimum is exact for a single
server that handles one request at a time; for batched replicas no exact optimum is known. A batched run can therefore
score above or below it.
"""

_ACCELERATOR_KV_TOKENS = 1 << 18
"""KV cache that fits beside the default replica's weights; computed, like the replica."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `simulate` to the command line."""
    parser = commands.add_parser(
        "simulate",
        help="try an SLO on a trace under a virtual clock: what is met, by which admission rule",
        description="Replay a trace through the real admission and the real schedulers under a virtual clock, and "
        "say which targets are met.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("load")
    add_trace_options(load, requests=500)
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--rho",
        type=float,
        metavar="R",
        help="load as a share of what the replicas get through (default: 0.9; above 1 is overload)",
    )
    pace.add_argument("--rate", type=float, metavar="R", help="requests per second on average, instead of --rho")
    pace.add_argument("--speed", type=float, metavar="X", help="the trace's own pace, times X, instead of --rho")
    policy = parser.add_argument_group("policy")
    policy.add_argument(
        "--slo", type=Path, metavar="FILE", help="the ServingSLO to keep (default: TTFT 2 s, TPOT 100 ms)"
    )
    policy.add_argument(
        "--mix", metavar="CLASS=SHARE,...", help="classes of the requests (default: all of the default class)"
    )
    policy.add_argument(
        "--admission-rule",
        choices=tuple(RULES),
        default=next(iter(RULES)),
        help="who is admitted (default: %(default)s)",
    )
    policy.add_argument(
        "--beside",
        default=",".join(RULES),
        metavar="RULE,...",
        help="rules to show beside it, or none (default: all of them)",
    )
    policy.add_argument(
        "--size-error",
        type=float,
        default=0.0,
        metavar="X",
        help="admission knows prompt lengths to ± this share (default: 0)",
    )
    policy.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        default="priority",
        help="who is next in a replica (default: %(default)s)",
    )
    add_replica_options(parser, SOURCES)
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="how many of them (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(given: argparse.Namespace) -> int:
    """Simulates and prints.

    Raises:
        InvalidInput: with a sentence for the person at the terminal.
    """
    rules = check(given)
    classes: tuple[PriorityClass, ...] = (DEFAULT_CLASS,)
    default_class = DEFAULT_CLASS.name
    if given.slo:
        slo = read_slo(given.slo)
        classes, default_class = slo.classes, slo.default_class
    shares = parse_mix(given.mix, classes, default_class)
    trace = choose_trace(given)
    replica, knobs = comparison.configured(_replica(given), trace, classes, given.scheduling_policy)
    config = SimulationConfig(
        classes=classes,
        mix=tuple(shares.get(known.name, 0.0) for known in classes),
        replicas=given.replicas,
        replica=replica,
        size_error=given.size_error,
        seed=given.seed,
    )
    own_pace = given.rate is not None or given.speed is not None
    found = comparison.run(config, trace, None if own_pace else given.rho, rules, _Progress())
    # Into a file or a pipe the rows stay whole.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 180)
    for line in _head(found, knobs):
        console.print(line)
    console.print(comparison_figures.table(found))
    for line in comparison_figures.remarks(found):
        console.print(line)
    if found.one_server is not None:
        console.print("", comparison_figures.optimum_table(found.one_server))
    if given.json:
        given.json.write_text(json.dumps(comparison_figures.document(found), indent=1))
    return 0


def check(given: argparse.Namespace) -> list[AdmissionRule]:
    """The rules to try, the chosen one first. Raises InvalidInput for what no simulation can do."""
    check_replica_options(given)
    check_result_file(given.json, "--json")
    if given.replicas < 1:
        raise InvalidInput(f"--replicas must be at least 1, not {given.replicas}")
    if given.rho is None:
        given.rho = 0.9
    if not 0 < given.rho < float("inf"):
        raise InvalidInput(f"--rho must be positive, not {given.rho:g}")
    if not 0 <= given.size_error < 1:
        raise InvalidInput(f"--size-error must be from 0 to below 1, not {given.size_error:g}")
    names = [] if given.beside == "none" else given.beside.split(",")
    for name in names:
        if name not in RULES:
            raise InvalidInput(f"--beside {name!r}: the rules are {', '.join(RULES)}; or none")
    return list(dict.fromkeys(RULES[name] for name in (given.admission_rule, *names)))


def _replica(given: argparse.Namespace) -> RuntimeReport:
    """The replica to simulate: all of them are alike, so the first that was found."""
    if given.coefficients:
        return with_limits(on_paper(parse_coefficients(given.coefficients)), given)
    if given.sources:
        seen = observe(given.sources, None, window=0.0, watch=0.0, say=print)
        return with_limits(next(iter(seen.replicas.values())), given)
    return with_limits(on_paper(ACCELERATOR, _ACCELERATOR_KV_TOKENS), given)


def _head(found: comparison.Comparison, knobs: str) -> list[str]:
    replica = found.config.replica
    promises = "; ".join(
        slo_in_words(known) for known, share in zip(found.config.classes, found.config.mix, strict=True) if share > 0
    )
    return [
        f"promise: {promises}",
        f"replicas: {found.config.replicas}, max_num_seqs {replica.max_num_seqs}, "
        f"prefill token budget {replica.prefill_token_budget} ({knobs})",
        f"load: {len(found.trace)} requests in {found.trace[-1].at:.0f} s, {mean_rate(found.trace):.3g} a second, "
        f"ρ {found.rho:.2f} of the {found.capacity:.0f} prompt tokens a second that the replicas get through",
        "",
    ]


class _Progress:
    """What is being simulated, on standard error: rewritten in place on a terminal, a line for each rule elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._said = ""
        self._at = 0.0

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self._console.is_terminal and (now - self._at > 0.2 or what != self._said):
            self._console.print(f"simulating: {what} {share:.0%}".ljust(60), end="\r")
            self._at = now
        elif what != self._said:
            self._console.print(f"simulating: {what}")
        self._said = what
