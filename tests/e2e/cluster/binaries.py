"""The programs of the cluster: where they are kept, and how they are built from the Go modules that `go/` pins.

Nothing is downloaded as a binary: Go fetches modules, checks them against go.sum, and builds. What Debian packages
(containerd and friends) is no business of this module.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CannotRun

CACHE = Path(os.environ.get("HEADWAY_CLUSTER_CACHE") or "~/.cache/headway-cluster").expanduser()
BIN = CACHE / "bin"
GO = Path(__file__).parent / "go"
KUBERNETES = "v1.34.4"
_VERSION = "k8s.io/component-base/version"
_LINKER = (
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=34 -X "
    f"{_VERSION}.gitTreeState=clean"
)


@dataclass(frozen=True, slots=True)
class Program:
    """One executable: its name, the folder under `go/` whose go.mod pins it, and its package."""

    name: str
    module: str
    package: str

    @property
    def path(self) -> Path:
        """Where it is, or will be."""
        return BIN / self.name

    def source(self) -> str:
        """What it would be built from now: it is stale when this differs from what stands beside the executable."""
        pins = b"".join((GO / self.module / name).read_bytes() for name in ("go.mod", "go.sum"))
        return hashlib.sha256(pins + _LINKER.encode()).hexdigest()

    def ready(self) -> bool:
        """Whether the executable is there and was built from the modules pinned now."""
        stamp = self.path.with_suffix(".source")
        return self.path.exists() and stamp.exists() and stamp.read_text() == self.source()


_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kubectl", "kube-scheduler", "kubelet", "kube-proxy")
PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "kubernetes", "go.etcd.io/etcd/server/v3"),
        *(Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}") for name in _KUBERNETES),
        Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
        Program("coredns", "coredns", "github.com/coredns/coredns"),
    )
}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
FULL = tuple(PROGRAMS)


def path(name: str) -> str:
    """The executable of that name in the cache."""
    return str(PROGRAMS[name].path)


def missing(names: Iterable[str]) -> list[str]:
    """Those that are not built, or were built from other pins."""
    return [name for name in names if not PROGRAMS[name].ready()]


def require(names: Iterable[str]) -> None:
    """Raises CannotRun when one is missing, naming the command that builds it."""
    if absent := missing(names):
        raise CannotRun(f"{', '.join(absent)} not built from the pinned modules in {BIN}: run `make cluster-build`")


def build(names: Iterable[str], say: Callable[[str], None]) -> None:
    """Builds what is missing. One build at a time on a machine; a second caller waits and then finds everything there.
    Raises CannotRun."""
    names = tuple(names)
    if not missing(names):
        return
    if shutil.which("go") is None:
        raise CannotRun(
            f"{', '.join(missing(names))} must be built and there is no `go` on PATH: install Go 1.26 or newer"
        )
    BIN.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        todo = missing(names)
        for number, name in enumerate(todo, 1):
            say(f"building {name} ({number} of {len(todo)})")
            _build(PROGRAMS[name])


def _build(program: Program) -> None:
    fresh = program.path.with_suffix(".new")
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-ldflags", _LINKER, "-o", str(fresh), program.package]
    done = subprocess.run(
        command,
        cwd=GO / program.module,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotRun(f"building {program.name} failed:\n{done.stderr[-2000:]}")
    fresh.replace(program.path)
    program.path.with_suffix(".source").write_text(program.source())
