"""The policies in force, re-read when their files change. Which document is in force, `headway_core.policy_store`
decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from headway_core.contract.policy import Policy
from headway_core.policy_store import PolicyStore

from headway_edge.watched_files import read_files

READ_SECONDS = 0.5
MAX_FILE_BYTES = 1 << 20
"""A longer document is cut, and so refused as no JSON."""

log = logging.getLogger("headway.policy")


class PolicyWatcher:
    """Reads the policy files; `changed` gets each policy that comes into force, on the event loop.

    With `pool`, only that pool's. `clock` gives the times that `store` counts from.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float], changed: Callable[[Policy], None], pool: str | None = None
    ) -> None:
        self.store = PolicyStore()
        self._path = path
        self._clock = clock
        self._changed = changed
        self._pool = pool
        self._last_error: str | None = None

    def read(self) -> None:
        """Reads the files once, in this thread. A policy that cannot be read leaves the last good one in force; it is
        logged once."""
        self._update(self._read())

    async def run(self) -> None:
        """Reads every `READ_SECONDS` until cancelled, in a thread: a slow mount does not delay requests."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            self._update(await asyncio.to_thread(self._read))

    def _read(self) -> dict[str, bytes] | OSError:
        try:
            return read_files(self._path, ".json", MAX_FILE_BYTES)
        except OSError as error:
            return error

    def _update(self, found: dict[str, bytes] | OSError) -> None:
        if isinstance(found, OSError):
            self._log_error(f"cannot read the policy: {found}")
            return
        for policy in self.store.offer(found, self._clock()):
            if self._pool in (None, policy.pool.name):
                log.info("policy for pool %s, revision %d, is in force", policy.pool.name, policy.revision)
                self._changed(policy)
        self._log_error("; ".join(f"policy {name}: {reason}" for name, reason in self.store.errors.items()) or None)

    def _log_error(self, error: str | None) -> None:
        if error is not None and error != self._last_error:
            log.warning("%s; the last good one stays in force", error)
        self._last_error = error
