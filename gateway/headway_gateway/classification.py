"""Which priority class of a pool's policy a request belongs to."""

from __future__ import annotations

from headway_core.contract.policy import Policy
from headway_core.slo import PriorityClass

from headway_gateway import error_responses
from headway_gateway.error_responses import RequestFailed
from headway_gateway.keys import Caller


def classify(
    policy: Policy, caller: Caller, *, class_header: str | None = None, service_tier: str | None = None
) -> PriorityClass:
    """The class that the trusted header names, else the one of the service tier, else the default class. A key may be
    limited to some classes; its requests that name none get the default class, or the first class that the key allows.

    Raises:
        RequestFailed: 400 for a header that names no class; 403 for a class that the key does not allow.
    """
    classes = {known.name: known for known in policy.classes}
    by_tier = {tier: known for known in policy.classes for tier in known.service_tiers}
    if class_header is not None and class_header not in classes:
        raise RequestFailed(error_responses.unknown_class(class_header))
    chosen = classes.get(class_header or "") or by_tier.get(service_tier or "")
    if caller.classes is None:
        return chosen or classes[policy.default_class]
    if chosen is not None:
        if chosen.name not in caller.classes:
            raise RequestFailed(error_responses.class_forbidden(chosen.name))
        return chosen
    allowed = [known for known in policy.classes if known.name in caller.classes]
    if not allowed:
        raise RequestFailed(error_responses.class_forbidden(policy.default_class))
    return next((known for known in allowed if known.name == policy.default_class), allowed[0])
