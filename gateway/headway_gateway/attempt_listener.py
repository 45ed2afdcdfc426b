"""What one attempt at a replica teaches: each event of its response goes to the pool, the grant and the record."""

from __future__ import annotations

from collections.abc import Callable

from headway_core.contract.header_names import ShedReason

from headway_gateway.accounting import RequestRecord
from headway_gateway.dispatcher import Grant
from headway_gateway.parsed_request import ParsedRequest
from headway_gateway.pools import ServedPool


class AttemptListener:
    """The `stream_relay.ResponseListener` of one grant. `clock` is the event loop's."""

    def __init__(
        self, pool: ServedPool, grant: Grant, record: RequestRecord, parsed: ParsedRequest, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._grant = grant
        self._record = record
        self._parsed = parsed
        self._clock = clock
        # The record's own method: it is called for each chunk of each stream.
        self.tokens = record.content

    def headers(self, load_hint: str | None) -> None:
        """The replica's load, as its response tells it."""
        if load_hint is not None:
            self._pool.replicas.hint(self._grant.replica_id, load_hint, self._clock())

    def prompt_tokens(self, count: int) -> None:
        """The estimator learns the exact length of a prompt that came as text."""
        if self._parsed.token_ids is None:
            self._pool.estimator.observe(self._pool.name, self._parsed.text, count)

    def first_token(self, now: float) -> None:
        """The predicted time to first token is compared with the actual one."""
        for sample in self._grant.first_token(now):
            self._pool.ttft_errors["shed" if sample.shed else "admitted"].add(sample.error)

    def completed(self, now: float, streamed: bool, prompt: int | None, output: int | None) -> None:
        """The request is judged by its objectives."""
        self._record.finished(now, streamed, prompt, output)

    def failed(self, outcome: str, reason: ShedReason | None = None) -> None:
        """The request ends with `outcome`, one of `metric_names.OUTCOMES`, although its response was relayed whole."""
        self._record.outcome, self._record.reason = outcome, reason
