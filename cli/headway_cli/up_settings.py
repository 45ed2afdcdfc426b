"""What `headway up` is asked to run, checked before anything heavy starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from headway_core.arguments import DAY
from headway_core.contract.http import SERVING_PORT
from headway_core.errors import InvalidInput
from headway_core.slo import ServingSLO

from headway_cli.runtime_options import add_runtime_options, check_runtime_options
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.supervisor import why_not_listen

EPILOG = """\
examples:
  headway up                                     the default model, one replica, http://127.0.0.1:8000
  headway up --model /models/Qwen3-0.6B --replicas 2
  headway up --slo my-slo.yaml                   your own promise; edit the file while it runs, the knobs follow
  headway up -- --max-num-seqs 16 --dtype bfloat16
                                                 whatever stands after -- goes to every headway-runtime

The promise is a ServingSLO, the same YAML that Kubernetes takes. See what it keeps at http://127.0.0.1:8000/ while it
runs.
"""


@dataclass(frozen=True, slots=True)
class UpSettings:
    """One local deployment."""

    model: Path
    replicas: int
    slo_path: Path
    slo: ServingSLO
    host: str
    port: int
    threads: int
    drain_seconds: float
    state: Path | None
    runtime_arguments: tuple[str, ...]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `up` to the command line."""
    parser = commands.add_parser(
        "up",
        help="serve a model on this machine: gateway, replicas, and knobs that follow the promise",
        description="Serve a model on this machine: gateway, replicas, and knobs that follow the promise.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_runtime_options(parser)
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="runtime processes (default: 1)")
    parser.add_argument(
        "--slo",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help="a ServingSLO; read again when it changes (default: an example)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the gateway listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=SERVING_PORT, help="the gateway's port (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="torch threads of each replica (default: the cores, shared out, one kept for the rest)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="on Ctrl-C, time for running requests to finish (default: %(default)s)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="folder for logs and the policy (default: a temporary one, removed on a clean stop)",
    )


def check(given: argparse.Namespace) -> UpSettings:
    """The settings, or the first thing that would not work.

    Raises:
        InvalidInput: with a sentence for the person at the terminal.
    """
    if given.replicas < 1:
        raise InvalidInput(f"--replicas must be at least 1, not {given.replicas}")
    if not 1 <= given.port <= 65535:
        raise InvalidInput(f"--port must be from 1 to 65535, not {given.port}")
    if not 0 <= given.drain_seconds <= DAY:
        raise InvalidInput(f"--drain-seconds must be from 0 to {DAY:g}, not {given.drain_seconds:g}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = given.threads if given.threads is not None else max(1, (cores - 1) // given.replicas)
    if threads < 1:
        raise InvalidInput(f"--threads must be at least 1, not {threads}")
    slo = read_slo(given.slo)
    model = check_runtime_options(given)
    reason = why_not_listen(given.host, given.port)
    if reason is not None:
        raise InvalidInput(
            f"port {given.port} on {given.host} {reason}: choose another with --port or --host, or stop what "
            "listens there"
        )
    if given.state is not None:
        try:
            given.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"--state {given.state}: cannot be made a folder ({error.strerror}): name another"
            ) from error
    return UpSettings(
        model=model,
        replicas=given.replicas,
        slo_path=given.slo,
        slo=slo,
        host=given.host,
        port=given.port,
        threads=threads,
        drain_seconds=given.drain_seconds,
        state=given.state,
        runtime_arguments=tuple(given.runtime_arguments),
    )
