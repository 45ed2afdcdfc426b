"""Request traces: when requests came, how long prompts and answers were, and which prompts share their heads.

Formats: the Azure LLM inference trace 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens; CC-BY 4.0, Splitwise, ISCA
2024) and the Mooncake trace (JSON lines: timestamp in ms, input_length, output_length, hash_ids, one per 512 tokens;
Apache-2.0, FAST 2025).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from headway_core.errors import InvalidInput

MOONCAKE_BLOCK = 512
"""Tokens that one of its hash ids stands for."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `at`: seconds from the trace's start; `prefix`: one id per `MOONCAKE_BLOCK`, shared heads equal."""

    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.at < math.inf or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a request comes at 0 or later and has at least one token in and out, not {self}")


def read(path: Path) -> list[TraceRequest]:
    """A trace in order of arrival, by the file's ending.

    Raises:
        InvalidInput: neither .csv nor .jsonl, or a line that is not of that format; names file and line.
    """
    readers = {".csv": _azure, ".jsonl": _mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InvalidInput(f"a trace ends in {' or '.join(readers)}, not {path.name!r}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = sorted(reader(lines, path), key=lambda request: request.at)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path}: is not text in that format: {error}") from error
    if not requests:
        raise InvalidInput(f"{path}: holds no request")
    return [replace(request, at=request.at - requests[0].at) for request in requests]


def at_rate(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests with all gaps stretched alike, so that `rate` come per second on average."""
    if not rate > 0:
        raise ValueError(f"rate must be positive, not {rate}")
    factor = mean_rate(trace) / rate
    return [replace(request, at=request.at * factor) for request in trace]


def mean_rate(trace: Sequence[TraceRequest]) -> float:
    """Requests per second from the first to the last."""
    return len(trace) / (trace[-1].at - trace[0].at)


def _azure(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # Seven decimals: more than datetime takes before Python 3.11's fromisoformat, and more than it keeps after.
            whole, _, fraction = row["TIMESTAMP"].partition(".")
            at = datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
            yield TraceRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{path}:{number}: needs TIMESTAMP, ContextTokens, GeneratedTokens: {error}") from error


def _mooncake(lines: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceRequest(
                row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"]), tuple(row["hash_ids"])
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(
                f"{path}:{number}: needs timestamp, input_length, output_length, hash_ids: {error}"
            ) from error
