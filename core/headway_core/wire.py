"""Dataclasses to JSON documents and back: camelCase names, strict types, unknown members ignored.

A newer writer may add members that an older reader has never heard of, so unknown ones are passed over; a member that is there
with the wrong type is an error that names its path, because a guess would turn "unknown" into a number.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from headway_core.errors import DocumentError

T = TypeVar("T")

_ACRONYMS = {"slo_uid": "sloUID"}


def member_name(field_name: str) -> str:
    """The JSON member that a dataclass field is written as: ``max_num_seqs`` → ``maxNumSeqs``."""
    if field_name in _ACRONYMS:
        return _ACRONYMS[field_name]
    head, *rest = field_name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def encode(value: object) -> Any:
    """`value` (a dataclass, or anything made of plain types) as what ``json.dumps`` takes. A field that is None is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            member_name(field.name): encode(member)
            for field in dataclasses.fields(value)
            if (member := getattr(value, field.name)) is not None
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(member) for key, member in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [encode(member) for member in value]
    return value


def decode(kind: type[T], data: object, path: str = "") -> T:
    """`data` (from ``json.loads``) as an instance of the dataclass `kind`.

    Raises:
        DocumentError: a member is missing, has another type, or breaks an invariant of the dataclass; `field` is its path.
    """
    return cast(T, _decode(kind, data, path))


@functools.lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, data: object, path: str) -> object:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        members = typing.get_args(kind)
        if data is None and type(None) in members:
            return None
        return _decode(next(member for member in members if member is not type(None)), data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise DocumentError(f"must be a list, not {data!r}", path)
        (item, _) = typing.get_args(kind)
        return tuple(_decode(item, member, f"{path}[{index}]") for index, member in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise DocumentError(f"must be an object, not {data!r}", path)
        key, item = typing.get_args(kind)
        return {_key(key, name, path): _decode(item, member, f"{path}.{name}") for name, member in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError:
            choices = ", ".join(str(member.value) for member in kind)
            raise DocumentError(f"must be one of {choices}, not {data!r}", path) from None
    return _scalar(kind, data, path)


def _key(kind: type, name: str, path: str) -> object:
    if kind is not int:
        return name
    try:
        return int(name)
    except ValueError:
        raise DocumentError(f"has members named by whole numbers, not {name!r}", path) from None


def _scalar(kind: type, data: object, path: str) -> object:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise DocumentError(f"must be a finite number, not {data!r}", path)
        return float(data)
    if kind in (int, str, bool) and type(data) is kind:
        return data
    word = {
        float: "a number",
        int: "a whole number",
        str: "a string",
        bool: "true or false",
    }.get(kind, str(kind))
    raise DocumentError(f"must be {word}, not {data!r}", path)


def _decode_dataclass(kind: type, data: object, path: str) -> object:
    if not isinstance(data, dict):
        raise DocumentError(f"must be an object, not {data!r}", path)
    hints = _hints(kind)
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(kind):
        name = member_name(field.name)
        where = f"{path}.{name}" if path else name
        if name in data:
            arguments[field.name] = _decode(hints[field.name], data[name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DocumentError("is required", where)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DocumentError(str(error), path) from error
