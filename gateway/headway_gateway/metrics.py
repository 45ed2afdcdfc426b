"""Prometheus metrics, read from the counters at the moment of the scrape.

All label values come from closed sets: pools and classes from policies and the command line, the rest from the
contract, none from a client. All metrics count requests; only ITL counts gaps, of streams with one answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from headway_core.contract import header_names, metric_names
from headway_core.histogram import GROWTH, SMALLEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from headway_gateway.accounting import EDGES, ClassCounters, DurationHistogram, SignedErrors
from headway_gateway.pools import Pools

Names = metric_names.Metric

_EVERY = 4
"""Every fourth edge of the log buckets is exported (a factor of 1.36); the load report has all. Attainment is exact."""
_LAST = math.ceil(math.log(90_000 / SMALLEST) / math.log(GROWTH))
"""Beyond the longest request that can be configured, a day."""
_OTHER = "other"


class CountersCollector(Collector):
    """The counters of all pools as metric families."""

    def __init__(self, pools: Pools, now: Callable[[], float], policy_age: Callable[[str], float | None]) -> None:
        self._pools = pools
        self._now = now
        self._policy_age = policy_age

    def collect(self) -> Iterable[Metric]:
        """Everything, at this instant."""
        yield from self._counters()
        yield from self._gauges()
        yield from self._durations()

    def _class_counters(self) -> Iterator[tuple[str, str, ClassCounters]]:
        for pool in self._pools:
            for name, counters in pool.counters.items():
                yield pool.name, name, counters
        yield _OTHER, _OTHER, self._pools.unclassified

    def _counters(self) -> Iterable[Metric]:
        labels = ["pool", "class"]
        offered = CounterMetricFamily(Names.OFFERED, "Requests that arrived.", labels=labels)
        retries = CounterMetricFamily(Names.RETRIES, "Offered requests that a client marked as retries.", labels=labels)
        requests = CounterMetricFamily(Names.REQUESTS, "Requests by how they ended.", labels=[*labels, "outcome"])
        shed = CounterMetricFamily(Names.SHED, "Requests that were not served, by reason.", labels=[*labels, "reason"])
        of_one = [*labels, "objective"]
        attained = CounterMetricFamily(Names.SLO_ATTAINED, "Requests that met the objective.", labels=of_one)
        judged = CounterMetricFamily(Names.SLO_JUDGED, "Requests that were judged by the objective.", labels=of_one)
        for pool, name, counters in self._class_counters():
            offered.add_metric([pool, name], counters.offered)
            retries.add_metric([pool, name], counters.retries)
            for outcome, count in counters.outcomes.items():
                requests.add_metric([pool, name, outcome], count)
            if counters is self._pools.unclassified:
                continue
            for reason in header_names.ShedReason:
                shed.add_metric([pool, name, reason.value], counters.shed.get(reason.value, 0))
            for objective in ("ttft", "tpot", "all"):
                attained.add_metric([pool, name, objective], counters.attained.get(objective, 0))
                judged.add_metric([pool, name, objective], counters.judged.get(objective, 0))
        return offered, retries, requests, shed, attained, judged

    def _gauges(self) -> Iterable[Metric]:
        queued = GaugeMetricFamily(Names.QUEUE_DEPTH, "Requests that wait in the queue.", labels=["pool", "class"])
        in_flight = GaugeMetricFamily(Names.IN_FLIGHT, "Requests between arrival and end.", labels=["pool"])
        revision = GaugeMetricFamily(Names.POLICY_REVISION, "Revision of the policy in force.", labels=["pool"])
        age = GaugeMetricFamily(Names.POLICY_AGE, "Seconds since a good policy was last read.", labels=["pool"])
        ready = GaugeMetricFamily(
            Names.READY_REPLICAS, "Replicas that a request could be sent to now.", labels=["pool"]
        )
        saturated = GaugeMetricFamily(
            Names.SATURATED, "1 when more work is offered than the pool can carry.", labels=["pool"]
        )
        now = self._now()
        for pool in self._pools:
            for name, counters in pool.counters.items():
                queued.add_metric([pool.name, name], counters.queued)
            in_flight.add_metric([pool.name], sum(counters.in_flight for counters in pool.counters.values()))
            ready.add_metric([pool.name], pool.ready(now))
            saturated.add_metric([pool.name], pool.admission.saturated(now))
            read = self._policy_age(pool.name)
            if read is not None:
                revision.add_metric([pool.name], pool.policy.revision)
                age.add_metric([pool.name], read)
        return queued, in_flight, revision, age, ready, saturated

    def _durations(self) -> Iterable[Metric]:
        labels = ["pool", "class"]
        ttft = HistogramMetricFamily(
            Names.TTFT, "Arrival at the gateway to first content, per streamed request.", labels=labels
        )
        tpot = HistogramMetricFamily(Names.TPOT, "(last - first token) / (n - 1), per streamed request.", labels=labels)
        itl = HistogramMetricFamily(Names.ITL, "Gap between two events with content, per gap.", labels=labels)
        # Built by hand: the library writes no sum for a family with bounds below zero, and here the sum matters.
        error = Metric(Names.TTFT_ERROR, "Predicted minus actual time to first token.", "histogram")
        for pool in self._pools:
            for name, counters in pool.counters.items():
                for family, durations in ((ttft, counters.ttft), (tpot, counters.tpot), (itl, counters.itl)):
                    family.add_metric([pool.name, name], cumulative(durations), durations.sum)
            for decision, errors in pool.ttft_errors.items():
                known = {"pool": pool.name, "decision": decision}
                for bound, count in _signed(errors):
                    error.add_sample(f"{Names.TTFT_ERROR}_bucket", {**known, "le": bound}, count)
                error.add_sample(f"{Names.TTFT_ERROR}_count", known, sum(errors.counts))
                error.add_sample(f"{Names.TTFT_ERROR}_sum", known, errors.sum)
        return ttft, tpot, itl, error


class Exposition:
    """What a scrape gets: the counters, and the process itself."""

    def __init__(self, collector: CountersCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


def cumulative(durations: DurationHistogram) -> list[tuple[str, float]]:
    """Upper bound → observations up to it."""
    buckets: list[tuple[str, float]] = []
    items = sorted(durations.histogram.counts.items())
    seen = position = 0
    for edge in range(0, _LAST + _EVERY, _EVERY):
        while position < len(items) and items[position][0] <= edge:
            seen += items[position][1]
            position += 1
        buckets.append((f"{SMALLEST * GROWTH**edge:.6g}", seen))
    return [*buckets, ("+Inf", durations.histogram.total)]


def _signed(errors: SignedErrors) -> list[tuple[str, float]]:
    seen = 0
    buckets: list[tuple[str, float]] = []
    for edge, count in zip((*EDGES, math.inf), errors.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if edge == math.inf else repr(edge), seen))
    return buckets
