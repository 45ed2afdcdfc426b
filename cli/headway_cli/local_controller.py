"""The operator's part on one machine: reports in, a policy out, by `headway_core.planning`. It moves no replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headway_core.contract.policy import Endpoint, Knobs, Policy
from headway_core.contract.reports import GatewayReport, RuntimeReport
from headway_core.planning.knobs import KnobMemory, plan_knobs
from headway_core.planning.policy_document import next_revision, outvoted, policy_document
from headway_core.planning.snapshot import ClassTraffic, ObservedReplica, Phase, Traffic
from headway_core.planning.traffic_window import TrafficWindow
from headway_core.slo import Mode, PriorityClass, ServingSLO

from headway_cli.live_view import ClassRow, ObjectiveStatus, Status

_GATEWAY = "gateway"


class LocalController:
    """One pool's policy over time. Call `observe` with each poll; it returns a new policy when one is to be written."""

    def __init__(self, slo: ServingSLO, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = dict(endpoints)
        self._memory = KnobMemory()
        self._knobs = Knobs()
        self._revision = 0
        self._reports: dict[str, tuple[float, RuntimeReport]] = {}
        self._note = "no request has been served yet"
        self._gateway: GatewayReport | None = None
        self.adopt(slo)

    def adopt(self, slo: ServingSLO) -> Policy:
        """Takes a new ServingSLO; its policy comes into force at once, the knobs follow with the next observation."""
        self._revision = next_revision(self._revision)
        # A new generation, as the API server counts them: estimates for other targets say nothing about this one.
        self.slo = replace(slo, generation=self._revision, uid=f"local/{slo.name}")
        self._traffic = TrafficWindow(slo.target_name, slo.window)
        return self.policy()

    def policy(self) -> Policy:
        """The policy in force."""
        return policy_document(self.slo, tuple(self._endpoints.values()), self._knobs, revision=self._revision)

    def observe(
        self, reports: Mapping[str, RuntimeReport], gateway: GatewayReport | None, alive: Sequence[str], now: float
    ) -> Policy | None:
        """One poll: replicas that answered, the gateway if it did, and the names of the processes that run."""
        for name, report in reports.items():
            self._reports[name] = (now, report)
        for name in self._reports.keys() - set(alive):
            del self._reports[name]
        self._gateway = gateway or self._gateway
        self._traffic.record({_GATEWAY: gateway} if gateway else {}, [_GATEWAY], now)
        replicas = [self._replica(name, now) for name in self._endpoints if name in alive]
        found = plan_knobs(replicas, self.slo, self._knobs, memory=self._memory, now=now)
        self._memory = found.memory
        self._note = found.message
        moved = found.knobs != self._knobs and self.slo.mode is Mode.ENFORCE
        known = self._highest_known()
        if not moved and not outvoted(self._revision, known):
            return None
        if moved:
            self._knobs = found.knobs
        # Above a revision that came from elsewhere too (an edited file): a lower one would be ignored.
        self._revision = next_revision(self._revision, known)
        return self.policy()

    def _highest_known(self) -> int:
        """The highest revision that gateway and replicas have in force, as they say."""
        known = [report.policy for _, report in self._reports.values()]
        if self._gateway is not None:
            known += [pool.policy for pool in self._gateway.pools if pool.pool == self.slo.target_name]
        return max((each.revision for each in known if each is not None), default=0)

    def _replica(self, name: str, now: float) -> ObservedReplica:
        at, report = self._reports.get(name, (None, None))
        phase = Phase.STARTING if report is None else Phase.READY
        return ObservedReplica(name, phase, report, None if at is None else now - at)

    def status(self, alive: Sequence[str], now: float) -> Status:
        """What to show."""
        traffic = self._traffic.traffic(now)
        reports = [report for _, report in self._reports.values()]
        serving = [name for name in alive if self._replica(name, now).fresh(15.0)]
        return Status(
            classes=[_row(known, traffic, self._queued(known.name)) for known in self.slo.classes],
            replicas_ready=len(serving),
            replicas=len(self._endpoints),
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports),
            max_num_seqs=next((report.effective.max_num_seqs for report in reports), None),
            prefill_token_budget=next((report.effective.prefill_token_budget for report in reports), None),
            note=self._note,
        )

    def _queued(self, name: str) -> int:
        pools = self._gateway.pools if self._gateway else ()
        return sum(pool.classes[name].queued for pool in pools if name in pool.classes)


def _row(known: PriorityClass, traffic: Traffic | None, queued: int) -> ClassRow:
    ttft, tpot = known.objectives.ttft, known.objectives.tpot
    counted = traffic.classes.get(known.name, ClassTraffic(known.name)) if traffic else None
    return ClassRow(
        name=known.name,
        rate=counted.offered / traffic.seconds if traffic and counted else None,
        ttft=ObjectiveStatus(
            counted.ttft.quantile((ttft.percentile if ttft else 95.0) / 100) if counted else None,
            ttft.target if ttft else None,
            ttft.per_thousand_prompt_tokens if ttft else 0.0,
            _kept(counted, "ttft", ttft.percentile if ttft else None),
        ),
        tpot=ObjectiveStatus(
            counted.tpot.quantile((tpot.percentile if tpot else 95.0) / 100) if counted else None,
            tpot.target if tpot else None,
            kept=_kept(counted, "tpot", tpot.percentile if tpot else None),
        ),
        attainment=counted.attainment if counted else None,
        queued=queued,
        shed=counted.shed / counted.offered if counted and counted.offered else None,
    )


def _kept(counted: ClassTraffic | None, objective: str, percentile: float | None) -> bool | None:
    judged = counted.judged.get(objective, 0) if counted else 0
    if counted is None or judged == 0 or percentile is None:
        return None
    return 100 * counted.attained.get(objective, 0) >= percentile * judged
