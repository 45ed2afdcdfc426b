"""Policies as files, for gateway and runtimes on the same machine: written beside and renamed into place, so nobody reads half a one."""

from __future__ import annotations

import os
from pathlib import Path

from headway_core.contract import Policy, dump


class PolicyWriter:
    """Writes the newest of the policies it was given. A folder that cannot be written (a full disk) is tried again at each `write`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unwritten: Policy | None = None
        self._complaint = ""

    def put(self, policy: Policy) -> None:
        """What the next `write` writes."""
        self._unwritten = policy

    def write(self) -> list[str]:
        """Writes what there is to write. Returns what a person should know: that it fails, once, and that it works again."""
        if self._unwritten is None:
            return []
        try:
            write_policy(self._folder, self._unwritten)
        except OSError as error:
            known, self._complaint = self._complaint, str(error)
            return [] if known == self._complaint else [f"the policy cannot be written, the one before stays in force: {error}"]
        self._unwritten = None
        failed, self._complaint = self._complaint, ""
        return ["the policy is written again"] if failed else []


def write_policy(folder: Path, policy: Policy) -> None:
    """Puts the policy into ``<folder>/<pool>.json`` atomically."""
    path = folder / f"{policy.pool.name}.json"
    beside = folder / f".{policy.pool.name}.new"
    beside.write_text(dump(policy))
    os.replace(beside, path)
