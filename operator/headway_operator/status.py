"""The object's status, from what was observed and decided. Pure. Every condition is True when all is as it should be.

A status is written at once when a condition, a knob, a count of replicas or a decision changes. Figures are refreshed
at most every 30 s, and only when one of them moved by more than a tenth: a steady object is never written.

What was written last is known only as the cluster returns it, in words: after a restart the operator must find that it
has nothing to write. So the figures in a message are compared as they stand in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway_core.contract.policy import Knobs
from headway_core.durations import format_duration
from headway_core.planning.conditions import Condition
from headway_core.planning.plan import Decision
from headway_core.planning.snapshot import ClassTraffic, Traffic
from headway_core.slo import PriorityClass, ServingSLO

REFRESH = 30.0
"""Seconds between refreshes of figures."""
NOTABLE = 0.1
"""A figure that moved by no more than this is the same."""
DECISIONS = 5

ORDER = (
    *("Ready", "Accepted", "TargetResolved", "MetricsAvailable", "KnobsApplied"),
    *("ScalingActive", "WithinBounds", "Feasible", "SLOMet"),
)
"""Conditions in the order in which `kubectl describe` should tell the story."""
UNDECIDED = ("MetricsAvailable", "KnobsApplied", "ScalingActive", "WithinBounds", "Feasible", "SLOMet")
"""Conditions that are Unknown while the target is not resolved."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WORD = {True: "True", False: "False", None: "Unknown"}


@dataclass(frozen=True, slots=True)
class StatusFigures:
    """The parts of a status beside conditions and decisions; None: nothing can be said now."""

    replicas: int | None = None
    ready: int | None = None
    traffic: Traffic | None = None
    whole: bool = True
    """Whether the traffic covers a whole window. Before it does, a figure with too few samples stays as shown last."""
    desired: Knobs | None = None
    desired_replicas: int | None = None
    applied: Knobs | None = None
    applied_replicas: int | None = None
    revision: int | None = None
    acknowledged: int | None = None


def ready(conditions: Iterable[Condition], missing: Iterable[str], otherwise: Condition) -> Condition:
    """Ready: the first condition that keeps the object from being managed as its spec asks, or else `otherwise`."""
    known = {condition.type: condition for condition in conditions}
    for kind in ("Accepted", "TargetResolved"):
        if kind in known and known[kind].status is not True:
            return Condition("Ready", known[kind].status, known[kind].reason, known[kind].message)
    if rights := ", ".join(missing):
        return Condition(
            "Ready", False, "MissingPermission", f"the operator's account may not {rights}: grant it; the rest goes on"
        )
    for kind, excused in (("MetricsAvailable", ()), ("Feasible", ()), ("KnobsApplied", ("NotEnforced", "Paused"))):
        condition = known.get(kind)
        if condition is not None and condition.status is False and condition.reason not in excused:
            return Condition("Ready", False, condition.reason, condition.message)
    metrics = known.get("MetricsAvailable")
    if metrics is not None and metrics.status is None:
        return Condition("Ready", None, metrics.reason, metrics.message)
    return otherwise


def condition_documents(
    conditions: Iterable[Condition], before: Mapping[str, Any], generation: int, now: str
) -> list[dict[str, Any]]:
    """The conditions as Kubernetes writes them; lastTransitionTime moves only when the status does."""
    old = {condition["type"]: condition for condition in before.get("conditions") or ()}
    made = []
    for condition in sorted(conditions, key=lambda known: ORDER.index(known.type)):
        word = _WORD[condition.status]
        known = old.get(condition.type, {})
        since = known.get("lastTransitionTime", now) if known.get("status") == word else now
        texts = {"type": condition.type, "status": word, "reason": condition.reason, "message": condition.message}
        made.append({**texts, "lastTransitionTime": since, "observedGeneration": generation})
    return made


def keep_while_warming(conditions: Iterable[Condition], before: Mapping[str, Any], generation: int) -> list[Condition]:
    """In the first window after a start, keeps what was known before, so that a restart changes no condition.

    A condition is kept when it follows from counting over a window, is about the same generation, and is not False now.
    """
    old = {condition["type"]: condition for condition in before.get("conditions") or ()}

    def kept(condition: Condition) -> Condition:
        known = old.get(condition.type, {})
        counted = condition.type in ("SLOMet", "WithinBounds") or condition.reason in ("FirstReading", "NoTraffic")
        said = known.get("status") in ("True", "False") and known.get("observedGeneration") == generation
        if not counted or not said or condition.status is False:
            return condition
        return Condition(condition.type, known["status"] == "True", known["reason"], known["message"])

    return [kept(condition) for condition in conditions]


def build(
    slo: ServingSLO | None,
    listed: list[dict[str, Any]],
    figures: StatusFigures,
    decisions: list[dict[str, Any]],
    before: Mapping[str, Any],
    generation: int,
) -> dict[str, Any]:
    """The whole status, without what cannot be said; figures that cannot be counted now stay as in `before`."""
    status: dict[str, Any] = {"observedGeneration": generation, "conditions": listed}
    _set(status, "replicas", figures.replicas)
    _set(status, "readyReplicas", figures.ready)
    if slo is not None and figures.traffic is not None:
        shown = {} if figures.whole else {entry["class"]: entry for entry in before.get("classes") or ()}
        classes = [
            _observed(known, figures.traffic, slo.min_samples, shown.get(known.name, {}), figures.whole)
            for known in slo.classes
        ]
        if known_classes := [entry for entry in classes if len(entry) > 1]:
            status["classes"], status["observed"] = known_classes, _worst(known_classes)
    else:
        for key in ("classes", "observed"):
            _set(status, key, before.get(key))
    if figures.desired is not None:
        desired = _knobs(figures.desired)
        _set(desired, "replicas", figures.desired_replicas)
        _set(status, "desired", desired or None)
    if figures.applied is not None:
        applied = _knobs(figures.applied)
        _set(applied, "replicas", figures.applied_replicas)
        _set(applied, "policyRevision", figures.revision)
        _set(applied, "acknowledgedReplicas", figures.acknowledged)
        status["applied"] = applied
    if decisions:
        status["decisions"] = decisions[:DECISIONS]
    return status


def decided(before: Mapping[str, Any], taken: Iterable[Decision], now: str) -> list[dict[str, Any]]:
    """The decisions to show, newest first. One that only repeats the newest of its kind is not told twice."""
    listed = list(before.get("decisions") or ())
    for decision in taken:
        message = decision.message[:512]
        last = next((entry for entry in listed if entry["action"] == decision.action), None)
        if last is None or (last["reason"], last["message"]) != (decision.reason, message):
            listed.insert(0, {"time": now, "action": decision.action, "reason": decision.reason, "message": message})
    return listed[:DECISIONS]


def worth_writing(before: Mapping[str, Any], after: Mapping[str, Any], since_refresh: float) -> bool:
    """Whether this status must replace the other one now."""
    moved = since_refresh >= REFRESH and _differs_notably(_due_later(before), _due_later(after))
    return moved or _due_at_once(before) != _due_at_once(after)


def merge_patch(before: Any, after: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes `before` into `after`: what is gone is null."""
    patch: dict[str, Any] = {key: None for key in before if key not in after} if isinstance(before, Mapping) else {}
    for key, value in after.items():
        old = before.get(key) if isinstance(before, Mapping) else None
        if isinstance(value, Mapping):
            if deeper := merge_patch(old, value):
                patch[key] = deeper
        elif value != old:
            patch[key] = value
    return patch


def _set(target: dict[str, Any], key: str, value: object) -> None:
    if value is not None:
        target[key] = value


def _knobs(knobs: Knobs) -> dict[str, Any]:
    made = {"maxNumSeqs": knobs.max_num_seqs, "prefillTokenBudget": knobs.prefill_token_budget}
    return {name: value for name, value in made.items() if value is not None}


def _observed(
    known: PriorityClass, traffic: Traffic, min_samples: int, shown: Mapping[str, Any], whole: bool
) -> dict[str, Any]:
    counted = traffic.classes.get(known.name, ClassTraffic(known.name))
    ended = sum(counted.outcomes.values())
    made: dict[str, Any] = {**shown, "class": known.name}
    if whole or ended >= min_samples:
        rate = counted.offered / traffic.seconds
        made["requestRate"] = f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"
        if counted.offered:
            made["shed"] = f"{counted.shed / counted.offered:.2f}"
    objectives = known.objectives
    for figure, objective, histogram in (
        ("ttft", objectives.ttft, counted.ttft),
        ("tpot", objectives.tpot, counted.tpot),
    ):
        if histogram.total >= min_samples:
            value = histogram.quantile((objective.percentile if objective else 95.0) / 100)
            _set(made, figure, None if value is None else format_duration(max(0.001, value)))
    if ended >= min_samples:
        _set(made, "attainment", None if counted.attainment is None else f"{counted.attainment:.3f}")
    return made


def _worst(classes: list[dict[str, Any]]) -> dict[str, Any]:
    """The class with the lowest attainment; the first, which has the highest priority, where none is known."""
    known = [entry for entry in classes if "attainment" in entry]
    return min(known, key=lambda entry: float(entry["attainment"])) if known else classes[0]


def _due_at_once(status: Mapping[str, Any]) -> dict[str, Any]:
    """The part whose change is written at once: all but figures, with the numbers taken out of conditions' messages."""
    kept = {key: value for key, value in status.items() if key not in ("observed", "classes")}
    kept["conditions"] = [
        {**condition, "message": _NUMBER.sub("#", condition.get("message", ""))}
        for condition in status.get("conditions") or ()
    ]
    return kept


def _due_later(status: Mapping[str, Any]) -> list[str]:
    """The part whose change is written at the next refresh: figures and messages, as text."""
    classes = status.get("classes") or ()
    figures = [f"{key} {value}" for entry in classes for key, value in sorted(entry.items()) if key != "class"]
    return [*figures, *(condition.get("message", "") for condition in status.get("conditions") or ())]


def _differs_notably(before: list[str], after: list[str]) -> bool:
    """Whether the wording differs, or a number by more than `NOTABLE`."""
    if [_NUMBER.sub("#", text) for text in before] != [_NUMBER.sub("#", text) for text in after]:
        return True
    numbers = zip(_NUMBER.findall(" ".join(before)), _NUMBER.findall(" ".join(after)), strict=True)
    return any(abs(float(new) - float(old)) > NOTABLE * max(abs(float(old)), abs(float(new))) for old, new in numbers)
