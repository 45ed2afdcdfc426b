"""Polls the load reports of runtimes and gateways over HTTP, and makes the snapshot that the planner decides from.

A pod that does not answer, or whose answer is no report, has no new report; the other pods are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from headway_core.contract.documents import load_gateway_report, load_runtime_report
from headway_core.contract.http import PATH_LOAD
from headway_core.contract.policy import Policy
from headway_core.contract.reports import GatewayReport, PoolReport, RuntimeReport
from headway_core.errors import DocumentError
from headway_core.planning.snapshot import ObservedReplica, Phase, Snapshot
from headway_core.planning.traffic_window import TrafficWindow

from headway_operator import report_reader
from headway_operator.metrics import POLLS
from headway_operator.resources import Pod
from headway_operator.settings import Settings
from headway_operator.targets import ResolvedTarget

LARGEST_REPORT = 1 << 20
"""Bytes; a report is some kilobytes."""
SHARED = 0.8
"""Share of the interval for which one answer serves everybody: a gateway may be behind a hundred objects."""
SHARED_WHILE_AWAITING = 1.0
"""Seconds instead of that share, while an acknowledgement is awaited."""

log = logging.getLogger(__name__)
R = TypeVar("R", RuntimeReport, GatewayReport)


@dataclass(frozen=True, slots=True)
class ReceivedReport(Generic[R]):
    """A report and when it was received, seconds of the observer's clock."""

    report: R
    at: float


class Observer:
    """Polls pods. Keeps the last report of each, so that a silent pod's age can be told."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._semaphore = asyncio.Semaphore(settings.concurrency)
        self._runtimes: dict[str, ReceivedReport[RuntimeReport]] = {}
        self._gateways: dict[str, ReceivedReport[GatewayReport]] = {}
        self._asked: dict[str, tuple[float, asyncio.Task[None]]] = {}

    async def poll(self, target: ResolvedTarget, *, awaiting_ack: bool = False) -> None:
        """Asks every pod of the target that has an address; an answer of just now serves whoever shares the pod."""
        interval = self._settings.interval
        age = min(SHARED_WHILE_AWAITING, interval / 2) if awaiting_ack else interval * SHARED
        await asyncio.gather(
            *(self._ask(pod, "runtime", age) for pod in _reachable(target.runtimes)),
            *(self._ask(pod, "gateway", age) for pod in _reachable(target.gateways)),
        )

    def forget(self, alive: Iterable[str]) -> None:
        """Drops what was received from pods whose uid is not among these."""
        keep = set(alive)
        for received in (self._runtimes, self._gateways, self._asked):
            for uid in received.keys() - keep:
                del received[uid]

    def runtime(self, pod: Pod) -> ReceivedReport[RuntimeReport] | None:
        """The last report of a runtime pod."""
        return self._runtimes.get(pod.uid)

    def gateway(self, pod: Pod) -> ReceivedReport[GatewayReport] | None:
        """The last report of a gateway pod, when it is not stale."""
        received = self._gateways.get(pod.uid)
        return received if received is not None and self._clock() - received.at <= self._settings.stale_after else None

    async def _ask(self, pod: Pod, kind: str, age: float) -> None:
        now = self._clock()
        begun, task = self._asked.get(pod.uid, (float("-inf"), None))
        if task is None or now - begun >= age:
            task = asyncio.create_task(self._fetch(pod, kind))
            self._asked[pod.uid] = (now, task)
        await asyncio.shield(task)

    async def _fetch(self, pod: Pod, kind: str) -> None:
        try:
            async with self._semaphore, asyncio.timeout(self._settings.report_timeout):
                text = await report_reader.get(pod.ip, pod.control_port, PATH_LOAD, longest=LARGEST_REPORT)
            if kind == "runtime":
                self._runtimes[pod.uid] = ReceivedReport(load_runtime_report(text), self._clock())
            else:
                self._gateways[pod.uid] = ReceivedReport(load_gateway_report(text), self._clock())
        except (OSError, EOFError, DocumentError) as error:  # TimeoutError is an OSError
            POLLS.labels(kind, "failed").inc()
            log.debug("%s %s/%s: %s", kind, pod.namespace, pod.name, error)
        else:
            POLLS.labels(kind, "ok").inc()


def _reachable(pods: Iterable[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.ip]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the planner needs, and what only conditions need besides."""

    snapshot: Snapshot
    acknowledged: Mapping[str, int]
    """Pod, runtime or gateway → revision of this object's policy that it has in force."""
    refusals: Mapping[str, str]
    """Pod → why it could not read the policy last time."""
    clamped: Mapping[str, str]
    """Knob → why some replica has less in force."""


def observe(
    target: ResolvedTarget, observer: Observer, traffic: TrafficWindow, known: Snapshot, now: float
) -> Observation:
    """`known`, completed by the target and its pods' reports. `traffic`, the counters so far, takes these readings."""
    received = {pod.name: newest for pod in target.gateways if (newest := observer.gateway(pod))}
    gateways = {name: (newest.report, _pool_report(newest.report, target)) for name, newest in received.items()}
    expected = {pod.name for pod in target.gateways if pod.phase in (Phase.READY, Phase.LEAVING)} | gateways.keys()
    read_at = max((newest.at for newest in received.values()), default=now)
    traffic.record({name: report for name, (report, _) in gateways.items()}, expected, read_at)
    replicas = tuple(_replica(pod, observer.runtime(pod), now) for pod in target.runtimes)
    pools = [pool for _, pool in gateways.values() if pool is not None]
    whole = len(gateways) == len(expected) and all(_obeys(pool, known.policy) for _, pool in gateways.values())
    in_flight: dict[str, int] = {}
    for pool in pools:
        for name, count in pool.replica_in_flight.items():
            in_flight[name] = in_flight.get(name, 0) + count
    acks = {replica.name: replica.report.policy for replica in replicas if replica.report is not None}
    acks |= {name: pool.policy for name, (_, pool) in gateways.items() if pool is not None}
    given = {name: ack for name, ack in acks.items() if ack is not None}
    acknowledged = {name: ack.revision for name, ack in given.items() if ack.slo_uid == target.slo.uid}
    snapshot = replace(
        known,
        replicas=replicas,
        scale=target.deployment.replicas,
        rolling=target.deployment.rolling,
        endpoints=(target.endpoint,),
        highest_revision=max((ack.revision for ack in given.values()), default=0),
        unaware=_unaware((*target.runtimes, *target.gateways), acknowledged, known.policy),
        traffic=traffic.traffic(read_at) if gateways else None,
        gateways=len(expected),
        gateways_reporting=len(gateways),
        in_flight=in_flight if whole else None,
        saturated=any(pool.saturated for pool in pools),
    )
    return Observation(
        snapshot=snapshot,
        acknowledged=acknowledged,
        refusals={name: ack.error for name, ack in given.items() if ack.error is not None},
        clamped={knob: why for ack in given.values() for knob, why in sorted(ack.clamped_by.items())},
    )


def _unaware(pods: Iterable[Pod], acknowledged: Mapping[str, int], policy: Policy | None) -> tuple[str, ...]:
    """Ready pods that have not acknowledged the policy, if there is one."""
    if policy is None:
        return ()
    ready = (pod.name for pod in pods if pod.phase is Phase.READY)
    return tuple(name for name in ready if acknowledged.get(name, 0) < policy.revision)


def _pool_report(report: GatewayReport, target: ResolvedTarget) -> PoolReport | None:
    return next((pool for pool in report.pools if pool.pool == target.slo.target_name), None)


def _obeys(pool: PoolReport | None, policy: Policy | None) -> bool:
    """Whether the gateway sends nothing to cordoned replicas: one that has not read the policy may still do so."""
    if policy is None or not policy.cordoned:
        return True
    return pool is not None and pool.policy is not None and pool.policy.revision >= policy.revision


def _replica(pod: Pod, received: ReceivedReport[RuntimeReport] | None, now: float) -> ObservedReplica:
    return ObservedReplica(
        name=pod.name,
        phase=pod.phase,
        report=received.report if received else None,
        age=now - received.at if received else None,
        note=pod.note,
        marked=pod.marked,
    )
