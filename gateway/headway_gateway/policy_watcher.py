"""The policies in force, re-read when their files change, and the default policy of a pool that has none."""

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
    """The policy of a pool from the command line until a policy file names it."""
    return Policy(
        revision=1, slo_uid="", generation=0, pool=pool, classes=(DEFAULT_CLASS,), default_class=DEFAULT_CLASS.name
    )


class PolicyWatcher:
    """Reads the policy files; `changed` gets each policy that comes into force."""

    def __init__(self, path: Path, changed: Callable[[Policy], None]) -> None:
        self.store = PolicyStore()
        self._files = WatchedFiles(path, ".json")
        self._changed = changed
        self._last_error: str | None = None

    def read(self, now: float) -> None:
        """Reads the files once. A policy that cannot be read leaves the last good one in force; it is logged once."""
        try:
            found = self._files.read()
        except OSError as error:
            self._log_error(f"cannot read the policy: {error}")
            return
        for policy in self.store.offer(found, now):
            log.info("policy for pool %s, revision %d, is in force", policy.pool.name, policy.revision)
            self._changed(policy)
        self._log_error("; ".join(f"policy {name}: {reason}" for name, reason in self.store.errors.items()) or None)

    async def run(self) -> None:
        """Reads every `READ_SECONDS` until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(READ_SECONDS)
            self.read(loop.time())

    def _log_error(self, error: str | None) -> None:
        if error is not None and error != self._last_error:
            log.warning("%s; the last good one stays in force", error)
        self._last_error = error
