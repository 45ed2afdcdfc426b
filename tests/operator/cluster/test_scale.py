"""A thousand objects: what they cost in CPU, memory and API calls, and that the cost grows no faster than their number."""

import dataclasses
import json
import threading
import time

import psutil
import pytest
from headway_core.contract import Acknowledgement, ClassBooks, GatewayReport, Knobs, PoolBooks, ReplicaState

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

PER_GATEWAY = 100
MEASURED = 60.0


def populate(world, first, last):
    """Deployments, Services and objects `first` to `last`, a hundred behind each gateway."""
    for number in range(first, last):
        gateway = f"headway-gateway-{number // PER_GATEWAY}"
        if number % PER_GATEWAY == 0:
            world.core.create_namespaced_config_map(world.namespace, {"metadata": {"name": f"{gateway}-policy"}})
            world.service(gateway, {"headway.dev/gateway": gateway})
            world.deploy(gateway, 1, {"headway.dev/gateway": gateway})
        name = f"rt-{number}"
        world.deploy(name, 1, {"headway.dev/runtime": name})
        world.service(name, {"headway.dev/runtime": name})
        world.slo(
            name=f"slo-{number}",
            targetRef={"name": name},
            gatewayRef={"name": gateway},
            evaluation={"window": "1m", "minSamples": 20},
            bounds={"replicas": {"min": 1, "max": 3}},
        )


class Crowd:
    """Answers for every pod, and reads each gateway's policies once for all of its pods: the crowd itself must cost little."""

    def __init__(self, world):
        self.world = world
        self.plain = world.report
        self.revisions = {}
        """Gateway number → (when, object number → revision)."""
        world.report, world.read_policies, world.pause = self.report, lambda name: None, 3.0

    def read(self, gateway):
        """What the policy ConfigMap of one gateway says, as of the last two seconds; revisions alone, cut out of the text."""
        at, known = self.revisions.get(gateway, (0.0, {}))
        if time.monotonic() - at > 2.0:
            data = self.world.core.read_namespaced_config_map(f"headway-gateway-{gateway}-policy", self.world.namespace).data or {}
            known = {int(key[4:-5]): json.loads(text) for key, text in data.items()}
            self.revisions[gateway] = (time.monotonic(), known)
        return known

    def acknowledgement(self, number):
        policy = self.read(number // PER_GATEWAY).get(number)
        return Acknowledgement(policy["revision"], policy["sloUID"], Knobs()) if policy else None

    def report(self, name):
        kind, number = name.rsplit("-", 2)[0].rsplit("-", 1)
        if kind == "rt":
            return dataclasses.replace(self.plain(name), pool=f"rt-{number}", policy=self.acknowledgement(int(number)))
        first = int(number) * PER_GATEWAY
        elapsed = int(time.monotonic() - self.world.counted_at)
        books = {"default": ClassBooks(offered=elapsed, outcomes={"ok": elapsed}, good={"all": elapsed}, judged={"all": elapsed})}
        pools = tuple(PoolBooks(f"rt-{index}", books, self.acknowledgement(index)) for index in range(first, first + PER_GATEWAY))
        return GatewayReport(name, f"boot-{name}", 1, 0.0, ReplicaState.READY, pools)


def cost(world, operator, count):
    """CPU seconds and API calls per minute, and MiB, once `count` objects are all managed."""

    def managed():
        listed = json.loads(world.plane.kubectl("get", "sslo", "-n", world.namespace, "-o", "json"))["items"]
        ready = [
            item
            for item in listed
            for known in item.get("status", {}).get("conditions", [])
            if known["type"] == "MetricsAvailable" and known["status"] == "True"
        ]
        return len(ready) == count

    world.wait(managed, f"{count} objects managed", patience=400)
    time.sleep(40)
    mark, cpu = world.plane.audit.mark(), operator.cpu()
    time.sleep(MEASURED)
    cpu = operator.cpu() - cpu
    world.plane.audit.settle()
    calls = len(world.plane.audit.entries(since=mark, user=world.user))
    return cpu * 60 / MEASURED, psutil.Process(operator.process.pid).memory_info().rss / 2**20, calls * 60 / MEASURED


def test_a_thousand_objects(world):
    world.grant_all()
    Crowd(world)
    operator = world.operator("--interval", "5s")
    costs = {}
    done = 0
    for count in (300, 1000):
        starts = range(done, count, PER_GATEWAY)
        workers = [threading.Thread(target=populate, args=(world, start, min(start + PER_GATEWAY, count))) for start in starts]
        began = time.monotonic()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"\n{count - done} objects made in {time.monotonic() - began:.0f} s")
        done = count
        costs[count] = cost(world, operator, count)
        print("\n{:5d} objects: {:6.1f} CPU s/min, {:5.0f} MiB, {:5.0f} API calls/min".format(count, *costs[count]))
    (cpu_few, memory_few, calls_few), (cpu_many, memory_many, calls_many) = costs[300], costs[1000]
    assert cpu_many <= 1.3 * cpu_few * 1000 / 300
    assert memory_many <= memory_few * 1000 / 300
    assert calls_many <= calls_few * 1000 / 300
