"""The control groups of one node: made under a name of its own in every hierarchy, removed whole. Version 1 and version
2."""

from __future__ import annotations

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def unified() -> bool:
    """Version 2: one hierarchy."""
    return (ROOT / "cgroup.controllers").exists()


def create(name: str) -> None:
    """The group `name` below the root, with every controller that the kubelet needs."""
    if unified():
        (ROOT / name).mkdir(exist_ok=True)
        for folder in (ROOT, ROOT / name):
            for controller in ("cpu", "cpuset", "memory", "pids", "io", "hugetlb"):
                if controller in (folder / "cgroup.controllers").read_text().split():
                    (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        return
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for setting in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # a cpuset group starts empty and takes no process until both are set
            if (hierarchy / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())


def remove(name: str, patience: float = 10.0) -> None:
    """Removes the group and all below it. Raises TimeoutError when a process stays in one of them."""
    deadline = time.monotonic() + patience
    while left := [path for path in _groups(name) if not _removed(path)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"control groups are still in use: {', '.join(map(str, left[:5]))}")
        time.sleep(0.1)


def _hierarchies() -> list[Path]:
    return (
        [ROOT]
        if unified()
        else [path for path in ROOT.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink()]
    )


def _groups(name: str) -> list[Path]:
    return [Path(folder) for hierarchy in _hierarchies() for folder, _, _ in os.walk(hierarchy / name, topdown=False)]


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
