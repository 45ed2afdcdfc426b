"""A replica on paper: step time and limits, from four numbers or from a running replica's report, changed as asked.

`headway plan` and `headway simulate` decide on it as operator and gateway would on a real one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from headway_core.arguments import step_time_coefficients
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits, ReplicaState, RuntimeReport, StepTimeReport
from headway_core.errors import InvalidInput
from headway_core.planning.capacity import ITERATION_LIMIT

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
PREFILL_TOKEN_BUDGET = 8192
_LARGE_KV = 1 << 22
"""Tokens: 16,384 for each of the most sequences."""
_ANY_SIZE = 1 << 30


def add_replica_options(parser: argparse.ArgumentParser, sources: str) -> None:
    """Adds the options that describe a replica. `sources`: what may stand after --from, in words."""
    group = parser.add_argument_group("replica")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--from", dest="sources", action="append", metavar="URL|FILE", help=sources)
    which.add_argument(
        "--coefficients",
        metavar="a,b,d,e",
        help="an iteration takes a + b·(prefill tokens) + d·(decoding sequences) + e·(context tokens) seconds: "
        "what `headway calibrate` prints and `headway-runtime --pace` takes",
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="the most sequences it is started with")
    group.add_argument("--prefill-token-budget", type=int, metavar="N", help="the most prefill tokens in one iteration")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="tokens that its KV pool holds")


def check_replica_options(given: argparse.Namespace) -> None:
    """Raises InvalidInput for what no replica can have."""
    for flag, value in (
        ("--max-num-seqs", given.max_num_seqs),
        ("--prefill-token-budget", given.prefill_token_budget),
        ("--kv-tokens", given.kv_tokens),
    ):
        if value is not None and value < 1:
            raise InvalidInput(f"{flag} must be at least 1, not {value}")


def parse_coefficients(text: str) -> StepTimeReport:
    """The straight line ``a,b,d,e`` in the terms of `headway_core.latency`, believed at any size.

    There a prompt that completes samples a row, as a decode does, so it costs d - b more than on the line.

    Raises:
        InvalidInput: not four numbers, or not a time.
    """
    try:
        base, per_prefill_token, per_decode_row, per_context_token = step_time_coefficients(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidInput(str(error), "--coefficients") from None
    return StepTimeReport(
        base=base,
        per_row=per_prefill_token,
        per_row_above=per_prefill_token,
        per_context_token=per_context_token,
        per_prefill_pair=0.0,
        per_sampled_row=per_decode_row - per_prefill_token,
        knee=1,
        samples=0,
        max_decode_rows=_ANY_SIZE,
        max_prefill_tokens=_ANY_SIZE,
    )


def on_paper(step_time: StepTimeReport, kv_tokens: int = _LARGE_KV) -> RuntimeReport:
    """The report of an idle replica: the usual limits, a prefill budget within half a second, no knobs in force."""
    within = (ITERATION_LIMIT - step_time.base) / max(step_time.per_row_above, 1e-12)
    budget = max(64, min(PREFILL_TOKEN_BUDGET, int(within)))
    return RuntimeReport(
        replica_id="on-paper",
        pool="on-paper",
        model="on-paper",
        boot_id="on-paper",
        seq=1,
        at=0.0,
        state=ReplicaState.READY,
        limits=EngineLimits(MAX_NUM_SEQS, budget, kv_tokens, BLOCK_SIZE, kv_tokens // BLOCK_SIZE),
        effective=Knobs(),
        step_time=step_time,
    )


def with_limits(report: RuntimeReport, given: argparse.Namespace) -> RuntimeReport:
    """The report with the limits that the command line names instead of its own."""
    limits, effective = report.limits, report.effective
    return replace(
        report,
        limits=replace(
            limits,
            max_num_seqs=given.max_num_seqs or limits.max_num_seqs,
            prefill_token_budget=given.prefill_token_budget or limits.prefill_token_budget,
            total_blocks=-(-given.kv_tokens // limits.block_size) if given.kv_tokens else limits.total_blocks,
        ),
        effective=Knobs(
            given.max_num_seqs or effective.max_num_seqs, given.prefill_token_budget or effective.prefill_token_budget
        ),
    )
