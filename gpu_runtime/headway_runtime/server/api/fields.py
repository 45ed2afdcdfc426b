"""Typed reads of one JSON object's members: null is unset, types are strict, and every complaint names its member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from headway_core.errors import RequestError
from headway_core.json_document import check_text

_WORDS = {bool: "true or false", int: "a whole number", str: "a string", list: "a list", dict: "an object"}
_T = TypeVar("_T")


class Fields:
    """`data`, whose members are read by name. `path` starts the names in complaints: ``messages[2].``."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path

    def get(self, name: str) -> Any:
        """Whatever is there; None when absent."""
        return self._data.get(name)

    def at(self, name: str) -> str:
        """The member's full name."""
        return f"{self._path}{name}"

    def text(self, name: str) -> str | None:
        """A string that is text. Raises RequestError."""
        value = self._typed(name, str)
        return None if value is None else check_text(value, self.at(name))

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; neither 1 nor "true" is one. Raises RequestError."""
        value = self._typed(name, bool)
        return default if value is None else value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """A whole number within bounds; 1.0 and true are none. Raises RequestError."""
        value = self._typed(name, int)
        if value is not None and (value < low or (high is not None and value > high)):
            rule = f"at least {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"must be {rule}, not {shown(value)}", self.at(name))
        return value

    def items(self, name: str) -> list[Any] | None:
        """A list. Raises RequestError."""
        return self._typed(name, list)

    def members(self, name: str) -> dict[str, Any] | None:
        """An object. Raises RequestError."""
        return self._typed(name, dict)

    def _typed(self, name: str, kind: type[_T]) -> _T | None:
        value = self._data.get(name)
        if value is None or type(value) is kind:
            return value
        raise RequestError(f"must be {_WORDS[kind]}, not {shown(value)}", self.at(name), "invalid_type")


def shown(value: object) -> str:
    """`value` for a message: ASCII, short."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "…"
