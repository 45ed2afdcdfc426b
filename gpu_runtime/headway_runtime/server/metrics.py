"""The Prometheus metrics of a replica. Each label has a closed set of values, none of which a client can choose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from headway_core.contract.metric_names import Metric
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from headway_runtime.ipc.messages import EngineLoad

OTHER_CLASS = "other"
"""The label of every class name that the policy in force does not have."""


def _buckets(low: float, high: float, growth: float) -> tuple[float, ...]:
    bounds = [low]
    while bounds[-1] < high:
        bounds.append(bounds[-1] * growth)
    return tuple(float(f"{bound:.4g}") for bound in bounds)


SECONDS_BUCKETS = _buckets(0.001, 7200.0, 1.15)
"""From a millisecond to beyond any time-out, each 15% wider than the last: a quantile is known to within 7%."""
STEP_BUCKETS = _buckets(0.0005, 60.0, 1.3)
ERROR_BUCKETS = _buckets(0.01, 10.0, 1.3)


class RuntimeMetrics:
    """The registry and everything in it. One instance a process; tests make their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        ttft = "Seconds from a request's arrival at the runtime to its first token; counts requests."
        itl = "Seconds between two tokens of one choice, the first token excluded; counts gaps of choices."
        error = "Relative error of an iteration's predicted length, one iteration ahead."
        self._ttft = histogram(Metric.ENGINE_TTFT, ttft, SECONDS_BUCKETS, "class")
        self._itl = histogram(Metric.ENGINE_ITL, itl, SECONDS_BUCKETS, "class")
        self._step = histogram(Metric.ITERATION_SECONDS, "Seconds that an iteration took.", STEP_BUCKETS)
        self._step_error = histogram(Metric.ITERATION_ERROR, error, ERROR_BUCKETS)
        self._running = gauge(Metric.RUNNING, "Sequences that hold a slot.")
        self._waiting = gauge(Metric.WAITING, "Sequences that wait for a slot or for blocks.")
        self._blocks = gauge(Metric.BLOCKS, "KV blocks by state.", "state")
        self._preemptions = counter(Metric.PREEMPTIONS, "Evictions of running sequences.", "kind", "cause")
        self._prompt = counter(Metric.PROMPT_TOKENS, "Prompt tokens by where they came from.", "source")
        self._output = counter(Metric.OUTPUT_TOKENS, "Tokens generated.")
        self._revision = gauge(Metric.POLICY_REVISION, "Revision of the policy in force; 0 before the first.", "pool")
        self._policy_age = gauge(Metric.POLICY_AGE, "Seconds since a good policy was last read.", "pool")
        self._emulated = gauge(Metric.EMULATED, "1 when iterations are lengthened to emulate an accelerator.")
        self._classes: frozenset[str] = frozenset()
        self._totals: dict[Counter, int] = {}

    def set_emulated(self, emulated: bool) -> None:
        """Whether iterations are lengthened to emulate an accelerator."""
        self._emulated.set(emulated)

    def set_classes(self, names: Iterable[str]) -> None:
        """The classes of the policy in force. Series of classes that it no longer has are dropped."""
        new = frozenset(names)
        for gone in self._classes - new:
            for histogram in (self._ttft, self._itl):
                with contextlib.suppress(KeyError):  # never observed
                    histogram.remove(gone)
        self._classes = new

    def class_label(self, class_name: str | None) -> str:
        """The label for a request that says it is of class `class_name`."""
        return class_name if class_name is not None and class_name in self._classes else OTHER_CLASS

    def observe_ttft(self, class_label: str, seconds: float) -> None:
        """A request's first token came `seconds` after it arrived."""
        self._ttft.labels(class_label).observe(seconds)

    def observe_itl(self, class_label: str, seconds: float) -> None:
        """A choice's token came `seconds` after the one before."""
        self._itl.labels(class_label).observe(seconds)

    def observe_step(self, elapsed: float, predicted: float | None) -> None:
        """An iteration took `elapsed` seconds; `predicted` were expected."""
        self._step.observe(elapsed)
        if predicted is not None and elapsed > 0:
            self._step_error.observe(abs(predicted - elapsed) / elapsed)

    def set_load(self, load: EngineLoad, total_blocks: int) -> None:
        """A new load of the engine."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._blocks.labels("free").set(load.free_blocks - load.cached_blocks)
        self._blocks.labels("cached").set(load.cached_blocks)
        self._blocks.labels("used").set(total_blocks - load.free_blocks)
        self._raise_to(self._prompt.labels("computed"), load.prompt_tokens - load.cached_prompt_tokens)
        self._raise_to(self._prompt.labels("cached"), load.cached_prompt_tokens)
        self._raise_to(self._prompt.labels("recomputed"), load.recomputed_tokens)
        self._raise_to(self._output, load.output_tokens)
        for cause, total in load.preemptions.items():
            self._raise_to(self._preemptions.labels("recompute", cause), total)

    def set_policy(self, pool: str, revision: int, age: float | None) -> None:
        """The policy's state, at each scrape. `age`: seconds since a good read; None before the first."""
        self._revision.labels(pool).set(revision)
        if age is not None:
            self._policy_age.labels(pool).set(age)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _raise_to(self, counter: Counter, total: int) -> None:
        """Raises a counter to the engine's running total."""
        before = self._totals.get(counter, 0)
        if total > before:
            counter.inc(total - before)
            self._totals[counter] = total
