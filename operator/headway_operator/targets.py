"""Finds everything that a ServingSLO points at, or says what is missing and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_core.contract.kubernetes import LABEL_RUNTIME, policy_config_map
from headway_core.contract.policy import Endpoint
from headway_core.errors import SpecError
from headway_core.planning.conditions import Condition
from headway_core.slo import ServingSLO
from headway_core.slo_parser import parse_slo

from headway_operator.access import Access
from headway_operator.cache import Cache
from headway_operator.resources import Deployment, Pod, Service


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """Everything that one accepted ServingSLO points at."""

    slo: ServingSLO
    deployment: Deployment
    service: Service
    gateway: str
    runtimes: tuple[Pod, ...]
    gateways: tuple[Pod, ...]

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap that carries its policy."""
        return policy_config_map(self.gateway)

    @property
    def endpoint(self) -> Endpoint:
        """Where its replicas are reached: the headless Service in front of all of them."""
        slo = self.slo
        return Endpoint(f"{slo.service_name}.{slo.namespace}.svc", slo.service_port, self.service.control_port)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The outcome: `target` when both conditions hold, `slo` as soon as the spec could be read."""

    accepted: Condition
    resolved: Condition
    slo: ServingSLO | None = None
    target: ResolvedTarget | None = None


def other_operator(document: Mapping[str, Any], cache: Cache, own: str) -> str | None:
    """The operator that the object's gateway names, unless `own`: two releases in a namespace each serve their own."""
    reference = (document.get("spec") or {}).get("gatewayRef")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    gateway = cache.services.get(document["metadata"].get("namespace", ""), str(name))
    return gateway.operator if gateway is not None and gateway.operator not in ("", own) else None


def resolve(document: Mapping[str, Any], cache: Cache, access: Access) -> Resolution:
    """Validates the object and finds its target, Service, gateway and pods among what the watches have shown."""
    unresolved = Condition(
        "TargetResolved", None, "NotAccepted", "the object is not accepted, so its target was not looked for"
    )
    try:
        slo = parse_slo(document)
    except SpecError as error:
        return Resolution(
            Condition("Accepted", False, "InvalidSpec", f"{error}; the last good settings stay"), unresolved
        )
    owner = cache.owner(slo.namespace, slo.target_name)
    if owner not in (None, slo.name):
        message = (
            f"Deployment {slo.target_name} belongs to the older ServingSLO {owner}: delete one of the "
            "two, or point this one elsewhere"
        )
        return Resolution(Condition("Accepted", False, "TargetOwned", message), unresolved, slo)
    accepted = Condition("Accepted", True, "Accepted", "the spec is valid and the target is its own")
    found = _find(slo, cache, access)
    if isinstance(found, ResolvedTarget):
        where = f"Deployment {slo.target_name}, Service {slo.service_name} and gateway {found.gateway} are there"
        return Resolution(accepted, Condition("TargetResolved", True, "Resolved", where), slo, found)
    reason, message = found
    return Resolution(accepted, Condition("TargetResolved", False, reason, message), slo)


def _find(slo: ServingSLO, cache: Cache, access: Access) -> ResolvedTarget | tuple[str, str]:
    if lacking := access.lacks(slo.namespace, "TargetResolved"):
        return (
            "Forbidden",
            f"the operator's account may not {', '.join(map(str, lacking))} in namespace {slo.namespace}: grant it",
        )
    deployment = cache.deployments.get(slo.namespace, slo.target_name)
    if deployment is None:
        return (
            "DeploymentNotFound",
            f"there is no Deployment {slo.target_name} in namespace {slo.namespace}: create it; it is found by itself",
        )
    service = cache.services.get(slo.namespace, slo.service_name)
    if service is None:
        return (
            "ServiceNotFound",
            f"there is no Service {slo.service_name}: create a headless one before the target, or name it in "
            "spec.serviceRef",
        )
    if not service.selects(deployment.labels):
        return (
            "ServiceSelectsOthers",
            f"the pods of {slo.target_name} lack the labels that Service {slo.service_name} selects: "
            f"{dict(service.selector) or 'none'}",
        )
    if LABEL_RUNTIME not in deployment.labels:
        return (
            "NotARuntime",
            f"the pod template of {slo.target_name} lacks the label {LABEL_RUNTIME}: {slo.target_name}; the "
            "chart sets it",
        )
    if slo.gateway_name is None:
        return (
            "GatewayNotSet",
            "spec.gatewayRef is not set: promises are measured, and policies delivered, through a gateway",
        )
    gateway = cache.services.get(slo.namespace, slo.gateway_name)
    if gateway is None:
        return (
            "GatewayNotFound",
            f"there is no Service {slo.gateway_name}: install the gateway, or correct spec.gatewayRef",
        )
    runtimes, gateways = tuple(cache.pods_behind(service)), tuple(cache.pods_behind(gateway))
    return ResolvedTarget(slo, deployment, service, slo.gateway_name, runtimes, gateways)
