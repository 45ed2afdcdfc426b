"""A request body as a JSON object, strictly: what json.loads lets pass and another parser would read differently is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from headway_core.errors import RequestError


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a dictionary. Raises RequestError (400) for anything that is not one well-formed JSON object in UTF-8.

    Duplicate keys, NaN and Infinity, numbers beyond a double, a byte order mark, text after the object and nesting deeper than the
    interpreter's limit are all refused.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json") from None
    if text.startswith("\ufeff"):
        raise RequestError("the body starts with a byte order mark: send plain UTF-8", code="invalid_json")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    return value


def check_text(text: str, field: str) -> str:
    """`text` itself. Raises RequestError when it holds a lone surrogate, which no encoding of text can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"holds an unpaired surrogate escape at character {error.start}: that is not text", field) from None
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {ascii(name)[:80]} appears twice in one object")
            seen.add(name)
    return result


def _constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of a double")
    return value


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
