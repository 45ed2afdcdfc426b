"""The planner in a closed loop under a virtual clock: pods take a minute to start, demand is noisy, and nothing may
chase its own tail."""

import dataclasses
import itertools
import math
import random

import pytest
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import ClassReport, GatewayReport, PoolReport, ReplicaState
from headway_core.planning.capacity import Targets, Workload, solve
from headway_core.planning.plan import Memory, Scale, SetKnobs, WritePolicy, plan
from headway_core.planning.snapshot import Phase, Snapshot
from headway_core.planning.traffic_window import TrafficWindow

TICK, START_UP, MINUTE = 5.0, 60.0, 60.0


class Fleet:
    """A Deployment, its gateway's counters and the policy, as far as the planner can see and change them."""

    def __init__(self, make, slo, replicas, noise, seed=0):
        self.make, self.slo, self.noise = make, slo, noise
        self.random = random.Random(seed)
        load = Workload.of([make.mix])
        self.one = solve(make.model, load, Targets(0.05, 2.0), make.limits)
        self.policy = make.policy(slo, Knobs(self.one.max_num_seqs, self.one.prefill_token_budget))
        self.pods = {f"pod-{index}": -START_UP for index in range(replicas)}
        self.born = replicas
        self.scale, self.offered = replicas, 0.0
        self.traffic = TrafficWindow(slo.target_name, slo.window)
        self.history, self.knob_moves, self.unserved = [], [], 0.0

    def run(self, minutes, load, memory=None):
        """`load(now)` in units of one replica's capacity."""
        memory = memory or Memory()
        begin = self.history[-1][0] if self.history else 0.0
        for tick in range(int(minutes * MINUTE / TICK)):
            now = begin + (tick + 1) * TICK
            pods_wanted = load(now - begin)
            rate = pods_wanted * self.one.rate * (1 + self.random.uniform(-self.noise, self.noise))
            self.offered += rate * TICK
            ready = sum(now - born >= START_UP for born in self.pods.values())
            if pods_wanted > ready * 1.05:
                self.unserved += TICK
            decision = plan(self.observe(now), self.slo, memory, now)
            memory = decision.memory
            self.apply(decision, now)
            self.history.append((now, self.scale))
        return memory

    def observe(self, now):
        pool = PoolReport(self.slo.target_name, {"default": ClassReport(offered=int(self.offered))})
        self.traffic.record({"gw": GatewayReport("gw", "g", 1, now, ReplicaState.READY, (pool,))}, ["gw"], now)
        drift = 1 + self.random.uniform(-self.noise, self.noise) / 2
        model = dataclasses.replace(
            self.make.model, base=self.make.model.base * drift, per_row=self.make.model.per_row * drift
        )
        replicas = tuple(
            self.make.replica(name, Phase.READY, 1.0, step_time=model)
            if now - born >= START_UP
            else self.make.replica(name, Phase.STARTING, None)
            for name, born in self.pods.items()
        )
        return Snapshot(
            replicas=replicas,
            scale=self.scale,
            policy=self.policy,
            traffic=self.traffic.traffic(now),
            gateways=1,
            gateways_reporting=1,
            in_flight={},
        )

    def apply(self, decision, now):
        for action in decision.actions:
            if isinstance(action, WritePolicy):
                self.knob_moves += [now for change in action.changes if isinstance(change, SetKnobs)]
                self.policy = action.policy
            elif isinstance(action, Scale):
                for name in action.victims:
                    del self.pods[name]
                while len(self.pods) < action.replicas:
                    self.pods[f"pod-{self.born}"] = now
                    self.born += 1
                self.scale = action.replicas

    def changes(self, since=0.0):
        """The sequence of scales after `since` seconds, without repeats."""
        seen = []
        for now, scale in self.history:
            if now >= since and (not seen or seen[-1] != scale):
                seen.append(scale)
        return seen

    def reversals(self, since=0.0):
        steps = [after - before for before, after in itertools.pairwise(self.changes(since))]
        return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("start", ["below", "at", "above"])
@pytest.mark.parametrize(("load", "seed"), [(1.0, 0), (2.0, 1), (5.0, 2), (1.5, 3), (2.5, 4), (5.5, 5)])
def test_constant_demand_settles_and_stays(make, load, seed, start):
    """Exactly at n pods and between two, with 5% noise, for half an hour: one change at most after settling."""
    begin = {"below": 1, "at": max(1, int(load)), "above": int(load) + 3}[start]
    fleet = Fleet(make, make.slo(), begin, 0.05, seed)
    fleet.run(40, lambda now: load)
    settled = fleet.changes(since=10 * MINUTE)
    assert len(settled) - 1 <= 1, settled
    assert int(load) <= settled[-1] <= math.ceil(load / 0.9)
    if load % 1 and start != "above":
        assert settled[-1] == int(load) + 1
    assert fleet.reversals() <= 1


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_a_step_times_four_and_back_is_two_moves_in_all_directions(make, load):
    fleet = Fleet(make, make.slo(), 2, 0.05)
    memory = fleet.run(10, lambda now: load)
    before = fleet.scale
    memory = fleet.run(15, lambda now: 4 * load, memory)
    assert fleet.scale == int(4 * load) + bool(4 * load % 1)
    since = 10 * MINUTE
    assert fleet.reversals(since) == 0
    grown = next(now for now, scale in fleet.history if now > since and scale == fleet.scale) - since
    assert grown <= MINUTE, "the last quarter of the window sees a step early"
    memory = fleet.run(20, lambda now: load, memory)
    assert fleet.scale == before
    assert fleet.reversals(since) == 1, fleet.changes(since)
    shrunk = next(now for now, scale in fleet.history if now > 25 * MINUTE and scale == before) - 25 * MINUTE
    assert shrunk <= 300 + 60 + 120 + 2 * TICK, "stabilisation, window and drain budget are the documented time"


def test_a_square_wave_of_the_windows_own_period_moves_nothing_after_its_crest(make):
    fleet = Fleet(make, make.slo(), 1, 0.05)
    fleet.run(30, lambda now: 3.5 if now % 60 < 30 else 0.5)
    assert len(fleet.changes(since=5 * MINUTE)) == 1, fleet.changes()
    assert fleet.reversals() == 0


def test_a_ramp_up_never_turns_back(make):
    fleet = Fleet(make, make.slo(), 1, 0.05)
    fleet.run(30, lambda now: 0.5 + 7 * now / (30 * MINUTE))
    assert fleet.reversals() == 0
    assert fleet.scale == 8
    fleet.run(30, lambda now: 7.5)
    assert len(fleet.changes(since=30 * MINUTE)) == 1


def test_no_load_never_adds_a_pod(make):
    fleet = Fleet(make, make.slo(), 3, 0.0)
    fleet.run(30, lambda now: 0.0)
    steps = fleet.changes()
    assert steps == [3, 1]


def test_pods_that_take_long_to_start_are_not_ordered_twice(make):
    fleet = Fleet(make, make.slo(), 1, 0.05)
    memory = fleet.run(5, lambda now: 0.5)
    fleet.run(10, lambda now: 3.5, memory)
    assert max(fleet.changes()) == 4
    assert fleet.born == 4


def test_noise_in_the_measured_coefficients_does_not_make_the_knobs_dance(make):
    fleet = Fleet(make, make.slo(), 3, 0.05)
    fleet.run(60, lambda now: 2.5)
    assert len(fleet.knob_moves) <= 1, fleet.knob_moves


def test_knobs_and_replicas_never_move_in_the_same_window(make):
    """Every quarter of an hour the targets and the load change together, so both want to move."""
    slo = make.slo()
    fleet = Fleet(make, slo, 2, 0.05)
    memory, scaled = Memory(), []
    for generation, (target, load) in enumerate([("50ms", 1.5), ("30ms", 3.5), ("80ms", 0.5), ("40ms", 4.5)], start=1):
        fleet.slo = make.slo(generation=generation, objectives={"ttft": {"target": "2s"}, "tpot": {"target": target}})
        memory = fleet.run(15, lambda now, load=load: load, memory)
    for (_, before), (now, after) in itertools.pairwise(fleet.history):
        if before != after:
            scaled.append(now)
    assert len(fleet.knob_moves) >= 3
    assert len(scaled) >= 3
    for at in scaled:
        near = [moved for moved in fleet.knob_moves if 0 <= at - moved < slo.window]
        assert near == [], (at, fleet.knob_moves)
