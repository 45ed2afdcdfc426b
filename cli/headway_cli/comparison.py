"""Admission rules compared: one trace on simulated replicas by each rule, and on one server beside the optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from headway_core.admission import AdmissionRule, QueueLimits
from headway_core.admission.rules import OpenAdmission
from headway_core.contract.reports import RuntimeReport
from headway_core.errors import InvalidInput
from headway_core.planning.capacity import ReplicaCapacity, Targets, Workload, solve
from headway_core.slo import PriorityClass
from headway_sim import fifo
from headway_sim.optimum import most_on_time
from headway_sim.report import SimulationReport
from headway_sim.scenarios import UNBOUNDED, capacity
from headway_sim.simulated_replica import ReplicaConfig
from headway_sim.simulation import SimulationConfig, simulate
from headway_sim.traces import MOONCAKE_BLOCK, TraceRequest, at_rate, mean_rate

from headway_cli.replica_options import BLOCK_SIZE

DRAIN = 600.0
"""Virtual seconds after the last arrival, for the queue of open admission to be answered, late."""
_CAPACITY_SECONDS = 30.0
_MOST_FOR_OPTIMUM = 50_000
"""Requests: beyond them the optimum takes longer than the simulation."""

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of it is done (0..1)."""


@dataclass(frozen=True, slots=True)
class OneServer:
    """Admission alone, before one first-come-first-served server of equal capacity: shares of all that are on time."""

    optimum: float
    """Of whoever knows every arrival beforehand: exact."""
    rules: dict[AdmissionRule, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was tried."""

    config: SimulationConfig
    trace: Sequence[TraceRequest]
    capacity: float
    """Prompt tokens per second that all replicas get through, decoders running."""
    reports: dict[AdmissionRule, SimulationReport]
    one_server: OneServer | None
    """None: its optimum is exact for one TTFT target alone, which is not what these classes have."""

    @property
    def rho(self) -> float:
        """Load as a share of the capacity."""
        return mean_rate(self.trace) * fmean(request.prompt_tokens for request in self.trace) / self.capacity


def configured(
    report: RuntimeReport, trace: Sequence[TraceRequest], classes: Sequence[PriorityClass], scheduling_policy: str
) -> tuple[ReplicaConfig, str]:
    """The replica of the report, and where its knobs come from: those in force, or the planner's for this trace.

    Raises:
        InvalidInput: it has not measured its step time yet.
    """
    model, limits = report.step_time, report.limits
    if model is None:
        raise InvalidInput(
            f"replica {report.replica_id} has not measured its step time: {report.message or 'it is still starting'}"
        )
    sequences, budget = report.effective.max_num_seqs, report.effective.prefill_token_budget
    message = "as they are"
    if sequences is None or budget is None:
        prompt, output = (
            fmean(lengths) for lengths in zip(*((one.prompt_tokens, one.output_tokens) for one in trace), strict=True)
        )
        load = Workload(prompt, 0.0, output, prompt + output / 2)
        found = solve(model, load, Targets.tightest([known.objectives for known in classes], prompt), limits)
        if isinstance(found, ReplicaCapacity):
            planned, message = (
                (found.max_num_seqs, found.prefill_token_budget),
                f"as the planner sets them: {found.message}",
            )
        else:
            planned, message = (limits.max_num_seqs, limits.prefill_token_budget), f"at their limits: {found.message}"
        sequences, budget = sequences or planned[0], budget or planned[1]
    tokens = limits.total_blocks * limits.block_size
    # Blocks must divide those of a trace's prefix ids; what a pool holds stays the same.
    block_size = limits.block_size if MOONCAKE_BLOCK % limits.block_size == 0 else BLOCK_SIZE
    return ReplicaConfig(
        max_num_seqs=sequences,
        prefill_token_budget=budget,
        block_size=block_size,
        num_blocks=max(1, tokens // block_size),
        step_time=model,
        scheduling_policy=scheduling_policy,
    ), message


def run(
    config: SimulationConfig,
    trace: Sequence[TraceRequest],
    rho: float | None,
    rules: Sequence[AdmissionRule],
    progress: Progress,
) -> Comparison:
    """Tries every rule on the same requests. `rho` None: at the trace's own pace.

    Raises:
        InvalidInput: no request fits the replicas, or no load is too much for them.
    """
    progress("how much the replicas get through", 0.0)
    tokens = capacity(trace, config, _CAPACITY_SECONDS)
    if rho is not None:
        trace = at_rate(trace, rho * tokens / fmean(request.prompt_tokens for request in trace))
    reports = {}
    for rule in rules:
        queue = UNBOUNDED if rule == OpenAdmission() else QueueLimits()
        arm = replace(config, rule=rule, queue=queue, drain=DRAIN)
        reports[rule] = SimulationReport.of(simulate(trace, arm, lambda share, rule=rule: progress(rule.name, share)))  # type: ignore[misc]
    found = Comparison(config, trace, tokens, reports, None)
    target = _one_target(config)
    if target is None or len(trace) > _MOST_FOR_OPTIMUM:
        return found
    progress("the exact optimum", 0.0)
    return replace(found, one_server=_one_server(found, target))


def _one_target(config: SimulationConfig) -> float | None:
    """The TTFT target, when every request has the same."""
    targets = set()
    for known, share in zip(config.classes, config.mix, strict=True):
        ttft = known.objectives.ttft
        if share > 0:
            targets.add(None if ttft is None or ttft.per_thousand_prompt_tokens else ttft.target)
    return targets.pop() if len(targets) == 1 else None


def _one_server(found: Comparison, target: float) -> OneServer:
    works, _ = fifo.works(found.trace, found.rho)
    best = most_on_time([request.at for request in found.trace], works, target)
    arms = {
        rule: fifo.run(
            found.trace, fifo.FifoConfig(found.rho, rule, target, size_error=found.config.size_error, margin=None)
        ).attainment
        for rule in found.reports
    }
    return OneServer(len(best) / len(found.trace), arms)
