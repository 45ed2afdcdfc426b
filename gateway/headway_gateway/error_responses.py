"""The gateway's own error responses, shaped as OpenAI clients expect them: status, type and headers.

A request that gets one was *shed*, *rejected* or *failed by its replica*: see the package's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway_core.contract.header_names import SHED_REASON, ShedReason
from headway_core.errors import RequestError
from headway_edge.error_body import error_body


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """What a client gets instead of the model's response."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False
    """The connection cannot be used again, because what the client still sends is not wanted."""

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.message, self.kind, self.code, self.param)

    def event(self) -> bytes:
        """The same as an event in a stream that has already begun."""
        return b"data: " + self.body() + b"\n\n"


class RequestFailed(Exception):
    """Ends a request early: the client gets `response`, as the last event of its stream if that has begun.

    `outcome` is one of `metric_names.OUTCOMES`; `reason` is given if it was shed.
    """

    def __init__(
        self, response: ErrorResponse, outcome: str = "client_error", reason: ShedReason | None = None
    ) -> None:
        super().__init__(response.message)
        self.response = response
        self.outcome = outcome
        self.reason = reason


def bad_request(error: RequestError) -> ErrorResponse:
    """400 for a request that breaks a rule."""
    return ErrorResponse(400, str(error), code=error.code, param=error.field or None)


def unauthorized() -> ErrorResponse:
    """401 for a missing or unknown key; which of the two is not said."""
    return ErrorResponse(
        401,
        "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
        "authentication_error",
        "invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def class_forbidden(name: str) -> ErrorResponse:
    """403 for a class that the key does not open."""
    return ErrorResponse(
        403, f"this API key may not use the class {name!r}", "permission_error", "class_not_allowed", "service_tier"
    )


def unknown_class(name: str) -> ErrorResponse:
    """400 for a class header that names no class of the pool."""
    return ErrorResponse(400, f"no class is named {name[:64]!r}", code="unknown_class", param="x-headway-class")


def unknown_model(name: str, known: list[str]) -> ErrorResponse:
    """404 for a model that no pool serves."""
    listed = ", ".join(known) or "none yet"
    return ErrorResponse(
        404, f"the model {name[:128]!r} does not exist; served here: {listed}", code="model_not_found", param="model"
    )


def too_large(limit: int) -> ErrorResponse:
    """413, and the connection is closed without reading the rest."""
    return ErrorResponse(413, f"the request body must not exceed {limit} bytes", code="request_too_large", close=True)


def too_slow(seconds: float) -> ErrorResponse:
    """408 for an upload that stands still or crawls."""
    return ErrorResponse(
        408,
        f"the request body did not arrive within the time allowed ({seconds:g} s without progress)",
        code="request_timeout",
        close=True,
    )


_REASONS = {
    ShedReason.PREFILL_WAIT: "its first token would come too late: more prompt tokens must be computed before "
    "it than the target allows",
    ShedReason.SLOT_WAIT: "its first token would come too late: every slot is taken for longer than that",
    ShedReason.BLOCK_WAIT: "its first token would come too late: the KV cache is full for longer than that",
    ShedReason.OUTRANKED: "it was given up so that more of the requests waiting with it are served on time",
    ShedReason.QUEUE_FULL: "the queue is full",
    ShedReason.QUEUE_TIME: "it waited as long as its class allows",
    ShedReason.NO_REPLICA: "no replica can serve this model now",
    ShedReason.DRAINING: "this gateway is going away",
}


def shed(reason: ShedReason, retry_after: int, contended: bool = False) -> RequestFailed:
    """429 where capacity is contended, 503 where there is none; `retry_after`: seconds until the client may retry."""
    response = ErrorResponse(
        429 if contended else 503,
        f"not now: {_REASONS[reason]}; try again in {retry_after} s",
        "rate_limit_error" if contended else "service_unavailable_error",
        reason.value,
        headers={"retry-after": str(retry_after), SHED_REASON: reason.value},
        close=reason is ShedReason.DRAINING,
    )
    return RequestFailed(response, "shed", reason)


def upstream_failed() -> ErrorResponse:
    """502 when a replica broke off and no other may take over."""
    return ErrorResponse(
        502, "the replica that served this request broke off; trying again is safe", "server_error", "upstream_error"
    )


def timed_out(seconds: float) -> ErrorResponse:
    """504 when the request as a whole took too long."""
    return ErrorResponse(504, f"the request took longer than {seconds:g} s", "timeout_error", "request_timeout")


def going_away() -> ErrorResponse:
    """503, or the end of a stream, when the drain budget is spent."""
    return ErrorResponse(
        503,
        "this gateway is going away and could not wait any longer; trying again is safe",
        "service_unavailable_error",
        ShedReason.DRAINING.value,
        headers={"retry-after": "1", SHED_REASON: ShedReason.DRAINING.value},
        close=True,
    )
