"""One try at one replica: send the request, pass the answer on byte for byte, and tell the record what came when.

Until `ClientRequest.started` nothing has reached the client, so a failure here may still be tried elsewhere: that is
the pipeline's decision.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway_core.contract.header_names import LOAD, PROMPT_TOKENS, ShedReason

from headway_gateway.accounting import RequestRecord
from headway_gateway.client_request import ClientRequest
from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.stream_relay import StreamRelay
from headway_gateway.upstream import HostPort, Upstream, UpstreamResponse

_DEAD = {502: UpstreamFailure.RESET, 503: UpstreamFailure.REFUSED, 504: UpstreamFailure.RESET}
"""Statuses of a replica that cannot serve at all, as opposed to one that failed at this request."""


@dataclass(slots=True)
class UpstreamAttempt:
    """One try: where it goes and who is told what. The members with defaults are what the answer said beside its
    bytes."""

    address: HostPort
    path: str
    body: bytes
    headers: Mapping[str, str]
    client_request: ClientRequest
    record: RequestRecord
    first_token: Callable[[], None]
    """Called when the first content of a stream has come."""
    heard: Callable[[str | None], None]
    """Called with the load hint as soon as the head of the answer is there: a minute later it would be history."""
    status: int = 0
    prompt_tokens: int | None = None
    """Exact length of the prompt."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Passes answers on. `hold`: seconds that a stream's first bytes wait for content, so that another replica can
    still take over."""

    upstream: Upstream
    hold: float

    async def run(self, attempt: UpstreamAttempt) -> None:
        """One try.

        Raises:
            UpstreamError: the replica failed. If `client_request.started`, part of its answer is already out.
        """
        async with await self.upstream.post(attempt.address, attempt.path, attempt.body, attempt.headers) as response:
            attempt.status = response.status
            attempt.heard(response.header(LOAD))
            attempt.prompt_tokens = _count(response.header(PROMPT_TOKENS))
            if response.status in _DEAD:
                raise UpstreamError(_DEAD[response.status], f"it answered {response.status}")
            if response.status < 300 and response.is_stream:
                await self._stream(response, attempt)
            else:
                await self._whole(response, attempt)

    async def _whole(self, response: UpstreamResponse, attempt: UpstreamAttempt) -> None:
        client_request, record = attempt.client_request, attempt.record
        loop = asyncio.get_running_loop()
        body = await response.read_all()
        now = loop.time()
        if response.status >= 500:
            record.outcome = "upstream_error"
        elif response.status == 429:
            record.outcome, record.reason = "shed", ShedReason.QUEUE_FULL
        elif response.status >= 400:
            record.outcome = "client_error"
        await client_request.start(
            response.status, [*response.passed_on(), (b"content-length", str(len(body)).encode())]
        )
        await client_request.finish(body)
        if response.status < 300:
            prompt, output = _usage(body)
            attempt.prompt_tokens = attempt.prompt_tokens or prompt
            record.finished(now, False, prompt, output)

    async def _stream(self, response: UpstreamResponse, attempt: UpstreamAttempt) -> None:
        client_request, record = attempt.client_request, attempt.record
        stream = StreamRelay(
            client_request, record, response.status, response.passed_on(), attempt.first_token, self.hold
        )
        try:
            rest = await response.pump(stream.piece, client_request.caught_up)
            await stream.finish(rest)
        finally:
            stream.close()
        if stream.broken:
            record.outcome = "upstream_error"
        else:
            usage = stream.usage or {}
            record.finished(asyncio.get_running_loop().time(), True, usage.get("prompt"), usage.get("completion"))


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 12 else None


def _usage(body: bytes) -> tuple[int | None, int | None]:
    """Prompt and completion tokens of a whole answer; None where it does not say."""
    try:
        usage = json.loads(body).get("usage")
    except (ValueError, AttributeError, RecursionError):
        return None, None
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    prompt, output = (count if type(count) is int and count >= 0 else None for count in counts)
    return prompt, output
