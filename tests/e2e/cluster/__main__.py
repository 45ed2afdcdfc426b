"""`python -m cluster build | up | down | status | check`: a cluster for people, with progress, from the same code that
the tests use."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from cluster import binaries
from cluster.control_plane import ControlPlane
from cluster.errors import ClusterError
from cluster.full_cluster import FullCluster


def main() -> int:
    """Exit status: 0, or 1 after one line on what is missing or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description="A real Kubernetes on this machine, for tests and for trying things out."
    )
    parser.add_argument("action", choices=["build", "up", "down", "status", "check"])
    parser.add_argument(
        "--mode", choices=["control-plane", "full"], default="full", help="full (default): with nodes, needs root"
    )
    parser.add_argument("--nodes", type=int, choices=[1, 2], default=1, help="for --mode full (default 1)")
    parser.add_argument("--name", default="default", help="several clusters live side by side under different names")
    options = parser.parse_args()
    try:
        _ACTIONS[options.action](options)
    except ClusterError as error:
        print(f"cannot go on: {error}", file=sys.stderr)
        return 1
    return 0


def _build(options: argparse.Namespace) -> None:
    say = _progress()
    binaries.build(binaries.FULL if options.mode == "full" else binaries.CONTROL_PLANE, say)
    say(f"programs are in {binaries.BIN}")


def _up(options: argparse.Namespace) -> None:
    say = _progress()
    _build(options)
    folder = binaries.CACHE / "run" / options.name
    if (running := FullCluster(folder).running()) != []:
        raise ClusterError(
            f"a cluster named {options.name!r} already runs ({', '.join(running)}): `make cluster-down` first, "
            "or choose another name"
        )
    cluster = FullCluster(folder, nodes=options.nodes) if options.mode == "full" else ControlPlane(folder)
    cluster.up(say)
    say("ready")
    print(f"\nexport KUBECONFIG={cluster.kubeconfig} PATH={binaries.BIN}:$PATH\nkubectl get namespaces")


def _down(options: argparse.Namespace) -> None:
    say = _progress()
    FullCluster(binaries.CACHE / "run" / options.name).down()
    say("nothing is left running")


def _check(options: argparse.Namespace) -> None:
    """Whether a cluster can run here, by starting one: kernels and sandboxes forbid things that no list foresees."""
    say = _progress()
    folder = binaries.CACHE / "run" / f"check-{os.getpid()}"
    cluster = (
        FullCluster(folder, nodes=options.nodes, bound=True)
        if options.mode == "full"
        else ControlPlane(folder, bound=True)
    )
    try:
        cluster.up(say)
    finally:
        cluster.down()
    say("a cluster runs on this machine")


def _status(_: argparse.Namespace) -> None:
    absent = binaries.missing(binaries.FULL)
    print(f"programs in {binaries.BIN}: " + (f"missing {', '.join(absent)}" if absent else "all there"))
    print("full mode: " + ("; ".join(FullCluster.lacking()) or "this machine has what it needs"))
    for folder in sorted((binaries.CACHE / "run").glob("*/")):
        print(f"{folder.name}: {', '.join(FullCluster(folder).running()) or 'not running'}")


def _progress() -> Callable[[str], None]:
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)


_ACTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "build": _build,
    "up": _up,
    "down": _down,
    "status": _status,
    "check": _check,
}

if __name__ == "__main__":
    sys.exit(main())
