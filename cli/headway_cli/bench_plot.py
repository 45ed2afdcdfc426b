"""One HTML file with a run's figures: no scripts, nothing loaded from elsewhere, so it can be mailed and kept."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from headway_core.formatting import format_seconds, format_share
from headway_core.slo import Objectives

from headway_cli.bench_figures import BenchFigures
from headway_cli.load_generator import RequestResult

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 240, 46, 30
_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;--bg:#fff;
--good:#1a7f37;--bad:#cf222e;--main:#0969da}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--bg:#0d1117;
--good:#3fb950;--bad:#f85149;--main:#4493f8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--bg);max-width:1200px;
margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left}
figure{display:inline-block;margin:1rem 1rem 1rem 0}figcaption{color:var(--soft);font-size:.9rem}
svg text{fill:var(--soft);font-size:11px}.axis{stroke:var(--line)}.main{stroke:var(--main);fill:none;stroke-width:1.6}
.good{fill:var(--good)}.bad{fill:var(--bad)}.wait{fill:var(--line)}
.target{stroke:var(--bad);stroke-dasharray:4 3}
"""


def page(
    title: str,
    groups: Mapping[str, BenchFigures],
    records: Sequence[RequestResult],
    objectives_of: Callable[[str], Objectives],
) -> str:
    """The whole document. `groups` become the table's rows, in their order."""
    ttft = sorted(record.ttft for record in records if record.ok and record.ttft is not None)
    tpot = sorted(record.tpot for record in records if record.ok and record.tpot is not None)
    names = {record.planned.class_name for record in records}
    ttft_targets = [found.target for name in names if (found := objectives_of(name).ttft)]
    tpot_targets = [promise.target for name in names if (promise := objectives_of(name).tpot)]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{_table(groups)}"
        f"{_distribution('TTFT of served requests, s (log scale); dashed: targets', ttft, ttft_targets)}"
        f"{_distribution('TPOT of served requests, s (log scale); dashed: targets', tpot, tpot_targets)}"
        f"{_timeline(records)}</html>"
    )


def _table(groups: Mapping[str, BenchFigures]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "",
            "offered",
            "ok",
            "shed",
            "failed",
            "TTFT kept",
            "TPOT kept",
            "goodput",
            "TTFT p50",
            "TTFT p95",
            "TPOT p50",
            "TPOT p95",
        )
    )
    rows = []
    for name, found in groups.items():
        cells = [str(found.offered), str(found.ok), str(found.shed), str(found.failed)]
        cells += [format_share(value) for value in (found.ttft_attainment, found.tpot_attainment, found.goodput)]
        cells += [
            format_seconds(values[key] if values else None)
            for values in (found.ttft, found.tpot)
            for key in ("p50", "p95")
        ]
        rows.append(f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f"<table><tr>{head}</tr>{''.join(rows)}</table><p>Shares are over all offered requests: shed and "
        "failed ones are misses.</p>"
    )


def _frame(body: str, caption: str) -> str:
    axes = f'<path class=axis d="M{_LEFT} 8V{_HEIGHT - _BOTTOM}H{_WIDTH - 8}" fill=none />'
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width={_WIDTH} height={_HEIGHT}>{axes}{body}</svg>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _distribution(caption: str, values: Sequence[float], targets: Sequence[float]) -> str:
    """The cumulative share over a logarithmic axis, with a dashed line at each target."""
    if not values:
        return _frame(f'<text x="{_WIDTH // 2}" y="{_HEIGHT // 2}">nothing was served</text>', caption)
    low = math.log10(max(1e-4, min([*values, *targets]))) - 0.05
    high = math.log10(max([*values, *targets, 10**low * 1.5])) + 0.05

    def x(seconds: float) -> float:
        return _LEFT + (math.log10(max(1e-4, seconds)) - low) / (high - low) * (_WIDTH - _LEFT - 16)

    def y(share: float) -> float:
        return 8 + (1 - share) * (_HEIGHT - _BOTTOM - 8)

    points = " ".join(f"{x(value):.1f},{y((index + 1) / len(values)):.1f}" for index, value in enumerate(values))
    steps = (factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in (1, 2, 5))
    ticks = [tick for tick in steps if low <= math.log10(tick) <= high]
    marks = "".join(f'<text x="{x(tick):.0f}" y="{_HEIGHT - 12}">{tick:g}</text>' for tick in ticks)
    levels = "".join(f'<text x="6" y="{y(share) + 4:.0f}">{share:.0%}</text>' for share in (0.0, 0.5, 0.95))
    lines = "".join(
        f'<path class=target d="M{x(target):.1f} 8V{_HEIGHT - _BOTTOM}"/>' for target in sorted(set(targets))
    )
    return _frame(f'{lines}<polyline class=main points="{points}"/>{marks}{levels}', caption)


def _timeline(records: Sequence[RequestResult]) -> str:
    """Requests by the second they were offered in, stacked: served, shed or failed."""
    if not records:
        return ""
    length = max(record.planned.at for record in records) + 1e-9
    bins = min(80, max(1, math.ceil(length)))
    served, lost = [0] * bins, [0] * bins
    for record in records:
        (served if record.ok else lost)[min(bins - 1, int(record.planned.at / length * bins))] += 1
    top = max(a + b for a, b in zip(served, lost, strict=True))
    width = (_WIDTH - _LEFT - 16) / bins
    unit = (_HEIGHT - _BOTTOM - 8) / top
    bars = []
    for index, (good, bad) in enumerate(zip(served, lost, strict=True)):
        left, base = _LEFT + index * width, _HEIGHT - _BOTTOM
        bars.append(
            f'<rect class=good x="{left:.1f}" width="{width * 0.9:.1f}" y="{base - good * unit:.1f}" '
            f'height="{good * unit:.1f}"/>'
        )
        bars.append(
            f'<rect class=bad x="{left:.1f}" width="{width * 0.9:.1f}" y="{base - (good + bad) * unit:.1f}" '
            f'height="{bad * unit:.1f}"/>'
        )
    below = f'y="{_HEIGHT - 12}"'
    labels = (
        f'<text x="6" y="16">{top}</text><text x="{_LEFT}" {below}>0 s</text><text x="{_WIDTH - 60}" '
        f"{below}>{length:.0f} s</text>"
    )
    return _frame("".join(bars) + labels, "requests by time of arrival: served (green), shed or failed (red)")
