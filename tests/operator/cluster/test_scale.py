"""A thousand objects: what they cost in CPU, memory and API calls, that the cost grows no faster than their number, and
that all is silent.

`docs/benchmarks/operator.md` has the figures that this prints.
"""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import Acknowledgement, ClassReport, GatewayReport, PoolReport, ReplicaState

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

RATE = 4.0
"""Requests a second to each object; one replica carries 4.85."""
PER_GATEWAY = 100
COUNTS = (100, 300, 1000)
QUIET, MEASURED = 35.0, 60.0
"""Seconds without a write after which all is settled, longer than figures wait to be refreshed; seconds that are
measured then."""
MEMORY_LIMIT = 512.0
"""MiB that the chart grants the operator."""


def deployment(world, name, labels):
    container = {"name": "main", "image": "none", "ports": [{"name": "control", "containerPort": world.port}]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def service(name, labels):
    ports = [{"name": "http", "port": 8000}, {"name": "control", "port": 8001}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": labels, "ports": ports},
    }


def slo(name, target, gateway):
    spec = {
        "targetRef": {"name": target},
        "gatewayRef": {"name": gateway},
        "objectives": {"ttft": {"target": "2s"}, "tpot": {"target": "50ms"}},
        "evaluation": {"window": "5m"},  # so that a late report moves no figure by a tenth
        "bounds": {"replicas": {"min": 1, "max": 3}},
    }
    return {"apiVersion": "headway.dev/v1alpha1", "kind": "ServingSLO", "metadata": {"name": name}, "spec": spec}


def populate(world, first, last):
    """Deployments, Services and objects `first` to `last`, a hundred behind each gateway."""
    made = []
    for number in range(first, last):
        gateway, name = f"headway-gateway-{number // PER_GATEWAY}", f"rt-{number}"
        if number % PER_GATEWAY == 0:
            labels = {"headway.dev/gateway": gateway}
            made += [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{gateway}-policy"}},
                deployment(world, gateway, labels),
                service(gateway, labels),
            ]
        labels = {"headway.dev/runtime": name}
        made += [deployment(world, name, labels), service(name, labels), slo(f"slo-{number}", name, gateway)]
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    world.plane.kubectl("create", "-n", world.namespace, "-f", "-", stdin=items, timeout=900)


class Crowd:
    """Kubelet, runtimes and gateways of all objects, made cheap: pods are handled while they are new, policies read
    once per gateway."""

    def __init__(self, world):
        self.world = world
        self.plain = world.report
        self.policies = {}
        """Object number → its policy as a plain document."""
        world.rate = RATE
        world.report, world._round, world.pause = self.report, self.round, 1.0

    def round(self):
        listed = self.world.core.list_namespaced_pod(
            self.world.namespace, field_selector="status.phase=Pending", _preload_content=False
        )
        for pod in json.loads(listed.data)["items"]:
            self.world._ready(pod["metadata"]["name"])
        maps = self.world.core.list_namespaced_config_map(self.world.namespace, _preload_content=False)
        for config_map in json.loads(maps.data)["items"]:
            if config_map["metadata"]["name"].endswith("-policy"):
                for key, text in config_map.get("data", {}).items():
                    self.policies[int(key.removeprefix("slo-").removesuffix(".json"))] = json.loads(text)

    def acknowledgement(self, number):
        policy = self.policies.get(number)
        return Acknowledgement(policy["revision"], policy["sloUID"], Knobs()) if policy else None

    def report(self, name):
        kind, number = name.rsplit("-", 2)[0].rsplit("-", 1)
        if kind == "rt":
            return dataclasses.replace(self.plain(name), pool=f"rt-{number}", policy=self.acknowledgement(int(number)))
        count = self.world.count()
        kept = {"ttft": count, "tpot": count, "all": count}
        counted = {
            "default": ClassReport(
                offered=count, outcomes={"ok": count}, attained=kept, judged=kept, ttft={110: count}, tpot={78: count}
            )
        }
        first = int(number) * PER_GATEWAY
        pools = tuple(
            PoolReport(f"rt-{index}", counted, self.acknowledgement(index))
            for index in range(first, first + PER_GATEWAY)
        )
        return GatewayReport(name, f"boot-{name}", 1, 0.0, ReplicaState.READY, pools)


def steady(status):
    """Knobs are enforced, the promise is kept, and the rate is shown as it is: a figure that still moves by a tenth is
    rightly written."""
    held = {(condition["type"], condition["status"]) for condition in status.get("conditions", [])}
    rate = float(status.get("observed", {}).get("requestRate", "0"))
    return {("Ready", "True"), ("KnobsApplied", "True"), ("SLOMet", "True")} <= held and abs(rate - RATE) < RATE / 10


def wait_until_settled(world, count):
    """Every object is steady, and the operator has written nothing for a while."""

    def settled():
        listed = json.loads(world.plane.kubectl("get", "sslo", "-n", world.namespace, "-o", "json"))["items"]
        return sum(steady(item.get("status", {})) for item in listed) == count

    deadline = time.monotonic() + 400
    while not settled():
        assert time.monotonic() < deadline, f"{count} objects are not managed"
        time.sleep(3)
    while True:
        mark = world.plane.audit.mark()
        time.sleep(QUIET)
        if not world.changes(mark):
            return
        assert time.monotonic() < deadline, f"{count} objects are never silent: {world.writes(mark)[:5]}"


def cost(world, operator):
    """(CPU seconds a minute, MiB, API calls a minute, writes)."""
    process = psutil.Process(operator.process.pid)
    mark, cpu, began = world.plane.audit.mark(), operator.cpu(), time.monotonic()
    time.sleep(MEASURED)
    minutes = (time.monotonic() - began) / 60
    cpu = operator.cpu() - cpu
    world.plane.audit.settle()
    calls = world.plane.audit.entries(since=mark, user=world.user)
    return cpu / minutes, process.memory_info().rss / 2**20, len(calls) / minutes, world.writes(mark)


def test_a_thousand_objects(world):
    world.grant_all()
    Crowd(world)
    operator = world.operator(
        "--interval", "5s", "--report-timeout", "8s"
    )  # the default interval; the scripted pods may be slow
    costs, done = {}, 0
    for count in COUNTS:
        began = time.monotonic()
        with ThreadPoolExecutor() as makers:
            list(makers.map(lambda first: populate(world, first, first + PER_GATEWAY), range(done, count, PER_GATEWAY)))
        made, done = time.monotonic() - began, count
        wait_until_settled(world, count)
        settled = time.monotonic() - began
        cpu, memory, calls, written = costs[count] = cost(world, operator)
        print(f"\n{count:5d} objects, made in {made:.0f} s, settled after {settled:.0f} s: ", end="")
        print(f"{cpu:.1f} CPU s/min, {memory:.0f} MiB, {calls:.0f} API calls/min, {len(written)} writes")
        assert written == []
    (cpu_few, memory_few, calls_few, _), (cpu_many, memory_many, calls_many, _) = costs[300], costs[1000]
    assert cpu_many / 1000 <= 1.3 * cpu_few / 300
    assert calls_many / 1000 <= calls_few / 300
    assert memory_many - memory_few <= 1.5 * (memory_few - costs[100][1]) * (1000 - 300) / (300 - 100) + 20
    assert memory_many <= MEMORY_LIMIT / 2
