"""Objectives against what happened: counts every offered request, in exactly one outcome.

A request is judged by the objectives in force when it arrived. TTFT counts from arrival at this gateway to the first
content. TPOT is (last - first token) / (n - 1) for n >= 2 tokens, per choice. A response that does not stream is judged
as a whole, by the deadline of its last token, TTFT + (n - 1) * TPOT. What is not known is not judged.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from headway_core.admission.request import Request
from headway_core.contract.header_names import ShedReason
from headway_core.contract.metric_names import OUTCOMES
from headway_core.contract.reports import ClassReport
from headway_core.histogram import GROWTH, SMALLEST, LogHistogram

from headway_gateway.client_request import RequestStopped, StopCause
from headway_gateway.error_responses import RequestFailed

_UPPER = tuple(SMALLEST * GROWTH**index * (1 + 1e-10) for index in range(400))
"""Upper bounds of the log buckets, up to a year and beyond, with the tolerance of `histogram.bucket`."""


_BATCH = 500


class DurationHistogram:
    """A histogram and the sum of what is in it, seconds.

    Every token of every stream adds a duration, so `add` only collects it; durations are counted many at a time.
    """

    __slots__ = ("_histogram", "_pending", "_sum")

    def __init__(self) -> None:
        self._histogram = LogHistogram()
        self._sum = 0.0
        self._pending: list[float] = []

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts one duration, `times` times."""
        pending = self._pending
        pending.append(seconds)
        if times > 1:
            pending.extend([seconds] * (times - 1))
        if len(pending) >= _BATCH:
            self._count()

    @property
    def histogram(self) -> LogHistogram:
        """How many in each bucket."""
        self._count()
        return self._histogram

    @property
    def sum(self) -> float:
        """All together, seconds."""
        self._count()
        return self._sum

    def _count(self) -> None:
        """Counts in the same buckets as `LogHistogram.add`, found by bisection."""
        counts = self._histogram.counts
        for seconds, times in Counter(self._pending).items():
            index = bisect.bisect_left(_UPPER, seconds)
            counts[index] = counts.get(index, 0) + times
        self._sum += sum(self._pending)
        self._pending.clear()


_STEPS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
EDGES = (*(-step for step in reversed(_STEPS)), 0.0, *_STEPS)
"""Upper bounds of the buckets of a signed error, seconds."""


@dataclass(slots=True)
class SignedErrors:
    """A histogram of predicted - actual, seconds: `counts[i]` lie in (EDGES[i-1], EDGES[i]], the last above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    sum: float = 0.0

    def add(self, error: float) -> None:
        """Counts one error."""
        self.counts[bisect.bisect_left(EDGES, error)] += 1
        self.sum += error


class ClassCounters:
    """The running counts of one class."""

    def __init__(self) -> None:
        self.offered = 0
        self.retries = 0
        self.admitted = 0
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.shed: dict[str, int] = {}
        self.attained: dict[str, int] = {}
        self.judged: dict[str, int] = {}
        self.ttft = DurationHistogram()
        self.tpot = DurationHistogram()
        self.itl = DurationHistogram()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queued = 0
        self.in_flight = 0

    def judge(self, objective: str, met: bool) -> bool:
        """Counts whether a request met `objective`. Returns `met`."""
        self.judged[objective] = self.judged.get(objective, 0) + 1
        self.attained[objective] = self.attained.get(objective, 0) + (1 if met else 0)
        return met

    def end(self, outcome: str, reason: ShedReason | None) -> None:
        """Counts the end of a request."""
        self.outcomes[outcome] += 1
        if reason is not None:
            self.shed[reason.value] = self.shed.get(reason.value, 0) + 1

    def read(self) -> ClassReport:
        """The counts so far, for the load report."""
        return ClassReport(
            offered=self.offered,
            retries=self.retries,
            admitted=self.admitted,
            outcomes=dict(self.outcomes),
            shed=dict(self.shed),
            attained=dict(self.attained),
            judged=dict(self.judged),
            ttft=dict(self.ttft.histogram.counts),
            tpot=dict(self.tpot.histogram.counts),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            queued=self.queued,
            in_flight=self.in_flight,
        )


_STOPPED = {
    StopCause.CLIENT_GONE: "client_closed",
    StopCause.CLIENT_STALLED: "client_closed",
    StopCause.TIMEOUT: "timeout",
    StopCause.DRAIN: "upstream_error",
}


def outcome_of(error: BaseException, admitted: bool) -> tuple[str, ShedReason | None]:
    """The outcome of a request that `error` ends, one of `metric_names.OUTCOMES`, and the reason if it was shed."""
    if isinstance(error, RequestFailed):
        return error.outcome, error.reason
    if not isinstance(error, RequestStopped):
        return "upstream_error", None
    if error.cause is StopCause.DRAIN and not admitted:
        return "shed", ShedReason.DRAINING
    return _STOPPED[error.cause], None


class RequestRecord:
    """The record of one offered request. A context: however it is left, exactly one outcome is counted."""

    __slots__ = (
        "_admitted",
        "_choices",
        "_counters",
        "_gaps",
        "_last",
        "_queued",
        "_request",
        "first",
        "outcome",
        "reason",
    )

    def __init__(self, counters: ClassCounters, request: Request, choices: int) -> None:
        self._counters = counters
        self._gaps = counters.itl if choices == 1 else None
        self._request = request
        self._choices = choices
        self._queued = False
        self._admitted = False
        self.first: float | None = None
        """When the first content came."""
        self._last: float | None = None
        self.outcome = "ok"
        self.reason: ShedReason | None = None

    def __enter__(self) -> RequestRecord:
        self._counters.offered += 1
        if self._request.retry:
            self._counters.retries += 1
        self._counters.in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set_queued(False)
        self._counters.in_flight -= 1
        if error is None:
            self._counters.end(self.outcome, self.reason)
        else:
            self._counters.end(*outcome_of(error, self._admitted))

    def set_queued(self, queued: bool) -> None:
        """Whether it waits in the queue now."""
        if queued != self._queued:
            self._counters.queued += 1 if queued else -1
            self._queued = queued

    def admitted(self) -> None:
        """It is sent to a replica; a second attempt elsewhere is the same admission."""
        if not self._admitted:
            self._counters.admitted += 1
            self._admitted = True

    def content(self, now: float, events: int) -> None:
        """`events` events with data came together at `now`; the first call is the first token."""
        last, self._last = self._last, now
        if last is None:
            self.first = now
            self._counters.ttft.add(now - self._request.arrival)
        elif events and self._gaps is not None:
            self._gaps.add(now - last)
        if events > 1 and self._gaps is not None:
            self._gaps.add(0.0, events - 1)

    def finished(self, now: float, streamed: bool, prompt: int | None, output: int | None) -> None:
        """The response is complete: judges the request. `prompt`, `output`: token counts of the runtime, if known."""
        counters, objectives = self._counters, self._request.priority_class.objectives
        counters.prompt_tokens += prompt or 0
        counters.output_tokens += output or 0
        tokens = None if output is None else output / self._choices
        met: list[bool] = []
        ttft_limit = None if objectives.ttft is None else objectives.ttft.limit(prompt or self._request.prompt_tokens)
        if streamed:
            if ttft_limit is not None and self.first is not None:
                met.append(counters.judge("ttft", self.first - self._request.arrival <= ttft_limit))
            if tokens is not None and tokens >= 2 and self.first is not None and self._last is not None:
                tpot = (self._last - self.first) / (tokens - 1)
                counters.tpot.add(tpot)
                if objectives.tpot is not None:
                    met.append(counters.judge("tpot", tpot <= objectives.tpot.target))
        elif ttft_limit is not None and objectives.tpot is not None and tokens is not None:
            met.append(now - self._request.arrival <= ttft_limit + max(0.0, tokens - 1) * objectives.tpot.target)
        if met:
            counters.judge("all", all(met))
