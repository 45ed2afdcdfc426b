"""What the operator has written and somebody else changed is repaired by the next reconciliation, after which nothing
more is written."""

import dataclasses
import json

import pytest
from headway_core.contract.documents import dump, load_policy
from headway_core.contract.kubernetes import ANNOTATION_DELETION_COST, ANNOTATION_POLICY_TOUCH
from headway_core.contract.policy import Endpoint, Knobs
from headway_core.contract.reports import (
    Acknowledgement,
    EngineLimits,
    GatewayReport,
    Mix,
    PoolReport,
    ReplicaState,
    RuntimeReport,
    StepTimeReport,
)
from headway_core.errors import DocumentError
from headway_operator.access import Access
from headway_operator.cache import Cache
from headway_operator.executor import Executor
from headway_operator.kube import Kube
from headway_operator.observe import ReceivedReport
from headway_operator.reconcile import ObjectState, Reconciler
from headway_operator.settings import Settings

MODEL = StepTimeReport(0.010, 2e-4, 2e-4, 1e-6, 0.0, 0.0, 1, 5000, 256, 4096, 0.02)
LIMITS = EngineLimits(256, 4096, 8192, 16, 65536)
KEY = ("ns", "chat")


class Fleet:
    """A target with two replicas behind one gateway: the objects in the API server, and pods that obey what is written
    unless they are `deaf`."""

    def __init__(self, api_server):
        self.api, self.scripted = api_server, api_server.answer
        api_server.answer = self.answer
        api_server.config_maps["gw-policy"] = {
            "metadata": {"name": "gw-policy", "namespace": "ns", "resourceVersion": "0"},
            "data": {},
        }
        self.now, self.version, self.deaf, self.written, self.revision = 1000.0, 1, set(), [], 0
        self.cache = Cache(lambda key: None)
        labels = {"headway.dev/runtime": "rt"}
        template = {"metadata": {"labels": labels}}
        self.deployment = {"metadata": {"name": "rt", "namespace": "ns"}, "spec": {"replicas": 2, "template": template}}
        self.cache.deployments.put(self.deployment)
        self.pods = {}
        for name, selector in [("rt", labels), ("gw", {"headway.dev/gateway": "gw"})]:
            self.cache.services.put({"metadata": {"name": name, "namespace": "ns"}, "spec": {"selector": selector}})
            for pod in [f"{name}-1", f"{name}-2"][: 2 if name == "rt" else 1]:
                self.pods[pod] = {
                    "metadata": {"name": pod, "namespace": "ns", "uid": pod, "labels": selector, "annotations": {}},
                    "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
                }
                self.put(pod)
        self.cache.slos.put(
            {
                "apiVersion": "headway.dev/v1alpha1",
                "kind": "ServingSLO",
                "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 1},
                "spec": {
                    "targetRef": {"name": "rt"},
                    "gatewayRef": {"name": "gw"},
                    "objectives": {"tpot": {"target": "50ms"}},
                    "bounds": {"replicas": {"min": 2, "max": 4}},
                },
            }
        )

    def put(self, pod, **annotations):
        """The pod as a watch shows it, after these annotations (None: removed) were set."""
        self.version += 1
        metadata = self.pods[pod]["metadata"]
        known = {**metadata["annotations"], **annotations}
        metadata["annotations"] = {key: value for key, value in known.items() if value is not None}
        metadata["resourceVersion"] = str(self.version)
        self.cache.pods.put(self.pods[pod])

    def scale(self, replicas):
        self.version += 1
        self.deployment["spec"]["replicas"] = replicas
        self.deployment["metadata"]["resourceVersion"] = str(self.version)
        self.cache.deployments.put(self.deployment)

    def answer(self, method, path, body):
        if method == "PATCH":
            self.written.append(path.rsplit("/", 2)[-2 if path.endswith(("status", "scale")) else -1])
        if path.endswith("/deployments/rt/scale"):
            if method == "PATCH":
                self.scale(body["spec"]["replicas"])
            return (
                200,
                {},
                json.dumps({"metadata": {"resourceVersion": str(self.version)}, "spec": {"replicas": self.replicas}}),
            )
        if path.endswith("/servingslos/chat/status"):
            known = self.cache.slos.get(*KEY)
            self.version += 1
            metadata = {**known["metadata"], "resourceVersion": str(self.version)}
            return (
                200,
                {},
                json.dumps({**known, "metadata": metadata, "status": {**known.get("status", {}), **body["status"]}}),
            )
        if "/pods/" in path:
            self.put(path.rsplit("/", 1)[1], **body["metadata"]["annotations"])
            return 200, {}, "{}"
        if path.endswith(("/events", "/horizontalpodautoscalers")):
            return 200, {}, json.dumps({"items": []})
        return self.scripted(method, path, body)

    @property
    def replicas(self):
        return self.deployment["spec"]["replicas"]

    @property
    def policy(self):
        text = self.api.config_maps["gw-policy"]["data"].get("chat.json")
        try:
            return load_policy(text) if text else None
        except DocumentError:
            return None

    def edit(self, text):
        """Somebody else puts `text` where the policy is."""
        self.version += 1
        metadata = {**self.api.config_maps["gw-policy"]["metadata"], "resourceVersion": f"theirs-{self.version}"}
        self.api.config_maps["gw-policy"] = {"metadata": metadata, "data": {} if text is None else {"chat.json": text}}

    # what an Observer offers

    async def poll(self, target, *, awaiting_ack=False):
        self.revision = max(self.revision, self.policy.revision if self.policy else 0)

    def acknowledgement(self, pod):
        revision = self.revision - (pod.name in self.deaf)
        return Acknowledgement(revision, "u", Knobs(8, 64)) if revision > 0 else None

    def runtime(self, pod):
        report = RuntimeReport(
            pod.name,
            "rt",
            "m",
            f"boot-{pod.name}",
            1,
            0.0,
            ReplicaState.READY,
            LIMITS,
            Knobs(256, 4096),
            policy=self.acknowledgement(pod),
            step_time=MODEL,
            mix=Mix(500, 400.0, 0.0, 100.0, 450.0),
        )
        return ReceivedReport(report, self.now)

    def gateway(self, pod):
        pool = PoolReport("rt", {}, self.acknowledgement(pod))
        return ReceivedReport(GatewayReport(pod.name, "boot", 1, 0.0, ReplicaState.READY, (pool,)), self.now)


@pytest.fixture
async def fleet(api_server):
    """A fleet whose object has been reconciled until nothing more is written; `again` reconciles it once more, so much
    later that every cached read has expired."""
    made = Fleet(api_server)
    kube = Kube()
    reconciler = Reconciler(
        Settings(),
        kube,
        made.cache,
        observer=made,
        executor=Executor(kube, lambda: True),
        may_write=lambda: True,
        clock=lambda: made.now,
    )
    state = ObjectState(began=made.now)

    async def again():
        made.now += 31.0
        made.written.clear()
        await reconciler.reconcile(KEY, state, Access())
        return [name for name in made.written if name != "chat"]  # the status is no matter here

    made.again = again
    for _ in range(8):
        await again()
    assert await again() == []
    assert made.policy.knobs.max_num_seqs is not None
    yield made
    await kube.close()


CHANGES = {
    "knobs": lambda policy: {"knobs": Knobs(3, 17)},
    "no knobs": lambda policy: {"knobs": Knobs()},
    "cordoned": lambda policy: {"cordoned": ("rt-1",)},
    "classes": lambda policy: {"classes": (dataclasses.replace(policy.classes[0], priority=7),)},
    "objectives": lambda policy: {
        "classes": tuple(
            dataclasses.replace(
                known,
                objectives=dataclasses.replace(
                    known.objectives, tpot=dataclasses.replace(known.objectives.tpot, target=9.0)
                ),
            )
            for known in policy.classes
        )
    },
    "endpoints": lambda policy: {"pool": dataclasses.replace(policy.pool, endpoints=(Endpoint("elsewhere"),))},
    "samples": lambda policy: {"min_samples": 1},
    "window": lambda policy: {"window": 7.0},
    "object": lambda policy: {"slo_uid": "another"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_changed_member_of_the_policy_is_written_back_above_the_edit(fleet, change):
    before = fleet.policy
    fleet.edit(dump(dataclasses.replace(before, revision=before.revision + 5, **change(before))))
    assert sorted(await fleet.again()) == ["gw-1", "gw-policy", "rt-1", "rt-2"], "written once, and every pod touched"
    assert fleet.policy.revision > before.revision + 5
    assert dataclasses.replace(fleet.policy, revision=before.revision) == before
    await fleet.again()
    assert await fleet.again() == []


@pytest.mark.parametrize("text", [None, "{}", "no policy"], ids=["gone", "empty", "nonsense"])
async def test_a_policy_that_is_gone_or_unreadable_is_written_again(fleet, text):
    before = fleet.policy
    fleet.edit(text)
    await fleet.again()
    assert fleet.policy.revision > before.revision
    assert dataclasses.replace(fleet.policy, revision=before.revision) == before


async def test_a_revision_below_what_the_pods_confirm_is_raised_above_it(fleet):
    before = fleet.policy
    fleet.edit(dump(dataclasses.replace(before, revision=1)))
    fleet.revision = before.revision + 9
    await fleet.again()
    assert fleet.policy.revision == before.revision + 10


async def test_a_pod_that_has_not_read_the_policy_is_touched_again_when_its_annotation_is_changed(fleet):
    fleet.deaf = {"rt-2"}
    fleet.put("rt-2", **{ANNOTATION_POLICY_TOUCH: None})
    assert await fleet.again() == ["rt-2"]
    assert fleet.pods["rt-2"]["metadata"]["annotations"][ANNOTATION_POLICY_TOUCH].startswith(str(fleet.policy.revision))


async def test_a_mark_of_ours_on_a_pod_that_stays_is_taken_away_and_others_are_left(fleet):
    fleet.put("rt-1", **{ANNOTATION_DELETION_COST: "-1000"})
    fleet.put("rt-2", **{ANNOTATION_DELETION_COST: "5"})
    assert await fleet.again() == ["rt-1"]
    assert [fleet.pods[name]["metadata"]["annotations"].get(ANNOTATION_DELETION_COST) for name in ("rt-1", "rt-2")] == [
        None,
        "5",
    ]
    assert await fleet.again() == []


async def test_a_scale_below_the_minimum_is_set_again(fleet):
    fleet.scale(1)
    assert await fleet.again() == ["rt"]
    assert fleet.replicas == 2
