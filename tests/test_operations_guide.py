"""The operations guide against the code: every reason, metric and alert has its row, and no row is about something that
does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from headway_core.contract.policy import Knobs
from headway_core.planning.capacity import Binding, ReplicaCapacity
from headway_core.planning.conditions import feasible
from headway_core.planning.knobs import Estimate, KnobMemory, KnobPlan
from headway_gateway.app import Gateway
from headway_gateway.settings import parse
from headway_operator.metrics import REGISTRY
from headway_operator.status import ORDER, UNDECIDED
from headway_runtime.server.metrics import RuntimeMetrics
from prometheus_client import generate_latest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "operations.md").read_text()
SOURCES = [
    *sorted((ROOT / "operator" / "headway_operator").glob("*.py")),
    *sorted((ROOT / "core" / "headway_core" / "planning").glob("*.py")),
]
WORD = re.compile(r"[A-Z][A-Za-z]+")
KIND_OF_PAIRS = {"_find": "TargetResolved", "_failure": "KnobsApplied", "_as_asked": "Ready"}
"""Functions that give (reason, message) pairs, and the condition that those are for."""
KIND_OF_OTHERS = {"_refused_scaling": "ScalingActive"}
"""Functions that change a condition which they were given."""


def section(level: int, title: str) -> str:
    """The text under a heading, down to the next one of its level or above."""
    found = re.search(
        rf"^{'#' * level} {re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", GUIDE, re.MULTILINE | re.DOTALL
    )
    assert found, f"no heading {title}"
    return found[1]


def rows(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def word(node: ast.expr) -> str | None:
    return (
        node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value)
        else None
    )


def calls(function: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == name:
            yield node


def reasons_in_code() -> set[tuple[str, str]]:
    """(condition, reason) of every condition that the code can give."""
    found: set[tuple[str, str]] = set()
    for function in functions():
        own = KIND_OF_PAIRS.get(function.name) or KIND_OF_OTHERS.get(function.name)
        # A function about one condition may have a short form of its own, ``condition(status, reason, message)``.
        inner = next(
            (one for one in ast.walk(function) if isinstance(one, ast.FunctionDef) and one.name == "condition"), None
        )
        if inner is not None and inner is not function:
            own = next(kind for call in calls(inner, "Condition") if (kind := word(call.args[0])))
            found |= {(own, reason) for call in calls(function, "condition") if (reason := word(call.args[1]))}
        for call in calls(function, "Condition"):
            kinds = [word(call.args[0])]
            if (
                isinstance(call.args[0], ast.Name)
                and call.args[0].id == "kind"
                and word(call.args[2]) == "TargetNotResolved"
            ):
                continue  # told once in the guide, for all of `UNDECIDED`
            if len(call.args) > 2 and (reason := word(call.args[2])):
                kind = kinds[0] or own
                assert kind, f"{function.name} gives {reason} to an unknown condition: name it in this test"
                found.add((kind, reason))
        found |= {("Feasible", reason) for call in calls(function, "Unreachable") if (reason := word(call.args[0]))}
        if function.name in KIND_OF_PAIRS:
            pairs = [node for node in ast.walk(function) if isinstance(node, ast.Tuple) and len(node.elts) == 2]
            found |= {(KIND_OF_PAIRS[function.name], reason) for pair in pairs if (reason := word(pair.elts[0]))}
    return found | {("Feasible", bound_by(binding)) for binding in Binding}


def bound_by(binding: Binding) -> str:
    capacity = ReplicaCapacity(1.0, 1.0, 1.0, 1.0, binding, "")
    return feasible(KnobPlan(Knobs(), "", Estimate(capacity), KnobMemory())).reason


def decisions_in_code() -> set[str]:
    """Reasons of events that are no condition's."""
    found: set[str] = set()
    for function in functions():
        for name in ("SetKnobs", "Cordon", "Scale", "Decision", "warn"):
            for call in calls(function, name):
                found |= {reason for argument in call.args[1:] if (reason := word(argument))}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Assign)
                and getattr(node.targets[0], "id", "") == "reason"
                and function.name == "_scale_changes"
            ):
                found |= {
                    reason for part in ast.walk(node.value) if isinstance(part, ast.expr) and (reason := word(part))
                }
    return found


def test_every_reason_of_every_condition_has_its_row_and_no_row_is_made_up():
    code = reasons_in_code()
    guide = {(kind, reason) for kind in ORDER for reason in rows(section(3, kind))}
    assert len(code) > 50
    assert {kind for kind, _ in code} == set(ORDER)
    assert guide - code == set(), "the guide tells of reasons that nothing gives"
    assert code - guide == set(), "the guide lacks reasons"
    assert "TargetNotResolved" in GUIDE
    assert GUIDE.index("TargetNotResolved") < min(GUIDE.index(f"### {kind}\n") for kind in UNDECIDED)


def test_every_event_has_its_row():
    assert set(rows(section(2, "Events"))) == decisions_in_code()


def exported(exposition: bytes) -> set[str]:
    """Names as Prometheus sees them; what the library adds about a counter's age is none of ours."""
    names = re.findall(r"^# TYPE (headway_\w+) ", exposition.decode(), re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


async def test_every_metric_has_its_row():
    gateway = Gateway(parse(["--pool", "chat=127.0.0.1:1"]))
    assert set(rows(section(3, "Gateway"))) == exported(gateway.metrics.text())
    assert set(rows(section(3, "Runtime"))) == exported(RuntimeMetrics().render())
    assert set(rows(section(3, "Operator"))) == exported(generate_latest(REGISTRY))


def test_every_alert_has_its_row():
    groups = yaml.safe_load((ROOT / "charts" / "headway" / "files" / "alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    table = section(2, "Alerts")
    assert set(rows(table)) == set(rules)
    assert dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE)) == rules
