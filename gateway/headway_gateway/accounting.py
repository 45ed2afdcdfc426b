"""What was promised against what happened: every offered request, in exactly one outcome.

A request is judged against the target in force when it arrived. Time to first token counts from arrival at this gateway
to the first content; time per output token is (last - first token) / (n - 1) for n >= 2, per answer. An answer that
does not stream shows neither: it is judged on the whole, by the deadline of its last token, TTFT + (n - 1) * TPOT. What
is not known is not judged.
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

    Something is added for every token of every stream: it is only noted, and goes into its bucket with many others, or
    when somebody looks.
    """

    __slots__ = ("_histogram", "_noted", "_sum")

    def __init__(self) -> None:
        self._histogram = LogHistogram()
        self._sum = 0.0
        self._noted: list[float] = []

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts one duration, `times` times."""
        noted = self._noted
        noted.append(seconds)
        if times > 1:
            noted.extend([seconds] * (times - 1))
        if len(noted) >= _BATCH:
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
        """The same buckets as `LogHistogram.add` finds, looked up."""
        counts = self._histogram.counts
        for seconds, times in Counter(self._noted).items():
            index = bisect.bisect_left(_UPPER, seconds)
            counts[index] = counts.get(index, 0) + times
        self._sum += sum(self._noted)
        self._noted.clear()


EDGES = (
    -60.0,
    -30.0,
    -10.0,
    -5.0,
    -2.0,
    -1.0,
    -0.5,
    -0.25,
    -0.1,
    -0.05,
    0.0,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""Upper bounds of the buckets of a signed error, seconds."""


@dataclass(slots=True)
class SignedErrors:
    """A histogram of predicted - actual, seconds: `counts[i]` lie in (EDGES[i-1], EDGES[i]]; the last holds what is
    above all edges."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    sum: float = 0.0

    def add(self, error: float) -> None:
        """Counts one error."""
        self.counts[bisect.bisect_left(EDGES, error)] += 1
        self.sum += error


class ClassCounters:
    """The running counts of one class. Only `RequestRecord` writes."""

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

    def judge(self, objective: str, kept: bool) -> bool:
        """Counts one judgement, and returns it."""
        self.judged[objective] = self.judged.get(objective, 0) + 1
        self.attained[objective] = self.attained.get(objective, 0) + kept
        return kept

    def read(self) -> ClassReport:
        """The counts as others read them."""
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


class RequestRecord:
    """One offered request's entry. A context: whatever way it is left, exactly one outcome is booked."""

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
        self._counters.retries += self._request.retry
        self._counters.in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set_queued(False)
        self._counters.in_flight -= 1
        outcome, reason = self.outcome, self.reason
        if isinstance(error, RequestFailed):
            outcome, reason = error.outcome, error.reason
        elif isinstance(error, RequestStopped):
            outcome = _STOPPED[error.cause]
            if error.cause is StopCause.DRAIN and not self._admitted:
                outcome, reason = "shed", ShedReason.DRAINING
        elif error is not None:
            outcome = "upstream_error"
        self._counters.outcomes[outcome] += 1
        if reason is not None:
            self._counters.shed[reason.value] = self._counters.shed.get(reason.value, 0) + 1

    def set_queued(self, queued: bool) -> None:
        """Whether it stands in the queue now."""
        self._counters.queued += queued - self._queued
        self._queued = queued

    def admitted(self) -> None:
        """It has been sent to a replica; a second try elsewhere is the same admission."""
        self._counters.admitted += not self._admitted
        self._admitted = True

    def content(self, now: float, records: int) -> None:
        """`records` pieces of content came together at `now`; the first call is the first token."""
        last, self._last = self._last, now
        if last is None:
            self.first = now
            self._counters.ttft.add(now - self._request.arrival)
        elif records and self._gaps is not None:
            self._gaps.add(now - last)
        if records > 1 and self._gaps is not None:
            self._gaps.add(0.0, records - 1)

    def finished(self, now: float, streamed: bool, prompt: int | None, output: int | None) -> None:
        """The answer is complete: judges it. Token counts are the runtime's; None: it did not say."""
        counters, objectives = self._counters, self._request.priority_class.objectives
        counters.prompt_tokens += prompt or 0
        counters.output_tokens += output or 0
        tokens = None if output is None else output / self._choices
        verdicts: list[bool] = []
        ttft_limit = None if objectives.ttft is None else objectives.ttft.limit(prompt or self._request.prompt_tokens)
        if streamed:
            if ttft_limit is not None and self.first is not None:
                verdicts.append(counters.judge("ttft", self.first - self._request.arrival <= ttft_limit))
            if tokens is not None and tokens >= 2 and self.first is not None and self._last is not None:
                tpot = (self._last - self.first) / (tokens - 1)
                counters.tpot.add(tpot)
                if objectives.tpot is not None:
                    verdicts.append(counters.judge("tpot", tpot <= objectives.tpot.target))
        elif ttft_limit is not None and objectives.tpot is not None and tokens is not None:
            verdicts.append(now - self._request.arrival <= ttft_limit + max(0.0, tokens - 1) * objectives.tpot.target)
        if verdicts:
            counters.judge("all", all(verdicts))


_STOPPED = {
    StopCause.CLIENT_GONE: "client_closed",
    StopCause.CLIENT_STALLED: "client_closed",
    StopCause.TIMEOUT: "timeout",
    StopCause.DRAIN: "upstream_error",
}
