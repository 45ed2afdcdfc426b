"""Watches the policy file, or the mounted directory of policy files: reads it every half second and reports changes.

Only reads files: `headway_core.policy_store` decides which document is in force, `server.replica` applies it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from headway_core.contract.policy import Knobs, Policy
from headway_core.contract.reports import Acknowledgement, EngineLimits
from headway_core.policy_store import PolicyStore

READ_INTERVAL = 0.5
MAX_FILE_BYTES = 1 << 20

log = logging.getLogger("headway.policy")


def read_documents(path: Path) -> dict[str, bytes]:
    """Document name → content: of the file itself, or of each ``*.json`` in the directory; not of unreadable files.

    A mounted ConfigMap is a directory of symbolic links beside a ``..data`` of its own: names with a leading dot are
    not documents.
    """
    try:
        files = (
            sorted(file for file in path.glob("*.json") if not file.name.startswith(".")) if path.is_dir() else [path]
        )
    except OSError:
        return {}
    documents = {}
    for file in files:
        if not file.is_file():
            continue  # Opening a pipe would wait for ever, and no policy would be read again.
        try:
            with file.open("rb") as opened:
                documents[file.name] = opened.read(MAX_FILE_BYTES + 1)
        except OSError:
            continue
    return documents


class PolicyWatcher:
    """The policy of one pool. `on_change` is called on the event loop whenever another policy comes into force."""

    def __init__(self, path: Path, pool: str, on_change: Callable[[Policy], None]) -> None:
        self._path = path
        self._pool = pool
        self._on_change = on_change
        self._store = PolicyStore()
        self._last_errors: dict[str, str] = {}

    @property
    def policy(self) -> Policy | None:
        """The policy in force; None before the first good read."""
        return self._store.policies.get(self._pool)

    @property
    def age(self) -> float | None:
        """Seconds since a good document for the pool was last read."""
        return self._store.age(self._pool, time.monotonic())

    def read_once(self) -> None:
        """Reads the files now, in this thread."""
        self._update(read_documents(self._path))

    async def watch(self) -> None:
        """Reads for ever. Files are read in a thread, so that a slow mount does not delay tokens."""
        while True:
            await asyncio.sleep(READ_INTERVAL)
            self._update(await asyncio.to_thread(read_documents, self._path))

    def acknowledgement(self, effective: Knobs, clamped_by: dict[str, str]) -> Acknowledgement | None:
        """The acknowledgement for the load report; None before the first policy."""
        return self._store.acknowledgement(self._pool, effective, clamped_by, time.monotonic())

    def _update(self, documents: dict[str, bytes]) -> None:
        changed = self._store.offer(documents, time.monotonic())
        if self._store.errors != self._last_errors:
            for name, reason in self._store.errors.items():
                log.warning("policy %s is not used: %s; the last good one stays in force", name, reason)
            self._last_errors = dict(self._store.errors)
        for policy in changed:
            if policy.pool.name == self._pool:
                log.info("policy revision %d of pool %s is in force", policy.revision, self._pool)
                self._on_change(policy)


def clamp(knobs: Knobs, limits: EngineLimits) -> tuple[Knobs, dict[str, str]]:
    """The knobs that a replica with these limits can have, and for each that was lowered the reason.

    The limits at start are the upper bound: memory and buffers were allocated for them.
    """
    clamped: dict[str, str] = {}

    def bounded(name: str, wanted: int | None, most: int) -> int:
        if wanted is not None and wanted > most:
            clamped[name] = f"start-up capacity {most}"
        return most if wanted is None else min(wanted, most)

    effective = Knobs(
        max_num_seqs=bounded("maxNumSeqs", knobs.max_num_seqs, limits.max_num_seqs),
        prefill_token_budget=bounded("prefillTokenBudget", knobs.prefill_token_budget, limits.prefill_token_budget),
    )
    return effective, clamped
