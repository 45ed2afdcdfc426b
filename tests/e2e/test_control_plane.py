"""The harness keeps what its README promises to the tests that build on it."""

import time

import pytest
from cluster.client import Client
from cluster.errors import CommandFailed

pytestmark = pytest.mark.cluster


def test_a_deployment_gets_its_pods_and_the_audit_log_says_who_made_them(control_plane: Client, namespace: str):
    audit = own_audit(control_plane)
    mark = audit.mark()
    control_plane.kubectl("create", "deployment", "chat", "--image", "none", "--replicas", "2", "-n", namespace)
    control_plane.wait_for(lambda: len(control_plane.get("pods", namespace=namespace)["items"]) == 2, "two pods")
    audit.settle()
    made = audit.count("user", since=mark, verb="create", resource="pods", namespace=namespace)
    assert made == {("system:serviceaccount:kube-system:replicaset-controller",): 2}
    (deployment,) = audit.entries(since=mark, verb="create", resource="deployments", namespace=namespace)
    assert (deployment.user, deployment.code, deployment.body["spec"]["replicas"]) == ("admin", 201, 2)


def test_an_account_may_do_nothing_that_no_role_gave_it(control_plane: Client, namespace: str):
    control_plane.kubectl("create", "serviceaccount", "nobody", "-n", namespace)
    nobody = Client(control_plane.service_account_kubeconfig(namespace, "nobody"), control_plane.kubeconfig.parent)
    with pytest.raises(CommandFailed, match="Forbidden"):
        nobody.kubectl("get", "pods", "-n", namespace)


def test_the_api_server_comes_back_where_it_was_with_what_it_had(control_plane: Client, namespace: str):
    own_audit(control_plane)
    control_plane.kubectl("create", "configmap", "kept", "-n", namespace)
    control_plane.stop_api_server(kill=True)
    with pytest.raises(CommandFailed):
        control_plane.kubectl("get", "configmap", "kept", "-n", namespace, timeout=30)
    control_plane.start_api_server()
    assert control_plane.get("configmap/kept", namespace=namespace)["metadata"]["name"] == "kept"


def test_waiting_in_vain_names_what_was_waited_for(control_plane: Client, namespace: str):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="a pod nobody makes"):
        control_plane.wait_for(
            lambda: bool(control_plane.get("pods", namespace=namespace)["items"]), "a pod nobody makes", patience=0.5
        )
    assert time.monotonic() - begin < 30


def own_audit(cluster: Client):
    if cluster.audit is None:
        pytest.skip("the cluster that KUBECONFIG names is not ours: no audit log, no outages")
    return cluster.audit
