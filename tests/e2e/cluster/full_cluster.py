"""A control plane with one or two nodes: real pods on this machine. Needs root on Linux."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.control_plane import ControlPlane
from cluster.errors import CannotRun


class FullCluster(ControlPlane):
    """Nodes on top."""

    def __init__(self, folder: Path, *, nodes: int = 1, bound: bool = False) -> None:
        super().__init__(folder, bound=bound)
        self.nodes = nodes

    @staticmethod
    def lacking() -> list[str]:
        """What this machine lacks."""
        return ["nodes are not there yet"]

    def up(self, say: Callable[[str], None]) -> None:
        raise CannotRun("; ".join(self.lacking()))
