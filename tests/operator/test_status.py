import copy

import pytest
from headway_core.contract.policy import Knobs
from headway_core.histogram import LogHistogram, bucket
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Decision
from headway_core.planning.snapshot import ClassTraffic, Demand, Traffic
from headway_core.slo_parser import parse_slo
from headway_operator import status
from headway_operator.status import StatusFigures

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
SLO = parse_slo(
    {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "ServingSLO",
        "metadata": {"name": "chat"},
        "spec": {
            "targetRef": {"name": "x"},
            "objectives": {"ttft": {"target": "1s"}},
            "classes": [{"name": "a", "priority": 2}, {"name": "b", "priority": 1}],
            "defaultClass": "a",
        },
    }
)


def conditions(**changed):
    """Every condition true, except those given as (status, reason)."""
    made = []
    for kind in status.ORDER[1:]:
        value, reason = changed.get(kind, (True, "Fine"))
        made.append(Condition(kind, value, reason, f"{kind} for 3 of 4"))
    return made


def written(listed, generation=1, **rest):
    return {"observedGeneration": generation, "conditions": listed, **rest}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (True, "Enforcing")),
        ({"Accepted": (False, "InvalidSpec"), "Feasible": (False, "X")}, (False, "InvalidSpec")),
        ({"TargetResolved": (False, "DeploymentNotFound")}, (False, "DeploymentNotFound")),
        ({"MetricsAvailable": (False, "StaleMetrics"), "KnobsApplied": (False, "Refused")}, (False, "StaleMetrics")),
        ({"MetricsAvailable": (None, "FirstReading")}, (None, "FirstReading")),
        ({"Feasible": (False, "TPOTUnreachable")}, (False, "TPOTUnreachable")),
        ({"Feasible": (None, "NotEnoughData")}, (True, "Enforcing")),
        ({"KnobsApplied": (False, "NotAcknowledged")}, (False, "NotAcknowledged")),
        ({"KnobsApplied": (False, "Paused")}, (True, "Enforcing")),
        ({"KnobsApplied": (None, "Waiting")}, (True, "Enforcing")),
        (
            {
                "ScalingActive": (False, "NoReplicaBounds"),
                "SLOMet": (False, "Missed"),
                "WithinBounds": (False, "AtMax"),
            },
            (True, "Enforcing"),
        ),
    ],
)
def test_ready_is_the_first_thing_that_keeps_it_from_being_managed(changed, expected):
    found = status.ready(conditions(**changed), (), Condition("Ready", True, "Enforcing", ""))
    assert (found.status, found.reason) == expected


def test_a_missing_right_is_told_by_ready():
    found = status.ready(conditions(), ("patch pods",), Condition("Ready", True, "Enforcing", ""))
    assert (found.reason, "patch pods" in found.message) == ("MissingPermission", True)


def test_transition_times_move_with_the_status_alone():
    first = status.condition_documents(conditions(), {}, 1, NOW)
    same = status.condition_documents(conditions(SLOMet=(True, "Other")), written(first), 2, LATER)
    assert {known["lastTransitionTime"] for known in same} == {NOW}
    fell = status.condition_documents(conditions(SLOMet=(False, "Missed")), written(first), 2, LATER)
    assert [known["type"] for known in fell if known["lastTransitionTime"] == LATER] == ["SLOMet"]
    assert [known["type"] for known in fell] == list(status.ORDER[1:]), "in the order that tells the story"


class TestSilence:
    before = written(
        status.condition_documents(conditions(), {}, 1, NOW),
        observed={"class": "a"},
        classes=[{"class": "a", "ttft": "600ms"}],
        replicas=3,
    )

    def after(self, **changes):
        return {**copy.deepcopy(self.before), **changes}

    def test_nothing_new_is_not_written_however_long_ago_it_was(self):
        assert not status.worth_writing(self.before, self.after(), 1e9)

    def test_a_count_or_a_condition_is_written_at_once(self):
        assert status.worth_writing(self.before, self.after(replicas=4), 0.0)
        assert status.worth_writing(self.before, self.after(observedGeneration=2), 0.0)
        fell = status.condition_documents(conditions(SLOMet=(False, "Missed")), self.before, 1, LATER)
        assert status.worth_writing(self.before, self.after(conditions=fell), 0.0)

    @pytest.mark.parametrize(
        ("ttft", "since", "due"),
        [("650ms", 1e9, False), ("700ms", 29.0, False), ("700ms", 30.0, True), ("1s", 30.0, True)],
    )
    def test_figures_wait_for_half_a_minute_and_a_tenth(self, ttft, since, due):
        assert status.worth_writing(self.before, self.after(classes=[{"class": "a", "ttft": ttft}]), since) is due

    def test_numbers_in_words_ride_along(self):
        told = copy.deepcopy(self.before["conditions"])
        told[0]["message"] = told[0]["message"].replace("3", "9")
        assert not status.worth_writing(self.before, self.after(conditions=told), 0.0)
        assert status.worth_writing(self.before, self.after(conditions=told), 30.0)

    def test_a_figure_that_came_or_went_waits_too(self):
        assert not status.worth_writing(self.before, self.after(classes=[{"class": "a"}]), 0.0)
        assert status.worth_writing(self.before, self.after(classes=[{"class": "a"}]), 30.0)


def test_the_patch_makes_one_into_the_other():
    def merge(target, patch):
        result = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            elif isinstance(value, dict):
                result[key] = merge(result.get(key), value)
            else:
                result[key] = value
        return result

    cases = [
        ({}, {"a": {"b": 1}}),
        ({"a": {"b": 1, "c": 2}, "x": [1]}, {"a": {"b": 1}, "x": [2]}),
        ({"a": 1}, {}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
    ]
    for before, after in cases:
        assert merge(before, status.merge_patch(before, after)) == after
    assert status.merge_patch({"a": {"b": 1}}, {"a": {"b": 1}}) == {}


def test_decisions_are_five_newest_first_and_told_once():
    listed = []
    for number in range(8):
        listed = status.decided({"decisions": listed}, [Decision("Scale", "ScaledUp", f"{number}")], NOW)
        listed = status.decided({"decisions": listed}, [Decision("Scale", "ScaledUp", f"{number}")], LATER)
    assert [known["message"] for known in listed] == ["7", "6", "5", "4", "3"]
    assert {known["time"] for known in listed} == {NOW}
    assert len(status.decided({}, [Decision("Scale", "ScaledUp", "x" * 900)], NOW)[0]["message"]) == 512


def test_the_worst_class_is_shown_and_unknown_figures_are_absent():
    histogram = LogHistogram({bucket(0.6): 40})
    good = ClassTraffic("a", 40, 0, {"ok": 40}, 0, {"all": 40}, {}, histogram, LogHistogram())
    bad = ClassTraffic("b", 40, 0, {"ok": 30, "shed": 10}, 10, {"all": 30}, {}, histogram, LogHistogram())
    traffic = Traffic(10.0, {"a": good, "b": bad}, Demand(80, 10.0), Demand(80, 10.0))
    made = status.build(SLO, [], StatusFigures(traffic=traffic, desired=Knobs(4, None), desired_replicas=2), [], {}, 3)
    assert made["observed"] == {
        "class": "b",
        "requestRate": "4.0",
        "ttft": made["classes"][0]["ttft"],
        "attainment": "0.750",
        "shed": "0.25",
    }
    assert made["desired"] == {"maxNumSeqs": 4, "replicas": 2}
    assert "applied" not in made
    idle = status.build(SLO, [], StatusFigures(traffic=Traffic(10.0, {}, Demand(0, 10.0), Demand(0, 10.0))), [], {}, 3)
    assert idle["observed"] == {"class": "a", "requestRate": "0.00"}


def shown(offered, before, whole, seconds=4.0):
    """status.observed after `offered` requests, a quarter of which was shed."""
    histogram = LogHistogram({bucket(0.6): offered})
    counted = ClassTraffic(
        "a", offered, 0, {"ok": offered}, offered // 4, {"all": offered}, {}, histogram, LogHistogram()
    )
    traffic = Traffic(seconds, {"a": counted}, Demand(offered, seconds), Demand(offered, seconds))
    return status.build(SLO, [], StatusFigures(traffic=traffic, whole=whole), [], before, 1).get("observed")


class TestFirstFigures:
    """minSamples is 20."""

    def test_a_new_object_shows_its_figures_as_soon_as_there_are_samples_enough(self):
        assert shown(19, {}, False) is None
        first = shown(20, {}, False)
        assert (first["requestRate"], first["shed"], first["attainment"], "ttft" in first) == (
            "5.0",
            "0.25",
            "1.000",
            True,
        )

    def test_little_traffic_is_shown_after_a_window(self):
        assert shown(2, {}, True) == {"class": "a", "requestRate": "0.50", "shed": "0.00"}

    def test_after_a_restart_what_was_shown_stands_until_then(self):
        old = {"class": "a", "requestRate": "9.0", "ttft": "70ms", "tpot": "7ms", "attainment": "0.900", "shed": "0.10"}
        before = {"classes": [old], "observed": old}
        assert shown(19, before, False) == old
        assert shown(20, before, False) == {**shown(20, {}, False), "tpot": "7ms"}
        assert "tpot" not in shown(20, before, True)

    def test_without_a_reading_everything_stays(self):
        before = {"classes": [{"class": "a", "ttft": "70ms"}], "observed": {"class": "a", "ttft": "70ms"}}
        after = status.build(SLO, [], StatusFigures(), [], before, 1)
        assert (after["classes"], after["observed"]) == (before["classes"], before["observed"])


class TestWarming:
    def test_what_was_known_outlives_what_is_not_known_yet(self):
        old = written(
            status.condition_documents(conditions(SLOMet=(True, "Kept"), WithinBounds=(False, "AtMax")), {}, 1, NOW)
        )
        fresh = conditions(SLOMet=(None, "TooFewSamples"), MetricsAvailable=(None, "FirstReading"))
        kept = {known.type: known for known in status.keep_while_warming(fresh, old, 1)}
        assert (kept["SLOMet"].status, kept["WithinBounds"].status, kept["MetricsAvailable"].status) == (
            True,
            False,
            True,
        )

    def test_bad_news_and_new_specs_are_told_at_once(self):
        old = written(status.condition_documents(conditions(SLOMet=(True, "Kept")), {}, 1, NOW))
        bad = {known.type: known for known in status.keep_while_warming(conditions(SLOMet=(False, "Missed")), old, 1)}
        assert bad["SLOMet"].status is False
        new = {
            known.type: known for known in status.keep_while_warming(conditions(SLOMet=(None, "TooFewSamples")), old, 2)
        }
        assert new["SLOMet"].status is None
