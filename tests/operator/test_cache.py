from headway_core.planning.snapshot import Phase
from headway_operator.cache import Cache
from headway_operator.resources import Service


def slo(name="chat", version=1, generation=1, **status):
    metadata = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version), "generation": generation}
    return {"metadata": metadata, "spec": {}, "status": status}


def pod(name, version=1, labels=None, **status):
    metadata = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version)}
    metadata["labels"] = {"headway.dev/runtime": "x"} if labels is None else labels
    return {"metadata": metadata, "status": status}


def test_own_status_writes_wake_nobody():
    woken = []
    cache = Cache(woken.append)
    cache.slos.take(None, slo(version=1))
    cache.slos.take("MODIFIED", slo(version=2, replicas=3))
    cache.slos.put(slo(version=3, replicas=4))
    assert woken == [("ns", "chat")]
    assert cache.slos.get("ns", "chat")["status"] == {"replicas": 4}
    cache.slos.take("MODIFIED", slo(version=4, generation=2))
    cache.slos.take("DELETED", slo(version=5))
    assert len(woken) == 3


def test_an_event_that_comes_late_changes_nothing():
    cache = Cache(lambda key: None)
    cache.slos.put(slo(version=9, replicas=4))
    cache.slos.take("MODIFIED", slo(version=8, replicas=1))
    assert cache.slos.get("ns", "chat")["status"] == {"replicas": 4}


def test_a_list_removes_what_it_lacks_but_not_what_is_newer():
    cache = Cache(lambda key: None)
    for name, version in [("a", 5), ("b", 6), ("c", 20)]:
        cache.pods.put(pod(name, version))
    cache.pods.replace([pod("a", 5)], 10, "ns")
    assert [known.name for known in cache.pods.values()] == ["a", "c"]
    cache.pods.replace([], 30, "other")
    assert len(cache.pods.values()) == 2, "another namespace's list says nothing about this one"


def test_pods_are_read_for_what_they_are():
    cache = Cache(lambda key: None)
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1", "phase": "Running"}
    crash = {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}
    wait = {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}
    unschedulable = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
    for name, status in [("ready", ready), ("crash", crash), ("wait", wait), ("nowhere", unschedulable), ("new", {})]:
        cache.pods.put(pod(name, **status))
    cache.pods.put(pod("evicted", phase="Failed"))
    cache.pods.put(pod("theirs", labels={"app": "x"}))
    leaving = pod("leaving", **ready)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cache.pods.put(leaving)
    assert {known.name: (known.phase, known.note) for known in cache.pods.values()} == {
        "ready": (Phase.READY, ""),
        "crash": (Phase.FAILED, "CrashLoopBackOff"),
        "wait": (Phase.STARTING, ""),
        "nowhere": (Phase.FAILED, "Unschedulable"),
        "new": (Phase.STARTING, ""),
        "leaving": (Phase.LEAVING, ""),
    }
    ready = cache.pods.get("ns", "ready")
    assert (ready.ip, ready.control_port) == ("10.0.0.1", 8001)


def test_addresses_of_six_and_ports_by_name():
    cache = Cache(lambda key: None)
    document = pod("six", podIP="fd00::1")
    document["spec"] = {
        "containers": [{"ports": [{"name": "http", "containerPort": 80}, {"name": "control", "containerPort": 9001}]}]
    }
    cache.pods.put(document)
    six = cache.pods.get("ns", "six")
    assert (six.ip, six.control_port) == ("fd00::1", 9001)
    cache.pods.put(pod("none"))
    assert cache.pods.get("ns", "none").ip == ""


def test_a_pod_that_ends_leaves_the_cache():
    cache = Cache(lambda key: None)
    cache.pods.put(pod("a", 1))
    cache.pods.put(pod("a", 2, phase="Failed"))
    assert cache.pods.values() == []


def test_pods_behind_a_service_are_those_that_every_label_selects_now():
    cache = Cache(lambda key: None)
    blue, green = {"headway.dev/runtime": "x", "color": "blue"}, {"headway.dev/runtime": "x", "color": "green"}
    for name, labels in [("c", blue), ("a", blue), ("b", green)]:
        cache.pods.put(pod(name, 1, labels))
    elsewhere = pod("d", 1, blue)
    elsewhere["metadata"]["namespace"] = "other"
    cache.pods.put(elsewhere)

    def behind(**selector):
        return [known.name for known in cache.pods_behind(Service("ns", "s", {"headway.dev/runtime": "x", **selector}))]

    assert (behind(), behind(color="blue"), behind(color="red")) == (["a", "b", "c"], ["a", "c"], [])
    assert cache.pods_behind(Service("ns", "s", {})) == [], "a Service without selector has no pods"
    cache.pods.put(pod("b", 2, blue))
    cache.pods.take("DELETED", pod("a", 3, blue))
    assert (behind(), behind(color="blue"), behind(color="green")) == (["b", "c"], ["b", "c"], [])


def test_the_next_oldest_owns_a_target_when_the_oldest_is_gone():
    cache = Cache(lambda key: None)
    for name, created in [("young", "2026-01-02T00:00:00Z"), ("old", "2026-01-01T00:00:00Z")]:
        document = slo(name)
        document["metadata"]["creationTimestamp"] = created
        document["spec"] = {"targetRef": {"name": "rt"}}
        cache.slos.put(document)
    assert (cache.owner("ns", "rt"), cache.owner("ns", "other"), cache.owner("elsewhere", "rt")) == ("old", None, None)
    cache.slos.take("DELETED", slo("old", 2))
    assert cache.owner("ns", "rt") == "young"
