"""The policies that a gateway or a runtime obeys: last good ones, by pool, whatever the files say now.

Reading files is the caller's; here it is decided which document wins. A policy is taken only when its revision is
higher than that of the pool's policy in force; a missing or broken document changes nothing and is remembered as an
error.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway_core.contract.documents import load_policy
from headway_core.contract.policy import Knobs, Policy
from headway_core.contract.reports import Acknowledgement
from headway_core.errors import DocumentError


class PolicyStore:
    """Policies by pool name. `offer` it the documents after each read."""

    def __init__(self) -> None:
        self.policies: dict[str, Policy] = {}
        self.errors: dict[str, str] = {}
        """Document name → why it was refused at the last read."""
        self._good_at: dict[str, float] = {}

    def offer(self, documents: Mapping[str, str | bytes], now: float) -> tuple[Policy, ...]:
        """Takes what one read found (document name → content) and returns the policies that came into force by it.

        The highest revision for a pool wins. One older than that in force is passed over: a delayed file is no fault.
        """
        self.errors = {}
        changed: dict[str, Policy] = {}
        for name, text in sorted(documents.items()):
            try:
                policy = load_policy(text)
            except DocumentError as error:
                self.errors[name] = str(error)
                continue
            pool = policy.pool.name
            known = self.policies.get(pool)
            self._good_at[pool] = now
            if known is None or policy.revision > known.revision:
                self.policies[pool] = changed[pool] = policy
        return tuple(changed.values())

    def age(self, pool: str, now: float) -> float | None:
        """Seconds since a good document for this pool was last read; None when there never was one."""
        read_at = self._good_at.get(pool)
        return None if read_at is None else now - read_at

    def acknowledgement(
        self, pool: str, effective: Knobs, clamped_by: Mapping[str, str], now: float
    ) -> Acknowledgement | None:
        """What to publish for this pool; None when no policy was ever read, which is not the same as revision 0."""
        policy = self.policies.get(pool)
        if policy is None:
            return None
        return Acknowledgement(
            revision=policy.revision,
            slo_uid=policy.slo_uid,
            effective=effective,
            clamped_by=dict(clamped_by),
            age=max(0.0, now - self._good_at[pool]),
            error="; ".join(f"{name}: {reason}" for name, reason in self.errors.items()) or None,
        )
