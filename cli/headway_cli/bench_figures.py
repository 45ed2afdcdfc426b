"""From records to figures: percentiles of TTFT, TPOT and ITL, attainment and goodput over all offered requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headway_core.slo import Objectives

from headway_cli.load_generator import RequestResult


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """One group of requests. Seconds; shares in 0..1; None where nothing was measured."""

    offered: int
    ok: int
    shed: int
    failed: int
    ttft_attainment: float | None
    tpot_attainment: float | None
    goodput: float | None
    """Share of all offered for which the first token and every later one met its deadline, TTFT + i·TPOT + grace."""
    ttft: dict[str, float] | None
    tpot: dict[str, float] | None
    itl: dict[str, float] | None
    output_tokens: int


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value with at least the share `q` of `values` (sorted) at or under it."""
    return values[max(0, math.ceil(q * len(values) - 1e-9) - 1)]


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p95, p99 and mean; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{round(q * 100)}": percentile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99)} | {
        "mean": sum(ordered) / len(ordered)
    }


def kept_every_deadline(record: RequestResult, objectives: Objectives, grace: float) -> bool:
    """Whether token i came by arrival + TTFT + i·TPOT + grace, for every i; each piece stands for as many tokens."""
    if not record.ok or record.first_token is None:
        return False
    arrival, prompt = record.planned.at, record.prompt_tokens or record.planned.prompt_tokens
    ttft = objectives.ttft.limit(prompt) if objectives.ttft else record.first_token - arrival
    if record.first_token - arrival > ttft + grace:
        return False
    if objectives.tpot is None:
        return True
    tokens = record.output_tokens or len(record.token_times)
    per_piece = tokens / len(record.token_times)
    # The last token of piece k has index (k + 1)·per_piece - 1; the piece is due when its first token is.
    return all(
        time <= arrival + ttft + math.floor(index * per_piece) * objectives.tpot.target + grace
        for index, time in enumerate(record.token_times)
    )


def figures(records: Sequence[RequestResult], objectives_of: Callable[[str], Objectives], grace: float) -> BenchFigures:
    """Figures of these records; `objectives_of` gives a class's objectives."""
    ok = [record for record in records if record.ok]
    shed = sum(record.status in (429, 503) for record in records)
    ttft_due = [record for record in records if objectives_of(record.planned.class_name).ttft]
    tpot_due = [
        record
        for record in records
        if objectives_of(record.planned.class_name).tpot and (record.tpot is not None or not record.ok)
    ]
    return BenchFigures(
        offered=len(records),
        ok=len(ok),
        shed=shed,
        failed=len(records) - len(ok) - shed,
        ttft_attainment=_share(ttft_due, lambda record: _kept_ttft(record, objectives_of(record.planned.class_name))),
        tpot_attainment=_share(tpot_due, lambda record: _kept_tpot(record, objectives_of(record.planned.class_name))),
        goodput=_share(
            records, lambda record: kept_every_deadline(record, objectives_of(record.planned.class_name), grace)
        ),
        ttft=summary(record.ttft for record in ok if record.ttft is not None),
        tpot=summary(record.tpot for record in ok if record.tpot is not None),
        itl=summary(b - a for record in ok for a, b in zip(record.token_times, record.token_times[1:], strict=False)),
        output_tokens=sum(record.output_tokens or 0 for record in ok),
    )


def by_class(records: Sequence[RequestResult]) -> Mapping[str, list[RequestResult]]:
    """Records by class name, in order of first appearance."""
    groups: dict[str, list[RequestResult]] = {}
    for record in records:
        groups.setdefault(record.planned.class_name, []).append(record)
    return groups


def by_prompt_quartile(records: Sequence[RequestResult]) -> Mapping[str, list[RequestResult]]:
    """Records in four groups of equal size by planned prompt length: shows whether long prompts pay for short ones."""
    ordered = sorted(records, key=lambda record: record.planned.prompt_tokens)
    groups: dict[str, list[RequestResult]] = {}
    for quarter in range(4):
        part = ordered[len(ordered) * quarter // 4 : len(ordered) * (quarter + 1) // 4]
        if part:
            groups[f"Q{quarter + 1} {part[0].planned.prompt_tokens}-{part[-1].planned.prompt_tokens} tok"] = part
    return groups


def _share(records: Sequence[RequestResult], kept: Callable[[RequestResult], bool]) -> float | None:
    return sum(map(kept, records)) / len(records) if records else None


def _kept_ttft(record: RequestResult, objectives: Objectives) -> bool:
    if not record.ok or record.ttft is None or objectives.ttft is None:
        return False
    return record.ttft <= objectives.ttft.limit(record.prompt_tokens or record.planned.prompt_tokens)


def _kept_tpot(record: RequestResult, objectives: Objectives) -> bool:
    return (
        record.ok and record.tpot is not None and objectives.tpot is not None and record.tpot <= objectives.tpot.target
    )
