"""The pytest fixtures on top of the harness; `README.md` tells what tests may use. Loaded for every folder through `tests/conftest.py`."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from cluster import binaries
from cluster.client import Client
from cluster.control_plane import ControlPlane
from cluster.errors import CannotRun
from cluster.full_cluster import FullCluster

_RUN = binaries.CACHE / "run"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """etcd, API server and controller manager of this run alone, or the cluster that KUBECONFIG names."""
    if given := _given(tmp_path_factory):
        yield given
        return
    _sweep()
    plane = ControlPlane(_RUN / f"tests-{os.getpid()}-plane", bound=True)
    try:
        plane.up(_quiet)
    except CannotRun as error:
        _cannot(error)
    yield plane
    plane.down()


@pytest.fixture(scope="session")
def full_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A control plane and a node with real pods for this run alone, or the cluster that KUBECONFIG names."""
    if given := _given(tmp_path_factory):
        yield given
        return
    _sweep()
    cluster = FullCluster(_RUN / f"tests-{os.getpid()}-full", bound=True)
    try:
        cluster.up(_quiet)
    except CannotRun as error:
        _cannot(error)
    yield cluster
    cluster.down()


@pytest.fixture
def namespace(control_plane: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace in the control plane."""
    yield from _namespace(control_plane, request.node.name)


@pytest.fixture
def cluster_namespace(full_cluster: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace in the full cluster."""
    yield from _namespace(full_cluster, request.node.name)


def _namespace(cluster: Client, test: str) -> Iterator[str]:
    words = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower()).strip("-")[:40].strip("-")
    name = f"{words or 'test'}-{uuid.uuid4().hex[:5]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def _given(tmp_path_factory: pytest.TempPathFactory) -> Client | None:
    kubeconfig = os.environ.get("KUBECONFIG")
    if not kubeconfig:
        return None
    try:
        binaries.require(["kubectl", "helm"])
    except CannotRun as error:
        _cannot(error)
    return Client(Path(kubeconfig), tmp_path_factory.mktemp("home"))


def _sweep() -> None:
    """Removes what test runs left that were killed: their programs died with them, folders and control groups did not."""
    for folder in _RUN.glob("tests-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            FullCluster(folder).down()


def _cannot(error: CannotRun) -> NoReturn:
    if os.environ.get("HEADWAY_E2E_STRICT"):
        pytest.fail(str(error))
    pytest.skip(str(error))


def _quiet(text: str) -> None:
    del text
