"""What is promised, and to whom: the policies in force, and what holds where there is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from headway_core.contract.policy import Policy, Pool
from headway_core.policy_store import PolicyStore
from headway_core.slo import DEFAULT_CLASS

from headway_gateway.watched_files import READ_SECONDS, WatchedFiles

log = logging.getLogger("headway.gateway.policies")


def default_policy(pool: Pool) -> Policy:
    """What a pool of the command line obeys until a policy names it."""
    return Policy(
        revision=1, slo_uid="", generation=0, pool=pool, classes=(DEFAULT_CLASS,), default_class=DEFAULT_CLASS.name
    )


class PolicyWatcher:
    """Reads the policy files again and again; `changed` gets each policy that comes into force."""

    def __init__(self, path: Path, changed: Callable[[Policy], None]) -> None:
        self.store = PolicyStore()
        self._files = WatchedFiles(path, ".json")
        self._changed = changed
        self._complaint: str | None = None

    def read(self, now: float) -> None:
        """One look. Whatever cannot be read leaves what is in force as it is; it is said once, not every second."""
        try:
            found = self._files.read()
        except OSError as error:
            self._complain(f"cannot read the policy: {error}")
            return
        for policy in self.store.offer(found, now):
            log.info("policy for pool %s, revision %d, is in force", policy.pool.name, policy.revision)
            self._changed(policy)
        self._complain("; ".join(f"policy {name}: {reason}" for name, reason in self.store.errors.items()) or None)

    async def run(self) -> None:
        """Looks every second until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(READ_SECONDS)
            self.read(loop.time())

    def _complain(self, complaint: str | None) -> None:
        if complaint is not None and complaint != self._complaint:
            log.warning("%s; the last good one stays in force", complaint)
        self._complaint = complaint
