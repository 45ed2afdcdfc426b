"""`headway bench`: replay a trace against an OpenAI endpoint and say what was kept of the promises."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway_core.formatting import format_series, format_share
from headway_core.slo import Objectives, PriorityClass, ServingSLO
from headway_sim.traces import TraceRequest
from rich.console import Console
from rich.table import Table

from headway_cli.bench_figures import BenchFigures, by_class, by_prompt_quartile, figures
from headway_cli.bench_plot import page
from headway_cli.load_generator import (
    BenchTarget,
    PlannedRequest,
    PromptWriter,
    RequestResult,
    first_model,
    learn_prompt_length,
    run_load,
)
from headway_cli.result_file import check_result_file
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.trace_options import add_trace_options, choose_trace, parse_mix

EPILOG = """\
examples:
  headway bench                                        200 requests like Azure's conversations, on http://127.0.0.1:8000
  headway bench --trace code --rate 2 --requests 500   bursts
  headway bench --trace AzureLLMInferenceTrace_conv.csv --speed 0.5 --json run.json --plot run.html
  headway bench --mix interactive=0.8,batch=0.2 --slo my-slo.yaml

Requests leave when the trace says so, whatever became of those before (open loop). Attainment is over all offered
requests: shed and failed ones are misses. Lengths beyond the model's context are cut; --scale-lengths fits a trace to
a small machine.
Ctrl-C ends the load early and prints what was measured until then.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="replay a trace against any OpenAI endpoint: TTFT, TPOT, ITL, attainment",
        description="Replay a trace open-loop against any OpenAI-compatible endpoint and measure what was kept "
        "of the promises.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("endpoint")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="base URL, without /v1 (default: %(default)s)")
    where.add_argument("--model", help="the model's name (default: the first that the endpoint lists)")
    where.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key (default: %(default)s)",
    )
    load = parser.add_argument_group("load")
    add_trace_options(load, requests=200)
    pace = load.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=float, default=1.0, metavar="X", help="2 halves all gaps (default: %(default)s)")
    pace.add_argument("--rate", type=float, metavar="R", help="requests per second on average, instead of --speed")
    load.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="cut prompts to this (default: what the model's context leaves)",
    )
    load.add_argument("--max-output-tokens", type=int, metavar="N", help="cut outputs to this")
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ask for exactly the trace's output lengths (not every endpoint knows it)",
    )
    slo = parser.add_argument_group("promise")
    slo.add_argument(
        "--slo",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help="the ServingSLO to judge by (default: that of `headway up`)",
    )
    slo.add_argument(
        "--mix", metavar="CLASS=SHARE,...", help="classes of the requests (default: all of the default class)"
    )
    slo.add_argument(
        "--grace",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds added to each token's deadline in goodput (default: %(default)s)",
    )
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write figures and every request's record")
    out.add_argument("--plot", type=Path, metavar="FILE.html", help="write a page with distributions and a timeline")
    out.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up on a request after this (default: %(default)s)",
    )


def run(given: argparse.Namespace) -> int:
    """Runs the benchmark. Returns 0 when every request was answered or shed, 1 when some failed, 130 after Ctrl-C.

    Raises:
        InvalidInput, ConnectionError: with a sentence for the person at the terminal.
    """
    check_result_file(given.json, "--json")
    check_result_file(given.plot, "--plot")
    slo = read_slo(given.slo)
    shares = parse_mix(given.mix, slo.classes, slo.default_class)
    trace = choose_trace(given)
    return asyncio.run(_run(given, slo, shares, trace))


async def _run(
    given: argparse.Namespace, slo: ServingSLO, shares: Mapping[str, float], trace: Sequence[TraceRequest]
) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    key = os.environ.get(given.api_key_env)
    url = given.url.rstrip("/").removesuffix("/v1")
    model, context = await first_model(url, key)
    target = BenchTarget(url, given.model or model, key, given.ignore_eos, given.timeout)
    writer = PromptWriter()
    await learn_prompt_length(target, writer)
    planned = plan(trace, given, context, {known.name: known for known in slo.classes}, shares)
    console.print(
        f"{len(planned)} requests in {planned[-1].at:.0f} s to {target.model} at {url}; "
        f"a word is {writer.tokens_per_word:.2f} tokens, the template adds {writer.fixed_tokens:.0f}"
    )
    started = time.monotonic()
    records, interrupted = await _load(target, planned, writer, console)
    elapsed = time.monotonic() - started
    if interrupted:
        console.print(f"Ctrl-C: {len(records)} of {len(planned)} requests came to an end; the figures are of these")
    if not records:
        return 130
    objectives = {known.name: known.objectives for known in slo.classes}
    groups = _groups(records, objectives.__getitem__, given.grace)
    lag = max(record.sent - record.planned.at for record in records)
    _print(groups, records, elapsed, lag)
    if given.json:
        document = _document(given, target, groups, records, elapsed, lag)
        given.json.write_text(json.dumps({**document, "planned": len(planned), "interrupted": interrupted}, indent=1))
    if given.plot:
        given.plot.write_text(
            page(
                f"headway bench: {given.trace}, {len(records)} requests, {target.model}",
                groups,
                records,
                objectives.__getitem__,
            )
        )
    return 130 if interrupted else 1 if groups["all"].failed else 0


async def _load(
    target: BenchTarget, planned: Sequence[PlannedRequest], writer: PromptWriter, console: Console
) -> tuple[list[RequestResult], bool]:
    """The records that came to an end, and whether Ctrl-C was pressed. A second Ctrl-C drops open requests."""
    enough = asyncio.Event()
    records: list[RequestResult] = []
    run = asyncio.create_task(run_load(target, planned, writer, _Progress(console, len(planned)), enough, records))

    def on_interrupt() -> None:
        if enough.is_set():
            run.cancel()
            return
        enough.set()
        running = sum(record.end is None for record in records)
        console.print(f"Ctrl-C: nothing more is sent; {running} open requests may finish, Ctrl-C again drops them")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        await asyncio.wait([run])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        run.cancel()
    if not run.cancelled():
        run.result()  # whatever it raised
    return [record for record in records if record.end is not None], enough.is_set()


def plan(
    trace: Sequence[TraceRequest],
    given: argparse.Namespace,
    context: int | None,
    classes: Mapping[str, PriorityClass],
    shares: Mapping[str, float],
) -> list[PlannedRequest]:
    """Lengths cut to what is allowed, and a class for each request, drawn with the seed."""
    rng = random.Random(given.seed)
    names, weights = list(shares), list(shares.values())
    planned = []
    for request in trace:
        output, prompt = request.output_tokens, request.prompt_tokens
        output = min(output, given.max_output_tokens or output, (context or output * 2) // 2)
        # Prompt lengths are met to a few per cent, so a twentieth of the context stays free.
        longest = int(context * 0.95) - output if context else prompt
        prompt = max(1, min(prompt, given.max_prompt_tokens or prompt, longest))
        name = rng.choices(names, weights)[0]
        tier = classes[name].service_tiers[0] if classes[name].service_tiers else None
        planned.append(PlannedRequest(request.at, prompt, output, tier, name))
    return planned


class _Progress:
    """A line each few seconds while the run goes on; on a terminal it is rewritten in place."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._last = console, total, 0.0

    def __call__(self, records: Sequence[RequestResult]) -> None:
        now = time.monotonic()
        ended = sum(record.end is not None for record in records)
        last = ended == self._total
        if not self._console.is_terminal and now - self._last < 5 and not last:
            return
        self._last = now
        ok = sum(record.ok for record in records)
        line = f"sent {len(records)}/{self._total}, running {len(records) - ended}, ok {ok}, not {ended - ok}"
        self._console.print(line, end="\n" if last or not self._console.is_terminal else "\r")


def _groups(
    records: Sequence[RequestResult], objectives_of: Callable[[str], Objectives], grace: float
) -> dict[str, BenchFigures]:
    groups = {"all": figures(records, objectives_of, grace)}
    classes = by_class(records)
    if len(classes) > 1:
        groups |= {f"class {name}": figures(part, objectives_of, grace) for name, part in classes.items()}
    return groups | {name: figures(part, objectives_of, grace) for name, part in by_prompt_quartile(records).items()}


def _print(groups: Mapping[str, BenchFigures], records: Sequence[RequestResult], elapsed: float, lag: float) -> None:
    # Into a file or a pipe the rows stay whole.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    table = Table(box=None, header_style="bold", pad_edge=False)
    heads = (
        "",
        "offered",
        "ok",
        "shed",
        "failed",
        "TTFT kept",
        "TPOT kept",
        "goodput",
        "TTFT p50/p95/p99 s",
        "TPOT p50/p95/p99 ms",
        "ITL p50/p99 ms",
    )
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=not head)
    for name, found in groups.items():
        table.add_row(
            name,
            *map(str, (found.offered, found.ok, found.shed, found.failed)),
            *map(format_share, (found.ttft_attainment, found.tpot_attainment, found.goodput)),
            format_series(_picked(found.ttft, "p50", "p95", "p99"), 1, 2),
            format_series(_picked(found.tpot, "p50", "p95", "p99"), 1000, 0),
            format_series(_picked(found.itl, "p50", "p99"), 1000, 0),
        )
    console.print(table)
    whole = groups["all"]
    console.print(
        f"{elapsed:.1f} s, {whole.ok / elapsed:.2f} answers/s, {whole.output_tokens / elapsed:.1f} output tokens/s; "
        f"the generator was at most {lag * 1000:.0f} ms late"
    )
    if lag > 0.1:
        console.print("the generator itself lagged: its machine is too busy for figures to be trusted")
    for reason in sorted({record.error for record in records if record.error and record.status not in (429, 503)}):
        print(f"failed: {reason}", file=sys.stderr)


def _picked(summary: Mapping[str, float] | None, *names: str) -> list[float | None]:
    return [None] if summary is None else [summary[name] for name in names]


def _document(
    given: argparse.Namespace,
    target: BenchTarget,
    groups: Mapping[str, BenchFigures],
    records: Sequence[RequestResult],
    elapsed: float,
    lag: float,
) -> dict[str, object]:
    return {
        "command": sys.argv,
        "trace": given.trace,
        "model": target.model,
        "url": target.url,
        "elapsed_seconds": elapsed,
        "generator_lag_seconds": lag,
        "figures": {name: dataclasses.asdict(found) for name, found in groups.items()},
        "requests": [
            {**dataclasses.asdict(record), "ok": record.ok, "ttft": record.ttft, "tpot": record.tpot}
            for record in records
        ],
    }
