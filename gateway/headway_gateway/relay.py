"""One attempt at one replica: sends the request, relays the response byte for byte, and tells a listener what it says.

Until `ClientRequest.started` nothing has reached the client, so the pipeline may still try another replica.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headway_core.contract.header_names import LOAD, PROMPT_TOKENS, ShedReason

from headway_gateway.client_request import ClientRequest
from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.stream_relay import ResponseListener, StreamRelay
from headway_gateway.upstream import HostPort, Upstream, UpstreamResponse

_FAILED_STATUSES = {502: UpstreamFailure.RESET, 503: UpstreamFailure.UNAVAILABLE, 504: UpstreamFailure.RESET}
"""Statuses of a replica that cannot serve at all, as opposed to one that failed at this request."""


@dataclass(frozen=True, slots=True)
class UpstreamAttempt:
    """One attempt: where the request goes, and who is told what comes back."""

    address: HostPort
    path: str
    body: bytes
    headers: Mapping[str, str]
    client_request: ClientRequest
    listener: ResponseListener


@dataclass(frozen=True, slots=True)
class Relay:
    """Relays responses. `first_byte_hold`: seconds that a stream's first bytes wait for content; see `StreamRelay`."""

    upstream: Upstream
    first_byte_hold: float
    clock: Callable[[], float]

    async def run(self, attempt: UpstreamAttempt) -> int:
        """One attempt. Returns the status of the response.

        Raises:
            UpstreamError: the replica failed. If `client_request.started`, part of its response is already out.
        """
        async with await self.upstream.post(attempt.address, attempt.path, attempt.body, attempt.headers) as response:
            attempt.listener.headers(response.header(LOAD))
            counted = _count(response.header(PROMPT_TOKENS))
            if counted is not None:
                attempt.listener.prompt_tokens(counted)
            if response.status in _FAILED_STATUSES:
                raise UpstreamError(_FAILED_STATUSES[response.status], f"it answered {response.status}")
            if response.status < 300 and response.is_stream:
                await self._stream(response, attempt)
            else:
                await self._whole(response, attempt, counted is not None)
            return response.status

    async def _whole(self, response: UpstreamResponse, attempt: UpstreamAttempt, prompt_counted: bool) -> None:
        client_request, listener = attempt.client_request, attempt.listener
        body = await response.read_all()
        now = self.clock()
        if response.status >= 500:
            listener.failed("upstream_error")
        elif response.status == 429:
            listener.failed("shed", ShedReason.QUEUE_FULL)
        elif response.status >= 400:
            listener.failed("client_error")
        length = (b"content-length", str(len(body)).encode())
        await client_request.start(response.status, [*response.passed_on(), length])
        await client_request.finish(body)
        if response.status < 300:
            prompt, output = _usage(body)
            if prompt is not None and not prompt_counted:
                listener.prompt_tokens(prompt)
            listener.completed(now, False, prompt, output)

    async def _stream(self, response: UpstreamResponse, attempt: UpstreamAttempt) -> None:
        listener = attempt.listener
        stream = StreamRelay(
            attempt.client_request, listener, response.status, response.passed_on(), self.first_byte_hold, self.clock
        )
        try:
            rest = await response.pump(stream.feed, attempt.client_request.caught_up)
            await stream.finish(rest)
        finally:
            stream.close()
        if stream.broken:
            listener.failed("upstream_error")
        else:
            usage = stream.usage or {}
            listener.completed(self.clock(), True, usage.get("prompt"), usage.get("completion"))


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 12 else None


def _usage(body: bytes) -> tuple[int | None, int | None]:
    """Prompt and completion tokens of a response that is no stream; None where it does not say."""
    try:
        usage = json.loads(body).get("usage")
    except (ValueError, AttributeError, RecursionError):
        return None, None
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    prompt, output = (count if type(count) is int and count >= 0 else None for count in counts)
    return prompt, output
