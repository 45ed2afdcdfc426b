"""Builders of observations for the planner's tests, as one fixture: `make`."""

import dataclasses
from types import SimpleNamespace

import pytest
from headway_core.contract.policy import Knobs, Policy, Pool
from headway_core.contract.reports import EngineLimits, Mix, ReplicaState, RuntimeReport, StepTimeReport
from headway_core.planning.snapshot import Demand, ObservedReplica, Phase, Snapshot, Traffic
from headway_core.slo_parser import parse_slo

MODEL = StepTimeReport(0.010, 2e-5, 5e-5, 2e-7, 0.0, 1e-4, 64, 5000, 64, 2048, 0.02)
MIX = Mix(500, 400.0, 0.0, 100.0, 450.0)
CAPACITY = EngineLimits(256, 2048, 8192, 16, 65536)
START = Knobs(256, 2048)


def slo(**spec):
    document = {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "ServingSLO",
        "metadata": {"name": "chat", "uid": "u-1", "generation": spec.pop("generation", 1)},
        "spec": {
            "targetRef": {"name": "chat-runtime"},
            "gatewayRef": {"name": "headway-gateway"},
            "objectives": {"ttft": {"target": "2s"}, "tpot": {"target": "50ms"}},
            "bounds": {"replicas": {"min": 1, "max": 20}},
            **spec,
        },
    }
    return parse_slo(document)


def replica(name="pod-0", phase=Phase.READY, age=1.0, note="", **changes):
    report = RuntimeReport(
        replica_id=name,
        pool="chat-runtime",
        model="m",
        boot_id=f"boot-{name}",
        seq=1,
        at=0.0,
        state=ReplicaState.READY,
        limits=CAPACITY,
        effective=START,
        step_time=MODEL,
        mix=MIX,
    )
    return ObservedReplica(name, phase, dataclasses.replace(report, **changes) if age is not None else None, age, note)


def pods(count):
    return tuple(replica(f"pod-{index}") for index in range(count))


def demand(rate, seconds=60.0):
    return Demand(round(rate * seconds), seconds)


def snapshot(rate, count=2, **changes):
    """`count` good replicas behind one gateway that sees `rate` requests a second, everything settled."""
    known = {
        "replicas": pods(count),
        "scale": count,
        "gateways": 1,
        "gateways_reporting": 1,
        "in_flight": {},
        "traffic": Traffic(60.0, {}, demand(rate), demand(rate, 15.0)),
    }
    return Snapshot(**{**known, **changes})


def policy(of, knobs=Knobs(), cordoned=(), revision=1):
    return Policy(
        revision, of.uid, of.generation, Pool(of.target_name), of.classes, of.default_class, knobs, tuple(cordoned)
    )


@pytest.fixture(scope="session")
def make():
    return SimpleNamespace(
        model=MODEL,
        mix=MIX,
        limits=CAPACITY,
        start=START,
        slo=slo,
        replica=replica,
        pods=pods,
        demand=demand,
        snapshot=snapshot,
        policy=policy,
    )
