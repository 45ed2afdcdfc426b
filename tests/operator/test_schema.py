"""The CRD, the examples and the operator must speak of the same fields; the API server's own judgment is asked in
`cluster/`."""

import re
from pathlib import Path

import pytest
import yaml
from headway_core.durations import PATTERN
from headway_core.slo_parser import parse_slo
from headway_operator import schema
from headway_operator.status import ORDER

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "servingslos.headway.dev.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_operator_knows_exactly_the_fields_of_the_crd():
    served = {leaf for leaf in schema.leaves(SCHEMA) if leaf.startswith(("spec.", "status."))}
    assert served - {"spec.objectives"} == schema.FIELDS


def walk(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")


def test_every_field_is_described_and_every_default_and_bound_is_said():
    for path, node in walk(SCHEMA):
        if path.startswith((".spec", ".status")) and not path.endswith("[]"):
            text = node.get("description", "")
            assert len(text) > 10, path
            if "default" in node and not isinstance(node["default"], dict):
                assert f"Default: {node['default']}" in text, path
            if node.get("type") == "integer" and "minimum" in node:
                assert str(node["minimum"]) in text, path
                assert str(node["maximum"]) in text, path


def test_every_duration_has_the_parsers_pattern_and_a_length():
    patterns = [node for _, node in walk(SCHEMA["properties"]["spec"]) if "(h|m|s|ms)" in node.get("pattern", "")]
    assert len(patterns) >= 10
    assert {node["pattern"] for node in patterns} == {PATTERN}
    assert all("maxLength" in node for node in patterns)


def test_the_columns_are_those_that_people_were_promised():
    columns = [(column["name"], column.get("priority", 0)) for column in VERSION["additionalPrinterColumns"]]
    assert [name for name, priority in columns if priority == 0] == [
        "Target",
        "TTFT",
        "TPOT",
        "Met",
        "Replicas",
        "Mode",
        "Ready",
        "Reason",
        "Age",
    ]
    assert len([name for name, priority in columns if priority == 1]) >= 3
    for column in VERSION["additionalPrinterColumns"]:
        kind = re.search(r'type=="(\w+)"', column["jsonPath"])
        assert kind is None or kind[1] in ORDER
        leaf = column["jsonPath"].lstrip(".")
        assert kind or leaf.startswith("metadata") or leaf in schema.FIELDS, leaf


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"minimal", "chat", "batch", "observe"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_understood(path):
    slo = parse_slo(yaml.safe_load(path.read_text()))
    assert slo.gateway_name is not None
