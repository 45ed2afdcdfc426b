"""Errors as the OpenAI API spells them, ``{"error": {message, type, param, code}}``, with the status SDKs expect."""

from __future__ import annotations

from collections.abc import Sequence

from headway_core.errors import RequestError
from headway_edge.error_body import error_body

MAX_MESSAGE = 1000
"""Most characters of a message, which may quote what arrived: a megabyte of input is not sent back."""

Headers = Sequence[tuple[bytes, bytes]]


class ApiError(Exception):
    """A response other than 200. `close`: closes the connection (unread input, or the replica shuts down)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " …"
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = tuple(headers)
        self.close = close

    def body(self) -> bytes:
        """The JSON object, one line."""
        return error_body(self.message, self.kind, self.code, self.param)


def bad_request(error: RequestError) -> ApiError:
    """400 for a request that breaks a rule."""
    return ApiError(400, str(error), param=error.field or None, code=error.code)


def unknown_model(model: str, served: str) -> ApiError:
    """404: the client asks for another model than the one served."""
    message = f"the model {model[:200]!r} is not served here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_large(limit: int) -> ApiError:
    """413: more body than one request may have."""
    return ApiError(413, f"the body exceeds the limit of {limit} bytes", code="request_too_large", close=True)


def slow_body(seconds: float) -> ApiError:
    """408: the body did not arrive in time."""
    return ApiError(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout", close=True)


def _unavailable(message: str, code: str, retry_after: bytes, *, close: bool) -> ApiError:
    kind, headers = "service_unavailable_error", ((b"retry-after", retry_after),)
    return ApiError(503, f"{message}; try again", kind=kind, code=code, headers=headers, close=close)


def draining() -> ApiError:
    """503: this replica finishes what it has and takes nothing new."""
    return _unavailable("this replica is shutting down and takes no new requests", "draining", b"1", close=True)


def not_ready() -> ApiError:
    """503: the engine is not up (yet, or any more)."""
    return _unavailable("the engine is not running", "engine_unavailable", b"2", close=False)


def engine_died() -> ApiError:
    """502: the engine process ended under the request. Not 500, which says that this request fails anywhere."""
    return ApiError(
        502, "the engine ended while it worked on this request; try again", kind="server_error", code="engine_died"
    )


def drain_timed_out() -> ApiError:
    """503: the drain budget ran out before the request was finished."""
    return _unavailable("this replica shut down before the request was finished", "draining", b"1", close=True)


def timed_out(seconds: float) -> ApiError:
    """504: the request took longer than the server allows."""
    return ApiError(
        504, f"the request was not finished within {seconds:g} seconds", kind="timeout_error", code="request_timeout"
    )


def internal() -> ApiError:
    """500 for a fault of our own; the details are in the log, not in the response."""
    return ApiError(500, "internal error; the server's log has the details", kind="server_error", code="internal_error")
