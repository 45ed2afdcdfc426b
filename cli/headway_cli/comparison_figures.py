"""A comparison for people and for programs: which targets each admission rule meets, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from headway_core.admission import AdmissionRule
from headway_core.contract import codec
from headway_core.formatting import format_series, format_share
from headway_sim.report import RunFigures, SimulationReport
from rich.table import Table

from headway_cli.comparison import Comparison, OneServer


def table(comparison: Comparison) -> Table:
    """One row for each rule and, where there are several, each class; the first rule also by prompt length."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    heads = (
        "offered",
        "shed",
        "TTFT kept",
        "TPOT kept",
        "every token in time",
        "TTFT p50/p95/p99 s",
        "TPOT p50/p95/p99 ms",
    )
    for head in ("", *heads):
        made.add_column(head, justify="right" if head else "left", no_wrap=not head)
    for number, (rule, report) in enumerate(comparison.reports.items()):
        for name, found in _groups(comparison, rule, report, quartiles=number == 0).items():
            made.add_row(
                name,
                str(found.offered),
                str(sum(found.shed.values()) + found.unschedulable),
                *map(format_share, (found.ttft_attainment, found.tpot_attainment, found.good_share)),
                format_series((found.ttft_p50, found.ttft_p95, found.ttft_p99), 1, 2),
                format_series((found.tpot_p50, found.tpot_p95, found.tpot_p99), 1000, 0),
            )
    return made


def _groups(
    comparison: Comparison, rule: AdmissionRule, report: SimulationReport, quartiles: bool
) -> Mapping[str, RunFigures]:
    groups = {rule.name: report.total}
    if len(report.classes) > 1:
        names = [known.name for known in comparison.config.classes if known.name in report.classes]
        groups |= {f"  class {name}": report.classes[name] for name in names}
    if quartiles:
        groups |= {f"  prompts Q{number}": found for number, found in enumerate(report.quartiles, 1)}
    return groups


def remarks(comparison: Comparison) -> list[str]:
    """What the table does not say."""
    rule, report = next(iter(comparison.reports.items()))
    lines = []
    if report.total.shed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.total.shed.items()))
        lines.append(f"{rule.name} turned away: {reasons}")
    if report.total.unschedulable:
        lines.append(f"{report.total.unschedulable} requests can never fit into a replica's KV pool")
    error = report.error_admitted
    if error.compared and error.median is not None and error.p05 is not None and error.p95 is not None:
        lines.append(
            f"predicted - actual TTFT of {error.compared} admitted: median {1000 * error.median:+.0f} ms, "
            f"p05 {1000 * error.p05:+.0f}, p95 {1000 * error.p95:+.0f}"
        )
    if report.preemptions:
        lines.append(f"{report.preemptions} preemptions: KV blocks ran out")
    if comparison.one_server is None:
        lines.append(
            "no exact optimum: it is known where all requests have one TTFT target, without perThousandPromptTokens"
        )
    return lines


def optimum_table(found: OneServer) -> Table:
    """The rules against the exact optimum, where that is known."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("admission alone, before one server of this capacity", "TTFT kept", "of the optimum"):
        made.add_column(head, justify="left" if not made.columns else "right", no_wrap=True)
    for name, share in {
        "exact optimum": found.optimum,
        **{rule.name: share for rule, share in found.rules.items()},
    }.items():
        made.add_row(name, format_share(share), format_share(share / found.optimum if found.optimum else None))
    return made


def document(comparison: Comparison) -> dict[str, object]:
    """All figures. Seconds, tokens, shares in 0..1; what is not known is null."""
    replica = comparison.config.replica
    return {
        "requests": len(comparison.trace),
        "rho": comparison.rho,
        "capacityPromptTokensPerSecond": comparison.capacity,
        "replicas": comparison.config.replicas,
        "maxNumSeqs": replica.max_num_seqs,
        "prefillTokenBudget": replica.prefill_token_budget,
        "stepTime": codec.encode(replica.step_time),
        "classes": codec.encode(comparison.config.classes),
        "rules": {rule.name: report.as_dict() for rule, report in comparison.reports.items()},
        "oneServer": None
        if comparison.one_server is None
        else {
            "optimum": comparison.one_server.optimum,
            "rules": {rule.name: share for rule, share in comparison.one_server.rules.items()},
        },
    }
