"""Kubernetes objects, as little of each as the operator needs. Pure; a field that a document lacks has a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_core.contract.http import CONTROL_PORT
from headway_core.contract.kubernetes import (
    ANNOTATION_DELETION_COST,
    ANNOTATION_OPERATOR,
    ANNOTATION_POLICY_TOUCH,
    LABEL_GATEWAY,
    LABEL_RUNTIME,
)
from headway_core.planning.snapshot import Phase

DELETION_COST = "-1000"
"""Of a replica to be given up: any other has 0."""

_HOPELESS = (
    *("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
"""Waiting reasons of a container that will not start by waiting."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A gateway's or a runtime's pod."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    ip: str
    """Empty before it has one."""
    control_port: int
    phase: Phase
    note: str = ""
    touched: str = ""
    """Value of the policy annotation."""
    marked: bool = False
    """Carries the deletion cost that the operator sets, no other."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The target."""

    namespace: str
    name: str
    replicas: int
    rolling: bool
    """Old and new pods side by side, or a spec that the controller has not seen yet."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of its pod template."""


@dataclass(frozen=True, slots=True)
class Service:
    """A Service by what it selects."""

    namespace: str
    name: str
    selector: Mapping[str, str]
    control_port: int = CONTROL_PORT
    operator: str = ""
    """Who manages what is behind it, when it is a gateway's; empty: whoever finds it."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels is behind it; a Service without selector has none."""
        return bool(self.selector) and all(labels.get(key) == value for key, value in self.selector.items())


def pod_of(document: Mapping[str, Any]) -> Pod | None:
    """None for pods of others, and for those that have ended: nothing counts them, Kubernetes neither."""
    metadata, status = document["metadata"], document.get("status") or {}
    labels = metadata.get("labels") or {}
    if LABEL_RUNTIME not in labels and LABEL_GATEWAY not in labels:
        return None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    phase, note = _phase(metadata, status)
    annotations = metadata.get("annotations") or {}
    return Pod(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        labels=dict(labels),
        ip=status.get("podIP", ""),
        control_port=_control_port(document.get("spec") or {}),
        phase=phase,
        note=note,
        touched=annotations.get(ANNOTATION_POLICY_TOUCH, ""),
        marked=annotations.get(ANNOTATION_DELETION_COST) == DELETION_COST,
    )


def _phase(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[Phase, str]:
    if metadata.get("deletionTimestamp"):
        return Phase.LEAVING, ""
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    if conditions.get("Ready", {}).get("status") == "True":
        return Phase.READY, ""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        reason = ((container.get("state") or {}).get("waiting") or {}).get("reason", "")
        if reason in _HOPELESS:
            return Phase.FAILED, reason
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Phase.FAILED, "Unschedulable"
    return Phase.STARTING, ""


def _control_port(spec: Mapping[str, Any]) -> int:
    ports = [port for container in spec.get("containers") or () for port in container.get("ports") or ()]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "control"), CONTROL_PORT)


def deployment_of(document: Mapping[str, Any]) -> Deployment:
    """A Deployment."""
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    updated, present = status.get("updatedReplicas", 0), status.get("replicas", 0)
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return Deployment(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        replicas=spec.get("replicas", 1),
        rolling=seen and present > updated,
        labels=dict(((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}),
    )


def service_of(document: Mapping[str, Any]) -> Service:
    """A Service."""
    metadata, spec = document["metadata"], document.get("spec") or {}
    ports = {port.get("name"): port.get("port") for port in spec.get("ports") or ()}
    return Service(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        selector=dict(spec.get("selector") or {}),
        control_port=int(ports.get("control") or CONTROL_PORT),
        operator=(metadata.get("annotations") or {}).get(ANNOTATION_OPERATOR, ""),
    )
