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
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

from headway_core.errors import InvalidInput

MOONCAKE_BLOCK = 512
"""Tokens that one of its hash ids stands for."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `at`: seconds from the trace's start; `prefix`: one per `MOONCAKE_BLOCK` tokens: equal heads, equal ids."""

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


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """What a trace is known by; lengths in tokens."""

    requests: int
    rate: float
    prompt: tuple[float, float, float]
    """Mean, median, 99th percentile."""
    output: tuple[float, float, float]
    gap_cv: float
    """Standard deviation of the inter-arrival times over their mean."""
    busiest_second: float
    """Requests in the busiest second over the mean of all seconds."""
    prefix_hit: float
    """Share of prompt tokens that an endless prefix cache would hold."""

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> TraceStatistics:
        """The statistics of `trace`, which has at least three requests."""
        gaps = [later.at - earlier.at for earlier, later in pairwise(trace)]
        seconds: dict[int, int] = {}
        for request in trace:
            seconds[int(request.at)] = seconds.get(int(request.at), 0) + 1
        return cls(
            requests=len(trace),
            rate=mean_rate(trace),
            prompt=_lengths([request.prompt_tokens for request in trace]),
            output=_lengths([request.output_tokens for request in trace]),
            gap_cv=pstdev(gaps) / fmean(gaps),
            busiest_second=max(seconds.values()) * (int(trace[-1].at) + 1) / len(trace),
            prefix_hit=_ideal_hit(trace),
        )


def _lengths(values: list[int]) -> tuple[float, float, float]:
    return fmean(values), median(values), sorted(values)[int(0.99 * (len(values) - 1))]


def _ideal_hit(trace: Iterable[TraceRequest]) -> float:
    seen: set[int] = set()
    hit = total = 0
    for request in trace:
        known = 0
        while known < len(request.prefix) and request.prefix[known] in seen:
            known += 1
        seen.update(request.prefix)
        hit += min(known * MOONCAKE_BLOCK, request.prompt_tokens)
        total += request.prompt_tokens
    return hit / total


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
