"""Policies as files, for gateway and runtimes on the same machine: written beside and renamed into place, so nobody reads half a one."""

from __future__ import annotations

import os
from pathlib import Path

from headway_core.contract import Policy, dump


def write_policy(folder: Path, policy: Policy) -> None:
    """Puts the policy into ``<folder>/<pool>.json`` atomically."""
    path = folder / f"{policy.pool.name}.json"
    beside = folder / f".{policy.pool.name}.new"
    beside.write_text(dump(policy))
    os.replace(beside, path)
