"""Policies as files for gateway and runtimes on one machine, renamed into place: no reader sees half a file."""

from __future__ import annotations

import os
from pathlib import Path

from headway_core.contract.documents import dump
from headway_core.contract.policy import Policy


class PolicyWriter:
    """Keeps the newest of the policies it was given in its file, whatever becomes of that: a gateway that is started
    again finds no replica without it. A folder that cannot be written (a full disk) is tried again at each `write`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._policy: Policy | None = None
        self._written = False
        """The file has held it."""
        self._complaint = ""

    def put(self, policy: Policy) -> None:
        """What the file holds from the next `write` on."""
        self._policy, self._written = policy, False

    def write(self) -> list[str]:
        """Writes the policy unless it is there. Returns messages: it fails (once), works again, its file was lost."""
        if self._policy is None:
            return []
        try:
            held = _holds(self._folder, self._policy)
            if not held:
                write_policy(self._folder, self._policy)
        except OSError as error:
            known, self._complaint = self._complaint, str(error)
            return (
                []
                if known == self._complaint
                else [f"the policy cannot be written, the one before stays in force: {error}"]
            )
        lost, self._written = self._written and not held, True
        failed, self._complaint = self._complaint, ""
        if lost or failed:
            return [
                "the policy is written again" + ("" if failed else ": its file was removed or changed by somebody else")
            ]
        return []


def _path(folder: Path, policy: Policy) -> Path:
    return folder / f"{policy.pool.name}.json"


def _holds(folder: Path, policy: Policy) -> bool:
    try:
        return _path(folder, policy).read_bytes() == dump(policy).encode()
    except FileNotFoundError:
        return False


def write_policy(folder: Path, policy: Policy) -> None:
    """Puts the policy into ``<folder>/<pool>.json`` atomically; the folder need not be there."""
    path = _path(folder, policy)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{policy.pool.name}.new"
    beside.write_text(dump(policy))
    os.replace(beside, path)
