"""An API server that is away, slow to tell, or contended: nothing is lost, nothing flaps, nobody spins."""

import threading
import time
import urllib.request

import pytest
from kubernetes import client

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_the_api_server_is_stopped_for_a_minute(world):
    world.build(replicas=2)
    world.rate = 8.0  # two replicas carry 9.7
    world.slo(bounds={"replicas": {"min": 1, "max": 4}})
    operator = world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    world.wait_condition("SLOMet", "True", "Kept")
    time.sleep(5)
    before = {known["type"]: known["lastTransitionTime"] for known in world.status()["conditions"]}
    knobs, scale = world.policy().knobs, world.scale()
    used = [operator.cpu()]
    world.outage(60, meanwhile=lambda: used.append(operator.cpu()))
    burned = used[1] - used[0]
    assert operator.process.poll() is None, operator.text[-2000:]
    assert burned < 20, f"{burned:.1f} CPU seconds in a minute without an API server"
    mark = world.plane.audit.mark()
    world.wait(lambda: operator.leads, "it leads again", patience=60)
    time.sleep(10)
    assert {known["type"]: known["lastTransitionTime"] for known in world.status()["conditions"]} == before, (
        "nothing flapped"
    )
    assert (world.policy().knobs, world.scale()) == (knobs, scale)
    assert ("patch", "configmaps") not in world.writes(mark)
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    world.wait(lambda: world.policy().generation == 2, "and goes on", patience=60)
    world.wait_for_controllers()


@pytest.mark.full
def test_a_watch_that_expired_is_begun_again(world):
    """History is compacted while the API server is away, so every watch resumes with 410 Gone; what changed meanwhile
    is found."""
    world.build(replicas=1)
    world.rate = 5.0
    world.slo()
    operator = world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged")
    for number in range(30):
        world.core.patch_namespaced_config_map(
            "headway-gateway-policy", world.namespace, {"metadata": {"annotations": {"n": str(number)}}}
        )
    latest = world.core.read_namespaced_config_map("headway-gateway-policy", world.namespace).metadata.resource_version
    url = (world.plane.folder / "etcd.url").read_text()
    request = urllib.request.Request(
        f"{url}/v3/kv/compaction", data=f'{{"revision": "{latest}", "physical": true}}'.encode()
    )
    codes = []

    def compact():
        with urllib.request.urlopen(request, timeout=10) as answer:
            codes.append(answer.status)

    world.outage(1, meanwhile=compact)
    assert codes == [200]
    world.wait(lambda: operator.leads, "it leads again", patience=60)
    world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
    world.wait(lambda: world.policy().generation == 2, "the edit is seen", patience=60)
    world.wait_for_controllers()


def test_a_storm_of_conflicts(world):
    """Somebody writes the policy ConfigMap and the Deployment without end: each change arrives all the same, and
    once."""
    world.build(replicas=1)
    world.rate = 20.0
    world.slo(bounds={"replicas": {"min": 1, "max": 8}})
    world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged", patience=60)
    stop = threading.Event()
    written = [0]

    def storm():
        core, apps = client.CoreV1Api(world.api), client.AppsV1Api(world.api)
        while not stop.is_set():
            written[0] += 1
            body = {"metadata": {"annotations": {"storm": str(written[0])}}}
            core.patch_namespaced_config_map("headway-gateway-policy", world.namespace, body)
            apps.patch_namespaced_deployment("chat-runtime", world.namespace, body)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        mark = world.plane.audit.mark()
        world.edit({"spec": {"objectives": {"tpot": {"target": "30ms"}}}})
        world.wait(lambda: world.policy().generation == 2, "knobs arrive", patience=60)
        world.wait(lambda: world.scale() >= 5, "replicas arrive", patience=60)
    finally:
        stop.set()
        thread.join()
    assert written[0] > 50
    refused = [entry for entry in world.plane.audit.entries(since=mark, user=world.user) if entry.code == 409]
    tried = world.plane.audit.entries(since=mark, user=world.user, verb={"patch"}, resource="configmaps")
    assert len(tried) <= 40, f"{len(tried)} tries, {len(refused)} of them refused"
    revisions = [entry.body["data"]["chat.json"] for entry in tried if entry.code < 300]
    assert len(revisions) == len(set(revisions))


def test_deleting_never_hangs_and_leaves_everything_where_it_is(world):
    world.build(replicas=2)
    world.rate = 20.0
    world.slo(bounds={"replicas": {"min": 1, "max": 4}})
    operator = world.operator()
    world.wait_condition("KnobsApplied", "True", "Acknowledged", patience=60)
    world.wait(lambda: world.scale() == 4, "replicas", patience=60)
    assert "finalizers" not in world.get()["metadata"]
    policy = world.policy()
    world.plane.kubectl("delete", "sslo/chat", "-n", world.namespace, "--timeout=5s")
    time.sleep(3)
    assert (world.policy(), world.scale()) == (policy, 4)
    metrics = operator.metrics()
    assert 'headway_slo_condition{condition="Ready",name="chat"' not in metrics
    world.slo()
    world.wait(lambda: world.policy().revision > policy.revision, "the name is used again, and its revision goes on")
    operator.stop()
    world.plane.kubectl("delete", "sslo/chat", "-n", world.namespace, "--timeout=5s")
    world.slo()
    world.plane.kubectl("delete", "sslo", "--all", "-n", world.namespace, "--timeout=5s")


def test_deleting_in_the_middle_of_a_slow_reconciliation_harms_nobody(world):
    """Pods take more than a second to report, so a reconciliation is always under way: the object goes at once, and the
    next of its name is new."""
    world.build()
    world.rate, world.delay = 5.0, 1.2
    operator = world.operator()
    for _ in range(2):
        made = world.slo()
        world.wait_condition("KnobsApplied", "True", "Acknowledged")
        assert world.policy().slo_uid == made["metadata"]["uid"]
        world.plane.kubectl("delete", "sslo/chat", "-n", world.namespace, "--timeout=5s")
    policy = world.policy()
    time.sleep(3)
    assert (world.policy(), world.scale()) == (policy, 1)
    assert "Traceback" not in operator.text


def test_deleting_in_the_middle_of_a_scale_down_lifts_the_cordon(world):
    world.build(replicas=3)
    world.rate = 1.0
    world.slo(bounds={"replicas": {"min": 1, "max": 4}})
    world.operator()
    world.wait(lambda: len(world.pods()) == 3, "three pods")
    world.running.update(dict.fromkeys(world.pods(), 2))
    world.wait(lambda: world.policy() and world.policy().cordoned, "cordoned, and busy", patience=60)
    knobs = world.policy().knobs
    world.delete()
    world.wait(lambda: not world.policy().cordoned, "everybody gets requests again")
    assert (world.policy().knobs, world.scale()) == (knobs, 3)


def test_finalizers_of_others_are_theirs(world):
    """Somebody adds and removes a finalizer while the operator works on the object: it never comes back."""
    world.build(replicas=1)
    world.rate = 5.0
    world.slo()
    world.operator()
    world.wait_condition("Ready", "True", "Enforcing")
    for number in range(60):
        world.edit({"metadata": {"finalizers": ["x.example/f"]}})
        world.edit({"spec": {"objectives": {"tpot": {"target": f"{30 + number % 5}ms"}}}})
        world.edit({"metadata": {"finalizers": None}})
        assert "finalizers" not in world.get()["metadata"]
    time.sleep(2)
    assert "finalizers" not in world.get()["metadata"]


@pytest.mark.full
def test_killed_at_any_moment_it_ends_where_it_would_have(world):
    """Four times SIGKILL in the middle of edits and load: knobs, scale and number of ReplicaSets are those of an
    undisturbed run."""
    world.build(replicas=1)
    world.rate = 15.0
    world.slo(bounds={"replicas": {"min": 1, "max": 8}})
    scales = []
    for number in range(4):
        operator = world.operator(
            "--lease-name", f"number-{number}"
        )  # a lease of its own: what is tested is not the wait for it
        world.edit({"spec": {"objectives": {"tpot": {"target": f"{35 + number}ms"}}}})
        time.sleep(2.0 + 0.7 * number)
        operator.stop(9)
        scales.append(world.scale())
    assert scales == sorted(scales), "under load nobody is lost by a restart"
    world.edit({"spec": {"objectives": {"tpot": {"target": "50ms"}}}})
    world.operator("--lease-name", "last")
    world.wait(lambda: (world.status().get("applied") or {}).get("maxNumSeqs") == 24, "the knobs of 50ms", patience=60)
    world.wait(lambda: world.scale() == 4, "15 requests a second at 4.8 each", patience=60)
    assert len(world.apps.list_namespaced_replica_set(world.namespace, label_selector="headway.dev/runtime").items) == 1
    assert world.status()["applied"]["policyRevision"] == world.policy().revision
