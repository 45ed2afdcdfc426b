"""A ServingSLO document, checked and typed: the object of `crds/` as a dictionary in, a `ServingSLO` out.

The CRD's schema has the same rules; here they hold without an API server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway_core.durations import parse_duration
from headway_core.errors import SpecError
from headway_core.slo import (
    API_VERSION,
    KIND,
    Bounds,
    Mode,
    Objectives,
    PriorityClass,
    Range,
    ServingSLO,
    TpotObjective,
    TtftObjective,
)

MAX_CLASSES = 8

_PERCENTILE = re.compile(r"^[0-9]{1,2}(\.[0-9]{1,3})?$")
_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


def parse_slo(document: object) -> ServingSLO:
    """The object as YAML or the API server gives it.

    Raises:
        SpecError: something in it breaks a rule; `field` is the dotted path of the first such place.
    """
    root = _Fields(document, "")
    root.only("apiVersion", "kind", "metadata", "spec", "status")
    root.constant("apiVersion", API_VERSION)
    root.constant("kind", KIND)
    metadata = root.child("metadata", required=True)
    spec = root.child("spec", required=True)
    spec.only(
        "mode",
        "targetRef",
        "serviceRef",
        "gatewayRef",
        "objectives",
        "defaultClass",
        "classes",
        "bounds",
        "evaluation",
        "behavior",
    )
    target = spec.child("targetRef", required=True)
    target.only("apiVersion", "kind", "name")
    target.constant("apiVersion", "apps/v1", default=True)
    target.constant("kind", "Deployment", default=True)
    target_name = target.label("name")
    service = spec.child("serviceRef")
    service.only("name", "port")
    gateway = spec.child("gatewayRef")
    gateway.only("name")
    objectives = _objectives(spec.child("objectives", required=True))
    classes, default_class = _classes(spec, objectives)
    evaluation = spec.child("evaluation")
    evaluation.only("window", "minSamples")
    behavior = spec.child("behavior")
    behavior.only("scaleUp", "scaleDown")
    return ServingSLO(
        name=metadata.text("name"),
        namespace=metadata.text("namespace", "default"),
        uid=metadata.text("uid", ""),
        generation=metadata.integer("generation", 1, 0),
        annotations=metadata.strings("annotations"),
        mode=_mode(spec),
        target_name=target_name,
        service_name=service.label("name", target_name),
        service_port=service.integer("port", 8000, 1, 65535),
        gateway_name=gateway.label("name") if gateway.present else None,
        objectives=objectives,
        classes=classes,
        default_class=default_class,
        bounds=_bounds(spec.child("bounds")),
        window=evaluation.seconds("window", 60.0, low=1.0, high=3600.0),
        min_samples=evaluation.integer("minSamples", 20, 1, 100_000),
        scale_up_stabilization=_stabilization(behavior.child("scaleUp"), 0.0),
        scale_down_stabilization=_stabilization(behavior.child("scaleDown"), 300.0),
    )


class _Fields:
    """A mapping that knows its path, so that whatever is wrong is named by its place."""

    def __init__(self, data: object, path: str, present: bool = True) -> None:
        if not isinstance(data, Mapping):
            raise SpecError(f"must be an object, not {data!r}", path)
        self.data: Mapping[str, Any] = data
        self.path = path
        self.present = present

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self.data.get(name)

    def child(self, name: str, required: bool = False) -> _Fields:
        value = self.get(name)
        if value is None:
            if required:
                raise SpecError("is required", self.at(name))
            return _Fields({}, self.at(name), present=False)
        return _Fields(value, self.at(name))

    def only(self, *known: str) -> None:
        for name in self.data:
            if name not in known:
                raise SpecError(f"is not a field of this object; it has {', '.join(known)}", self.at(str(name)))

    def constant(self, name: str, value: str, default: bool = False) -> None:
        given = self.get(name)
        if given is None and default:
            return
        if given != value:
            raise SpecError(f"must be {value}, not {given!r}", self.at(name))

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value and default is None):
            raise SpecError(f"must be a string, not {value!r}" if value is not None else "is required", self.at(name))
        return value

    def label(self, name: str, default: str | None = None) -> str:
        value = self.text(name, default)
        if not _LABEL.fullmatch(value) or len(value) > 63:
            raise SpecError(
                f"must be a name of at most 63 lower-case letters, digits and '-', not {value!r}", self.at(name)
            )
        return value

    def strings(self, name: str) -> dict[str, str]:
        return {str(key): str(value) for key, value in (self.get(name) or {}).items()}

    def integer(self, name: str, default: int | None, low: int, high: int | None = None) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                raise SpecError("is required", self.at(name))
            return default
        rule = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
        if type(value) is not int or value < low or (high is not None and value > high):
            raise SpecError(f"must be {rule}, not {value!r}", self.at(name))
        return value

    def seconds(self, name: str, default: float | None, low: float = 0.001, high: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                raise SpecError("is required", self.at(name))
            return default
        seconds = parse_duration(value, self.at(name))
        if seconds < low or (high is not None and seconds > high):
            limits = f"at least {low:g}s" + (f" and at most {high:g}s" if high is not None else "")
            raise SpecError(f"must be {limits}, not {value}", self.at(name))
        return seconds

    def percentile(self, name: str) -> float:
        value = self.get(name)
        if value is None:
            return 95.0
        text = str(value)
        if isinstance(value, bool | float) or not _PERCENTILE.fullmatch(text) or not 0 < float(text) < 100:
            raise SpecError(
                f'must be a whole number or a decimal string between 0 and 100, such as 95 or "99.9", not {value!r}',
                self.at(name),
            )
        return float(text)


def _mode(spec: _Fields) -> Mode:
    text = spec.text("mode", Mode.ENFORCE.value)
    try:
        return Mode(text)
    except ValueError:
        choices = ", ".join(mode.value for mode in Mode)
        raise SpecError(f"must be one of {choices}, not {text!r}", spec.at("mode")) from None


def _objectives(fields: _Fields) -> Objectives:
    fields.only("ttft", "tpot")
    ttft, tpot = fields.child("ttft"), fields.child("tpot")
    ttft.only("target", "percentile", "perThousandPromptTokens")
    tpot.only("target", "percentile")
    if not ttft.present and not tpot.present:
        raise SpecError("needs at least one objective: ttft, tpot, or both", fields.path)
    return Objectives(
        ttft=TtftObjective(
            target=ttft.seconds("target", None),
            percentile=ttft.percentile("percentile"),
            per_thousand_prompt_tokens=ttft.seconds("perThousandPromptTokens", 0.0, low=0.0),
        )
        if ttft.present
        else None,
        tpot=TpotObjective(target=tpot.seconds("target", None), percentile=tpot.percentile("percentile"))
        if tpot.present
        else None,
    )


def _classes(spec: _Fields, objectives: Objectives) -> tuple[tuple[PriorityClass, ...], str]:
    listed = spec.get("classes")
    if listed is None or listed == []:
        if spec.get("defaultClass") is not None:
            raise SpecError("names a class, and spec.classes lists none", spec.at("defaultClass"))
        return (PriorityClass(name="default", priority=0, objectives=objectives),), "default"
    if not isinstance(listed, list) or len(listed) > MAX_CLASSES:
        raise SpecError(f"must be a list of at most {MAX_CLASSES} classes", spec.at("classes"))
    classes: list[PriorityClass] = []
    for index, item in enumerate(listed):
        entry = _Fields(item, f"{spec.at('classes')}[{index}]")
        classes.append(_class(entry, objectives))
        if any(known.name == classes[-1].name for known in classes[:-1]):
            raise SpecError(f"must be unique, and {classes[-1].name!r} was already used", entry.at("name"))
        if any(known.priority == classes[-1].priority for known in classes[:-1]):
            raise SpecError(f"must be unique, and {classes[-1].priority} was already used", entry.at("priority"))
    tiers = [tier for known in classes for tier in known.service_tiers]
    for tier in tiers:
        if tiers.count(tier) > 1:
            raise SpecError(f"service tier {tier!r} may lead to one class only", spec.at("classes"))
    default_class = spec.text("defaultClass")
    if all(known.name != default_class for known in classes):
        names = ", ".join(known.name for known in classes)
        raise SpecError(f"must name one of spec.classes ({names}), not {default_class!r}", spec.at("defaultClass"))
    return tuple(sorted(classes, key=lambda known: -known.priority)), default_class


def _class(entry: _Fields, objectives: Objectives) -> PriorityClass:
    entry.only("name", "priority", "shares", "serviceTiers", "maxQueueTime", "objectives")
    tiers = entry.get("serviceTiers") or []
    if not isinstance(tiers, list) or not all(isinstance(tier, str) and tier for tier in tiers):
        raise SpecError(f"must be a list of strings, not {tiers!r}", entry.at("serviceTiers"))
    own = entry.child("objectives")
    if own.present:
        given = _objectives(own)
        objectives = Objectives(ttft=given.ttft or objectives.ttft, tpot=given.tpot or objectives.tpot)
    return PriorityClass(
        name=entry.label("name"),
        priority=entry.integer("priority", None, -1_000_000, 1_000_000),
        objectives=objectives,
        shares=entry.integer("shares", 1, 1, 1_000),
        service_tiers=tuple(tiers),
        max_queue_time=entry.seconds("maxQueueTime", None) if entry.get("maxQueueTime") is not None else None,
    )


def _bounds(fields: _Fields) -> Bounds:
    fields.only("replicas", "maxNumSeqs", "prefillTokenBudget")
    # A pool scaled to zero has nobody to answer the first request, so the floor is 1.
    replicas = _range(fields.child("replicas"), 1, 10_000)
    if replicas is not None and (replicas.min is None or replicas.max is None):
        raise SpecError("needs both min and max", fields.at("replicas"))
    return Bounds(
        replicas=replicas,
        max_num_seqs=_range(fields.child("maxNumSeqs"), 1, 65_536) or Range(min=1),
        prefill_token_budget=_range(fields.child("prefillTokenBudget"), 1, 1_048_576) or Range(min=1),
    )


def _range(fields: _Fields, low: int, high: int) -> Range | None:
    fields.only("min", "max")
    if not fields.present:
        return None
    least = fields.integer("min", None, low, high) if fields.get("min") is not None else None
    most = fields.integer("max", None, low, high) if fields.get("max") is not None else None
    if least is not None and most is not None and least > most:
        raise SpecError(f"min must be <= max, not {least} > {most}", fields.path)
    return Range(least, most)


def _stabilization(fields: _Fields, default: float) -> float:
    fields.only("stabilizationWindow")
    return fields.seconds("stabilizationWindow", default, low=0.0, high=3600.0)
