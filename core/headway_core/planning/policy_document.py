"""The policy that one ServingSLO makes with the knobs and the cordon decided for it. Pure."""

from __future__ import annotations

from dataclasses import replace

from headway_core.contract.policy import Endpoint, Knobs, Policy, Pool
from headway_core.slo import ServingSLO


def policy_document(
    slo: ServingSLO,
    endpoints: tuple[Endpoint, ...],
    knobs: Knobs,
    cordoned: tuple[str, ...] = (),
    *,
    revision: int,
) -> Policy:
    """The policy; `endpoints` are where the replicas of the pool are reached."""
    return Policy(
        revision=revision,
        slo_uid=slo.uid,
        generation=slo.generation,
        pool=Pool(slo.target_name, endpoints),
        classes=slo.classes,
        default_class=slo.default_class,
        knobs=knobs,
        cordoned=cordoned,
        min_samples=slo.min_samples,
        window=slo.window,
    )


def says_the_same(one: Policy | None, other: Policy) -> bool:
    """Equal in everything that a gateway or a runtime acts on: a mere edit of bounds changes the generation and nothing
    else."""
    return one is not None and replace(one, revision=other.revision, generation=other.generation) == other
