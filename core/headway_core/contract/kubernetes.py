"""Names of Headway in Kubernetes: group, labels, annotations, the policy's ConfigMap."""

from __future__ import annotations

GROUP = "headway.dev"
VERSION = "v1alpha1"
PLURAL = "servingslos"
LABEL_RUNTIME = "headway.dev/runtime"
"""On runtime pods: the name of their pool (the target Deployment)."""
LABEL_GATEWAY = "headway.dev/gateway"
"""On gateway pods: the name of the gateway's Service."""
ANNOTATION_PAUSED = "headway.dev/paused"
"""On a ServingSLO, "true": nothing is applied."""
ANNOTATION_OPERATOR = "headway.dev/operator"
"""On a gateway's Service: ``namespace/name`` of the lease of the one operator that manages what is behind it."""
ANNOTATION_POLICY_TOUCH = "headway.dev/policy-revision"
"""On pods: the revision last written. Changing it makes the kubelet refresh mounted ConfigMaps at once."""
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIELD_MANAGER_PREFIX = "headway/"


def policy_config_map(gateway: str) -> str:
    """The ConfigMap with the policies behind one gateway Service: a key ``<slo>.json`` for each ServingSLO."""
    return f"{gateway}-policy"
