"""One name, one thing: no class and no module of the product is called like another one, except those listed here."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for folder in ROOT.glob("*/headway_*") for path in folder.rglob("*.py")]

MOST_SHARED_CLASSES = 6
SHARED_CLASSES = {
    "Settings": "each component has its own, and reads nobody else's",
}
CONVENTIONAL_MODULES = {"__init__", "__main__", "app", "server", "settings", "metrics", "errors", "openapi"}
SHARED_MODULES = {
    "controller": "the operator's is one in the sense of Kubernetes, the core's is the admission controller",
    "plan": "the command `headway plan` shows what `headway_core.planning.plan` decides",
}


def places(names):
    """Name → the files that have it, for the names that more than one file has. `names`: file → its names."""
    found = defaultdict(list)
    for path, some in names.items():
        for name in set(some):
            found[name].append(str(path))
    return {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}


def public_classes(source):
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def test_no_public_class_is_called_like_another():
    assert len(FILES) > 150
    twice = places({path.relative_to(ROOT): public_classes(path.read_text()) for path in FILES})
    assert {name: paths for name, paths in twice.items() if name not in SHARED_CLASSES} == {}
    assert set(SHARED_CLASSES) <= set(twice), "what is listed is shared indeed"
    assert len(SHARED_CLASSES) <= MOST_SHARED_CLASSES


def test_no_module_is_called_like_another():
    twice = places({path.relative_to(ROOT): [path.stem] for path in FILES})
    assert {name: p for name, p in twice.items() if name not in CONVENTIONAL_MODULES | set(SHARED_MODULES)} == {}
    assert set(SHARED_MODULES) <= set(twice), "what is listed is shared indeed"


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("class Queue: ...", "class Queue(list): ...", {"Queue"}),
        ("class _Queue: ...", "class _Queue: ...", set()),
        ("class Queue: ...", "def Queue(): ...", set()),
    ],
)
def test_the_search_finds_what_it_is_for(first, second, shared):
    assert set(places({"a.py": public_classes(first), "b.py": public_classes(second)})) == shared
