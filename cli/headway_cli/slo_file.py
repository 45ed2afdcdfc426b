"""A ServingSLO from a YAML file, the text that Kubernetes takes. Errors name file, line and field."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from headway_core.errors import SpecError
from headway_core.slo import ServingSLO
from headway_core.slo_parser import parse_slo

DEFAULT = Path(__file__).with_name("default-slo.yaml")
"""What `headway up` promises when no --slo is given."""

_MOST_NODES = 10_000
"""Lists, objects and values. Unbounded, a few lines of aliases to aliases make billions and stop `headway up`."""

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class SloFileError(SpecError):
    """`where` is ``file:line``, as editors and terminals link it."""

    def __init__(self, where: str, message: str, field: str = "") -> None:
        super().__init__(message, field)
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {super().__str__()}"


def read_slo(path: Path) -> ServingSLO:
    """The one ServingSLO in the file.

    Raises:
        SloFileError: the file cannot be read, is not one YAML document, repeats a key, or breaks a rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SloFileError(str(path), f"cannot be read: {error}") from error
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
        if len(nodes) != 1:
            raise SloFileError(str(path), f"must hold exactly one object, not {len(nodes)}")
        _refuse_repeated_keys(nodes[0], path)
        document = yaml.safe_load(text) if len(nodes) == 1 else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SloFileError(f"{path}:{line}", f"is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, SloFileError):
            raise
        raise SloFileError(str(path), f"is not YAML: {error}") from error
    try:
        return parse_slo(document)
    except SpecError as error:
        raise SloFileError(f"{path}:{_line(nodes[0], error.field)}", error.reason, error.field) from error


def _line(root: yaml.Node, field: str) -> int:
    """The line of the field, or of the deepest part of its path that is there."""
    node, line = root, root.start_mark.line
    for name, index in _STEP.findall(field):
        found: tuple[int, yaml.Node] | None = None
        if isinstance(node, yaml.MappingNode):
            found = next(((key.start_mark.line, value) for key, value in node.value if key.value == name), None)
        elif isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
            item = node.value[int(index)]
            found = (item.start_mark.line, item)
        if found is None:
            break
        line, node = found
    return int(line) + 1


def _refuse_repeated_keys(root: yaml.Node, path: Path) -> None:
    """Counts as it goes, each alias for all that it stands for."""
    left = [root]
    for _ in range(_MOST_NODES):
        if not left:
            return
        node = left.pop()
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    raise SloFileError(f"{path}:{key.start_mark.line + 1}", "is given twice", key.value)
                if isinstance(key.value, str):
                    seen.add(key.value)
                left += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            left.extend(node.value)
    raise SloFileError(
        str(path), f"holds more than {_MOST_NODES} values, its aliases written out: no ServingSLO needs as many"
    )
