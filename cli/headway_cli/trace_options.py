"""The options of `headway bench` and `headway simulate` for the requests and their classes, and their checks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway_core.errors import InvalidInput
from headway_core.slo import PriorityClass
from headway_sim.synthetic import FAMILIES, synthetic
from headway_sim.traces import TraceRequest, at_rate, read


def add_trace_options(parser: argparse._ActionsContainer, requests: int) -> None:
    """Adds --trace, --requests, --scale-lengths and --seed. `requests`: how many by default."""
    parser.add_argument(
        "--trace",
        default="conv",
        metavar="NAME|FILE",
        help=f"{', '.join(FAMILIES)} (made up, with the statistics of the published ones), a .csv or a .jsonl "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=requests,
        metavar="N",
        help="how many of the trace (default: %(default)s; 0: all of a file)",
    )
    parser.add_argument(
        "--scale-lengths",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply prompt and output lengths (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of a made-up trace and of the class of each request (default: %(default)s)"
    )


def choose_trace(given: argparse.Namespace) -> list[TraceRequest]:
    """The requests to replay, scaled, at the pace that --rate or --speed asks for.

    Raises:
        InvalidInput: with a sentence for the person at the terminal.
    """
    if given.requests < 0 or given.requests == 1:
        raise InvalidInput(f"--requests must be at least 2, or 0 for a whole file, not {given.requests}")
    for name, value in (("--speed", given.speed), ("--rate", given.rate), ("--scale-lengths", given.scale_lengths)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidInput(f"{name} must be positive, not {value:g}")
    if given.trace in FAMILIES:
        trace = synthetic(given.trace, given.requests or 200, given.seed)
    else:
        path = Path(given.trace)
        if not path.is_file():
            raise InvalidInput(
                f"--trace {given.trace}: no such file, and no made-up trace of that name ({', '.join(FAMILIES)})"
            )
        trace = read(path)
        trace = trace[: given.requests] if given.requests else trace
    if trace[-1].at == trace[0].at:
        raise InvalidInput(
            f"--trace {given.trace}: its {len(trace)} requests all come at one instant, so there is no pace to keep"
        )
    trace = [_scaled(request, given.scale_lengths) for request in trace]
    if given.rate is not None:
        return at_rate(trace, given.rate)
    return [dataclasses.replace(request, at=request.at / (given.speed or 1.0)) for request in trace]


def _scaled(request: TraceRequest, factor: float) -> TraceRequest:
    if factor == 1.0:
        return request
    prompt, output = (max(1, round(tokens * factor)) for tokens in (request.prompt_tokens, request.output_tokens))
    # Ids of shared heads stand for whole blocks of the original length, which are no longer there.
    return dataclasses.replace(request, prompt_tokens=prompt, output_tokens=output, prefix=())


def parse_mix(text: str | None, classes: Sequence[PriorityClass], default_class: str) -> Mapping[str, float]:
    """Class → share of the requests; everything to the default class when nothing is said. Raises InvalidInput."""
    if text is None:
        return {default_class: 1.0}
    known = {each.name for each in classes}
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise InvalidInput(f"--mix takes CLASS=SHARE,..., not {part!r}") from None
        if name not in known or not 0 <= shares[name] < float("inf"):
            raise InvalidInput(
                f"--mix {part!r}: the SLO has the classes {', '.join(sorted(known))}, and a share is not negative"
            )
    if not sum(shares.values()) > 0:
        raise InvalidInput("--mix needs a positive share")
    return shares
