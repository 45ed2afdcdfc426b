"""The policy that one ServingSLO makes with the knobs and the cordon decided for it. Pure."""

from __future__ import annotations

from dataclasses import replace

from headway_core.contract.policy import MAX_REVISION, Endpoint, Knobs, Policy, Pool
from headway_core.slo import ServingSLO


def policy_document(
    slo: ServingSLO, endpoints: tuple[Endpoint, ...], knobs: Knobs, cordoned: tuple[str, ...] = (), *, revision: int
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


def next_revision(*known: int) -> int:
    """One above all of these, so that every reader takes the policy; at most `MAX_REVISION`."""
    return min(max(known) + 1, MAX_REVISION)


def outvoted(revision: int, highest: int) -> bool:
    """Whether readers keep `highest`, since only a higher revision replaces it, and a higher one is possible."""
    return revision < min(highest, MAX_REVISION)


def says_the_same(one: Policy | None, other: Policy) -> bool:
    """Equal in all that a gateway or a runtime acts on: an edit of bounds changes the generation and nothing else."""
    return one is not None and replace(one, revision=other.revision, generation=other.generation) == other
