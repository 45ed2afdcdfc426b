"""The headers of a generation request: its id for tracing, and what the gateway adds for scheduling."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from headway_core.contract import header_names
from headway_core.errors import RequestError

PRIORITY_LIMIT = 1_000_000
"""Priorities run from minus to plus this, as in a ServingSLO."""

_WHOLE = re.compile(rb"-?[0-9]{1,7}")
_DISPATCH = re.compile(rb"([A-Za-z0-9._-]{1,128}):([0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The headers that the runtime reads; it ignores all others."""

    priority: int = 0
    class_name: str | None = None
    tenant: str | None = None
    want_usage: bool = False
    content_length: int | None = None


def dispatch_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, int] | None:
    """(gateway boot id, dispatch number), also of a request that is rejected; None without."""
    for name, value in headers:
        if name == header_names.DISPATCH.encode() and (match := _DISPATCH.fullmatch(value)):
            return match[1].decode(), int(match[2])
    return None


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """The headers of an ASGI scope. Raises RequestError for an invalid priority."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value)
    return RequestHeaders(
        priority=_priority(first.get(header_names.PRIORITY.encode())),
        class_name=_text(first.get(header_names.CLASS.encode())),
        tenant=_text(first.get(header_names.TENANT.encode())),
        want_usage=header_names.WANT_USAGE.encode() in first,
        content_length=_content_length(first.get(b"content-length")),
    )


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's request id when it is short and plain, else a new one. For tracing, never a key."""
    value = next((value for name, value in headers if name == header_names.REQUEST_ID.encode()), b"")
    return value.decode("ascii") if header_names.REQUEST_ID_PATTERN.fullmatch(value) else uuid.uuid4().hex


def _priority(value: bytes | None) -> int:
    if value is None:
        return 0
    if _WHOLE.fullmatch(value) and abs(priority := int(value)) <= PRIORITY_LIMIT:
        return priority
    shown = ascii(value[:40].decode("latin-1"))
    raise RequestError(
        f"must be a whole number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}, not {shown}", header_names.PRIORITY
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _content_length(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else None
