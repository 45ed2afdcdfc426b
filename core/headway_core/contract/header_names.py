"""Names of headers, in lower case as ASGI has them, and what they may say."""

from __future__ import annotations

import hashlib
import re
from enum import Enum

SHED_REASON = "x-headway-shed-reason"
"""On 429 and 503 from the gateway: one of `ShedReason`."""
REQUEST_ID = "x-request-id"
"""For tracing only; never a key."""
REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""A client's request id that is kept; the server makes one in place of any other."""
PRIORITY = "x-headway-priority"
"""Gateway to runtime: the class's priority, a whole number; the runtime serves higher ones first."""
CLASS = "x-headway-class"
"""The name of a class. From clients honoured only with --trust-class-header; gateway to runtime: for its metrics."""
TENANT = "x-headway-tenant"
"""Gateway to runtime: salt of the prefix cache, so that nobody learns by timing what others asked."""
DISPATCH = "x-headway-dispatch"
"""Gateway to runtime: ``<gateway boot id>:<number>``; it grows by one per replica, and load reports say the highest."""
WANT_USAGE = "x-headway-want-usage"
"""Gateway to runtime: ask for the SSE comment `USAGE_COMMENT` at the end of a stream."""
USAGE_COMMENT = ": headway "
"""Head of the SSE comment with ``{"prompt": p, "cached": c, "completion": n}``, which the gateway takes out."""
PROMPT_TOKENS = "x-headway-prompt-tokens"
"""Runtime to gateway: the exact prompt length, from which the gateway learns its bytes-per-token estimate."""
CACHED_TOKENS = "x-headway-cached-tokens"
"""Runtime to gateway: prompt tokens that came from the prefix cache."""
LOAD = "x-headway-load"
"""Runtime to gateway, on every response: a `LoadHint` as compact JSON."""
INTERNAL_HEADERS = frozenset({PRIORITY, CLASS, TENANT, DISPATCH, WANT_USAGE, PROMPT_TOKENS, CACHED_TOKENS, LOAD})
"""Stripped at the gateway's edge, both from what clients send and from what they get."""


class ShedReason(Enum):
    """Why a request was not served; the values of the header `SHED_REASON` and of the metric label `reason`."""

    PREFILL_WAIT = "prefill_wait"
    SLOT_WAIT = "slot_wait"
    BLOCK_WAIT = "block_wait"
    OUTRANKED = "outranked"
    """Given up from the queue so that others, waiting or expected, meet their targets (Moore's rule)."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIME = "queue_time"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"


def tenant_salt(tenant: str | None) -> bytes:
    """The salt of a tenant's prefix digests: 16 bytes of blake2b (``hash()`` would differ between processes)."""
    return hashlib.blake2b((tenant or "").encode(), digest_size=16).digest()
