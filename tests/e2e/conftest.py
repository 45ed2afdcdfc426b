"""The product on a cluster of nodes, as these tests share it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cluster import product_images
from cluster.client import Client
from cluster.errors import CannotRun
from cluster.full_cluster import FullCluster


@pytest.fixture(scope="session")
def product_values(full_cluster: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A values file with which the chart runs on `full_cluster`: images that are there, one small replica, torch from
    this machine.

    On a cluster that KUBECONFIG names, HEADWAY_E2E_VALUES names the file.
    """
    if not isinstance(full_cluster, FullCluster):
        given = os.environ.get("HEADWAY_E2E_VALUES")
        if not given:
            pytest.skip("HEADWAY_E2E_VALUES must name a values file with images for the cluster of KUBECONFIG")
        return Path(given)
    try:
        full_cluster.load_images(product_images.archives())
    except CannotRun as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("chart") / "values.json"
    path.write_text(json.dumps(_values()))
    return path


def _values() -> dict[str, Any]:
    torch = {"name": "torch", "hostPath": {"path": str(product_images.TORCH), "type": "Directory"}}
    return {
        "image": {"tag": product_images.TAG, "pullPolicy": "Never"},
        "operator": {"resources": {"requests": {"cpu": "50m"}}},
        "gateway": {"replicas": 1, "drainSeconds": 90, "resources": {"requests": {"cpu": "50m"}}},
        "runtime": {
            "minReadySeconds": 0,  # tests that change running pods under load take the chart's own
            "drainSeconds": 90,
            "engine": {"threads": 1, "maxNumSeqs": 8, "kvCacheMemoryBytes": "256MiB"},
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
            "extraVolumes": [torch],
            "extraVolumeMounts": [{"name": "torch", "mountPath": product_images.TORCH_MOUNT, "readOnly": True}],
        },
    }
