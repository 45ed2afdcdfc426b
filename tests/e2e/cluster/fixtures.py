"""The pytest fixtures on top of the harness; `README.md` tells what tests may use. Loaded for every folder through
`tests/conftest.py`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from cluster import binaries, evidence
from cluster.client import Client
from cluster.control_plane import ControlPlane
from cluster.errors import CannotRun
from cluster.full_cluster import FullCluster

_RUN = binaries.CACHE / "run"
_OPEN = pytest.StashKey[dict[str, Client]]()


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
    with fresh_namespace(control_plane, request) as name:
        yield name


@pytest.fixture
def cluster_namespace(full_cluster: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace in the full cluster."""
    with fresh_namespace(full_cluster, request) as name:
        yield name


@contextlib.contextmanager
def fresh_namespace(cluster: Client, request: pytest.FixtureRequest, named: str | None = None) -> Iterator[str]:
    """A namespace named after the test or module that asks for it; what is in it is gathered when a test fails
    meanwhile.

    `named`: whoever asks will create it under this name.
    """
    words = (
        re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_").removesuffix(".py"))
        .strip("-")[:40]
        .strip("-")
    )
    name = named or f"{words or 'test'}-{uuid.uuid4().hex[:5]}"
    places = request.config.stash.setdefault(_OPEN, {})
    if named is None:
        cluster.kubectl("create", "namespace", name)
    places[name] = cluster
    try:
        yield name
    finally:
        del places[name]
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Gathers evidence in the namespaces of a test that failed, and says where it is."""
    report = yield
    places = item.config.stash.get(_OPEN, {})
    if report.failed and places:
        folder = binaries.CACHE / "failures" / re.sub(r"[^A-Za-z0-9._-]+", "-", item.name)
        shutil.rmtree(folder, ignore_errors=True)
        for name, cluster in places.items():
            evidence.collect(cluster, name, folder / name)
        report.sections.append(("what the cluster looked like", str(folder)))
    return report


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
    """Removes what test runs left that were killed: their programs died with them, folders and control groups did
    not."""
    for folder in _RUN.glob("tests-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            FullCluster(folder).down()


def _cannot(error: CannotRun) -> NoReturn:
    if os.environ.get("HEADWAY_E2E_STRICT"):
        pytest.fail(str(error))
    pytest.skip(str(error))


def _quiet(text: str) -> None:
    del text
