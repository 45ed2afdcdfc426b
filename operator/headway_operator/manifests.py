"""Every document that the operator sends, and the policies that it reads back. Pure: nothing is sent here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from headway_core.contract.documents import dump, load_policy
from headway_core.contract.kubernetes import ANNOTATION_DELETION_COST, ANNOTATION_POLICY_TOUCH, FIELD_MANAGER_PREFIX
from headway_core.contract.policy import Policy
from headway_core.errors import DocumentError
from headway_core.slo import API_VERSION, KIND, ServingSLO

from headway_operator.resources import DELETION_COST


def field_manager(slo: ServingSLO) -> str:
    """Owner of the object's key in the policy ConfigMap."""
    return f"{FIELD_MANAGER_PREFIX}{slo.name}"


def policy_key(name: str) -> str:
    """The ConfigMap key of one ServingSLO."""
    return f"{name}.json"


def policies(config_map: Mapping[str, Any]) -> dict[str, Policy]:
    """Key → policy; a key that holds none is left out, and will be written over."""
    read = {key: _policy_in(text) for key, text in (config_map.get("data") or {}).items()}
    return {key: policy for key, policy in read.items() if policy is not None}


@functools.lru_cache(maxsize=2048)
def _policy_in(text: str) -> Policy | None:
    """Remembered: a ConfigMap comes back whole each time one of a hundred keys has changed."""
    try:
        return load_policy(text)
    except DocumentError:
        return None


def policy_apply(name: str, config_map: Mapping[str, Any], document: Policy) -> dict[str, Any]:
    """Server-side apply of one key; a ConfigMap that changed since it was read answers 409."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {key: config_map["metadata"][key] for key in ("name", "namespace", "resourceVersion")},
        "data": {policy_key(name): dump(document)},
    }


def touch_patch(revision: int, attempt: int) -> dict[str, Any]:
    """Makes the kubelet refresh a pod's mounted ConfigMaps now; each attempt must differ to have that effect."""
    value = str(revision) if attempt == 1 else f"{revision}.{attempt}"
    return {"metadata": {"annotations": {ANNOTATION_POLICY_TOUCH: value}}}


def cost_patch(victim: bool) -> dict[str, Any]:
    """Marks a replica to be given up first, or takes the mark away."""
    return {"metadata": {"annotations": {ANNOTATION_DELETION_COST: DELETION_COST if victim else None}}}


def scale_patch(scale: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """`scale` is the document that was read: one that changed since answers 409."""
    return {"metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]}, "spec": {"replicas": replicas}}


def event(
    slo_document: Mapping[str, Any], *, reason: str, message: str, warning: bool, at: str, reporter: str
) -> dict[str, Any]:
    """An Event about the object. Its name follows from what it says and when, so that sending it twice makes one."""
    metadata = slo_document["metadata"]
    digest = hashlib.blake2b(f"{metadata.get('uid')}/{reason}/{message}/{at}".encode(), digest_size=8).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata.get("uid", ""),
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:1024],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": "headway-operator"},
        "reportingComponent": "headway.dev/operator",
        "reportingInstance": reporter[:128],
    }
