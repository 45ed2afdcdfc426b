"""The chart as Helm renders it, and combinations of values to render it with."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from cluster import binaries

ABSENT = object()
"""Stands for a value that is not given at all, which is not the same as null."""
CHART = Path(__file__).parents[2] / "charts" / "headway"


class RenderError(Exception):
    """Helm refused; the message is what a user sees."""


def render(
    *flags: str, values: Mapping[str, Any] | None = None, release: str = "rel", namespace: str = "ns1"
) -> list[dict[str, Any]]:
    """`helm template` with `values` as a values file. Raises RenderError."""
    return [
        document
        for document in yaml.safe_load_all(render_text(*flags, values=values, release=release, namespace=namespace))
        if document
    ]


def render_text(
    *flags: str, values: Mapping[str, Any] | None = None, release: str = "rel", namespace: str = "ns1"
) -> str:
    """The same as text."""
    command = [
        binaries.path("helm"),
        "template",
        release,
        str(CHART),
        "--namespace",
        namespace,
        "--values",
        "-",
        *flags,
    ]
    done = subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


def one(documents: Sequence[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The only document of that kind and name."""
    (found,) = (each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def container(documents: Sequence[dict[str, Any]], deployment: str) -> dict[str, Any]:
    """The first container of a Deployment."""
    found: dict[str, Any] = one(documents, "Deployment", deployment)["spec"]["template"]["spec"]["containers"][0]
    return found


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 1) -> list[dict[str, Any]]:
    """Rows that between them hold every pair of two factors' values; greedy, so some more rows than the fewest
    possible.

    Values are told apart by their place in the sequence: they may be equal and need not be hashable.
    """
    names = list(factors)
    places = {name: range(len(factors[name])) for name in names}
    open_pairs = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in places[a] for j in places[b]}
    dice = random.Random(seed)
    rows: list[dict[str, int]] = []
    while open_pairs:
        first, second = min(open_pairs)
        row = {first[0]: first[1], second[0]: second[1]}
        for name in dice.sample(names, len(names)):
            if name not in row:
                row[name] = max(places[name], key=lambda place, name=name: _gain(row, name, place, open_pairs))  # type: ignore[misc]
        open_pairs -= set(itertools.combinations(((name, row[name]) for name in names), 2))
        rows.append(row)
    return [{name: factors[name][place] for name, place in row.items()} for row in rows]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``, without what is `ABSENT`; what lies inside a block that is null is left
    out."""
    tree: dict[str, Any] = {}
    for path in sorted(flat, key=lambda path: path.count(".")):
        if flat[path] is ABSENT:
            continue
        *outer, last = path.split(".")
        place: Any = tree
        for name in outer:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[last] = flat[path]
    return tree


def _gain(row: Mapping[str, int], name: str, place: int, open_pairs: set[Any]) -> int:
    own = (name, place)
    return sum((own, other) in open_pairs or (other, own) in open_pairs for other in row.items())
