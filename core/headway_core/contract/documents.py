"""Policies and reports as JSON text and back."""

from __future__ import annotations

import json

from headway_core.contract import codec
from headway_core.contract.policy import Policy
from headway_core.contract.reports import GatewayReport, LoadHint, RuntimeReport
from headway_core.errors import DocumentError


def dump(document: Policy | RuntimeReport | GatewayReport | LoadHint) -> str:
    """The document as one line of JSON, members in a fixed order: equal documents are equal bytes."""
    return json.dumps(codec.encode(document), separators=(",", ":"), ensure_ascii=True)


def load_policy(text: str | bytes) -> Policy:
    """Raises DocumentError, naming the member, for anything that is not a policy."""
    return codec.decode(Policy, _json(text))


def load_runtime_report(text: str | bytes) -> RuntimeReport:
    """Raises DocumentError, naming the member, for anything that is not a runtime's load report."""
    return codec.decode(RuntimeReport, _json(text))


def load_gateway_report(text: str | bytes) -> GatewayReport:
    """Raises DocumentError, naming the member, for anything that is not a gateway's load report."""
    return codec.decode(GatewayReport, _json(text))


def load_hint(text: str | bytes) -> LoadHint:
    """Raises DocumentError, naming the member, for anything that is not a load hint."""
    return codec.decode(LoadHint, _json(text))


def _json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"is not JSON: {error}") from error
