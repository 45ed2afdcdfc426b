"""Dataclasses to JSON documents and back: camelCase names, strict types, unknown members ignored.

A newer writer may add members, so a reader ignores what it does not know. A member with the wrong type is an error
that names its path: a guess would turn "unknown" into a number.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from headway_core.errors import DocumentError

T = TypeVar("T")

_WORDS = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
"""The scalar types, and what each is called in a message."""
_ACRONYMS = {"slo_uid": "sloUID"}


def member_name(field_name: str) -> str:
    """The JSON member that a dataclass field is written as: ``max_num_seqs`` → ``maxNumSeqs``."""
    if field_name in _ACRONYMS:
        return _ACRONYMS[field_name]
    head, *rest = field_name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def encode(value: object) -> Any:
    """`value` (a dataclass, or made of plain types) as what ``json.dumps`` takes. A field that is None is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: encode(member)
            for field, name, _, _ in _members(type(value))
            if (member := getattr(value, field)) is not None
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
        DocumentError: a member (path in `field`) is missing, has another type, or breaks an invariant of the dataclass.
    """
    return cast(T, _decode(kind, data, path))


@functools.lru_cache(maxsize=256)
def _members(kind: type) -> tuple[tuple[str, str, Any, bool], ...]:
    """(field, member, type, whether it must be there) of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            field.name,
            member_name(field.name),
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    )


def _decode(kind: Any, data: object, path: str) -> object:
    if kind in _WORDS:
        return _scalar(kind, data, path)
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
    try:
        return kind(data)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise DocumentError(f"must be one of {choices}, not {data!r}", path) from None


def _key(kind: type, name: str, path: str) -> object:
    if kind is not int:
        return name
    try:
        return int(name)
    except ValueError:
        raise DocumentError(f"has members named by whole numbers, not {name!r}", path) from None


def _scalar(kind: type, data: object, path: str) -> object:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        number = float(data) if abs(data) <= sys.float_info.max else math.inf
        if not math.isfinite(number):
            raise DocumentError(f"must be a finite number, not {str(data)[:40]}", path)
        return number
    if kind in (int, str, bool) and type(data) is kind:
        return data
    raise DocumentError(f"must be {_WORDS[kind]}, not {data!r}", path)


def _decode_dataclass(kind: type, data: object, path: str) -> object:
    if not isinstance(data, dict):
        raise DocumentError(f"must be an object, not {data!r}", path)
    arguments: dict[str, object] = {}
    for field, name, hint, required in _members(kind):
        if name in data:
            arguments[field] = _decode(hint, data[name], f"{path}.{name}" if path else name)
        elif required:
            raise DocumentError("is required", f"{path}.{name}" if path else name)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DocumentError(str(error), path) from error
