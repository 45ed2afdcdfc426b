"""`headway calibrate`: measure a model's iteration times on this machine, as a runtime does at each start."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from headway_core.contract.documents import dump, load_runtime_report
from headway_core.contract.http import PATH_LOAD
from headway_core.contract.reports import ReplicaState, RuntimeReport
from headway_core.errors import DocumentError

from headway_cli.linear_fit import fit_line
from headway_cli.result_file import check_result_file
from headway_cli.runtime_options import add_runtime_options, check_runtime_options
from headway_cli.supervisor import START_LIMIT, Child, free_port, kill_group

EPILOG = """\
examples:
  headway calibrate                                        the default model, some seconds
  headway calibrate --model /models/Qwen3-0.6B --json replica.json
  headway calibrate -- --threads 1 --max-num-seqs 16       whatever stands after -- goes to headway-runtime

The four numbers are for `headway plan --coefficients`, `headway simulate --coefficients` and `headway-runtime
--pace`. The file is the load report of the replica, with the whole model that it measured, for `--from replica.json`:
more exact, as the truth is no straight line. Nothing else should use the processor meanwhile.
"""

_POLL = 0.2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `calibrate` to the command line."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a model's step time on this machine, for plan, simulate and --pace",
        description="Measure how long a model's iterations take on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_runtime_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the load report, for --from FILE")


def run(given: argparse.Namespace) -> int:
    """Starts a runtime, waits until it has measured, prints what it found, and ends it; 1 when it could not start.

    Raises:
        InvalidInput: with a sentence for the person at the terminal.
    """
    check_result_file(given.json, "--json")
    model = check_runtime_options(given)
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        control = free_port()
        child = Child("runtime", _arguments(model, control, given.runtime_arguments), Path(folder) / "runtime.log")
        with _running(child):
            report = _measured(child, f"http://127.0.0.1:{control}")
        if report is None:
            print(
                f"headway calibrate: the runtime ended while starting; the end of its log:\n{child.last_lines()}",
                file=sys.stderr,
            )
            return 1
    for line in in_words(report):
        print(line)
    if given.json:
        given.json.write_text(dump(report))
    return 0


def _arguments(model: Path, control: int, more: list[str]) -> list[str]:
    ports = ("--host", "127.0.0.1", "--port", "0", "--control-port", str(control))
    return ["headway_runtime", "--model", str(model), *ports, *more]


@contextlib.contextmanager
def _running(child: Child) -> Iterator[None]:
    child.start(time.monotonic())
    try:
        yield
    finally:
        if child.process is not None:
            kill_group(child.process)  # it serves nobody, so there is nothing to drain
        child.close()


def _measured(child: Child, url: str) -> RuntimeReport | None:
    """The report of the replica when it is ready; None when its process ended, or took too long."""
    shown = ""
    deadline = time.monotonic() + START_LIMIT
    with httpx.Client(timeout=5.0) as client:
        while child.alive and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, DocumentError):
                report = load_runtime_report(client.get(url + PATH_LOAD).content)
                if report.state is ReplicaState.READY:
                    return report
                if report.message and report.message != shown:
                    shown = report.message
                    print(shown, file=sys.stderr)
            time.sleep(_POLL)
    return None


def in_words(report: RuntimeReport) -> list[str]:
    """What was measured, for people."""
    model, limits = report.step_time, report.limits
    if model is None:
        return [f"{report.model}: nothing was measured (--no-calibration)"]
    line = fit_line(model, limits)
    a, b, d, e = line.coefficients
    return [
        f"{report.model}: up to {limits.max_num_seqs} sequences and {limits.prefill_token_budget} prefill "
        "tokens in an iteration",
        f"  a  {a * 1e3:9.4g} ms  whatever it carries",
        f"  b  {b * 1e6:9.4g} µs  for each prefill token",
        f"  d  {d * 1e6:9.4g} µs  for each decoding sequence",
        f"  e  {e * 1e9:9.4g} ns  for each token of their context",
        f"the straight line is off by {line.error:.0%} in the middle from the model that was measured, which "
        "--json keeps",
        "",
        f"--coefficients {line}",
    ]
