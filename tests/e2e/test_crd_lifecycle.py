"""The CRD across upgrade, uninstall and reinstall: what users wrote survives, and a newer field is kept once the schema
is upgraded."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.client import Client
from cluster.errors import CommandFailed
from rendering import CHART

pytestmark = pytest.mark.cluster

CRD = CHART / "crds" / "servingslos.headway.dev.yaml"
NAME = "servingslos.headway.dev"
UPGRADE = ("apply", "--server-side", "--force-conflicts", "-f", "-")


@pytest.fixture
def older_chart(tmp_path: Path) -> Path:
    """The chart as it would have been before `spec.evaluation` was added."""
    chart = tmp_path / "headway"
    chart.mkdir()
    for part in CHART.iterdir():
        if part.name != "crds":
            (chart / part.name).symlink_to(part)
    crd = yaml.safe_load(CRD.read_text())
    del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["evaluation"]
    (chart / "crds").mkdir()
    (chart / "crds" / CRD.name).write_text(yaml.safe_dump(crd))
    return chart


@pytest.fixture
def no_crd(control_plane: Client) -> Iterator[None]:
    """Starts without the CRD and ends with the current one, as other tests expect it."""
    control_plane.kubectl("delete", "crd", NAME, "--ignore-not-found", "--timeout=60s")
    yield
    control_plane.kubectl(*UPGRADE, stdin=CRD.read_text())


def test_slos_survive_upgrade_uninstall_and_reinstall(
    control_plane: Client, namespace: str, older_chart: Path, no_crd: None
):
    where = ("--namespace", namespace)
    control_plane.helm("install", "rel", str(older_chart), *where)
    control_plane.kubectl("wait", "--for", "condition=established", f"crd/{NAME}")
    for name in ("one", "two"):
        control_plane.wait_for(
            lambda name=name: bool(control_plane.kubectl("apply", "-f", "-", stdin=slo(namespace, name))),
            f"{name} is taken",
        )
    before = uids(control_plane, namespace)
    with pytest.raises(CommandFailed, match="evaluation"):
        control_plane.kubectl("apply", "--validate=strict", "-f", "-", stdin=slo(namespace, "one", window="2m"))

    control_plane.helm("upgrade", "rel", str(CHART), *where)
    # The command of NOTES and docs/kubernetes.md; Helm itself never touches a CRD that is there.
    shown = control_plane.helm("show", "crds", str(CHART))
    control_plane.kubectl(*UPGRADE, stdin=shown)
    control_plane.wait_for(
        lambda: bool(
            control_plane.kubectl("apply", "--validate=strict", "-f", "-", stdin=slo(namespace, "one", window="2m"))
        ),
        "the new field is taken",
    )
    assert control_plane.get("servingslo/one", namespace=namespace)["spec"]["evaluation"]["window"] == "2m"
    assert uids(control_plane, namespace) == before

    control_plane.helm("uninstall", "rel", *where)
    assert uids(control_plane, namespace) == before
    control_plane.helm("install", "again", str(CHART), *where)
    assert uids(control_plane, namespace) == before
    control_plane.kubectl("delete", "servingslos", "--all", "-n", namespace, "--timeout=20s")


def test_notes_name_the_command_that_upgrades_the_schema(control_plane: Client, namespace: str):
    notes = control_plane.helm("install", "rel", str(CHART), "--namespace", namespace, "--dry-run=client")
    assert f"helm show crds <chart> | kubectl {' '.join(UPGRADE)}" in notes


def slo(namespace: str, name: str, window: str | None = None) -> str:
    spec = {
        "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-runtime"},
        "gatewayRef": {"name": "rel-headway-gateway"},
        "objectives": {"ttft": {"target": "1s"}},
        **({"evaluation": {"window": window}} if window else {}),
    }
    return json.dumps(
        {
            "apiVersion": "headway.dev/v1alpha1",
            "kind": "ServingSLO",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
    )


def uids(cluster: Client, namespace: str) -> dict[str, str]:
    return {
        each["metadata"]["name"]: each["metadata"]["uid"]
        for each in cluster.get("servingslos", namespace=namespace)["items"]
    }
