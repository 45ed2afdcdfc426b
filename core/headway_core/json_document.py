"""A request body as a JSON object, strictly: refuses what json.loads passes and another parser reads differently."""

from __future__ import annotations

import json
import json.scanner
import math
from collections.abc import Callable
from typing import Any

from headway_core.errors import RequestError

LARGE_BYTES = 256 * 1024
"""From here on a worker thread reads: the densest smaller body takes some ms, each MiB more some tenths of a second."""
MAX_CONTAINERS = 100_000
"""Lists and objects in a large body; a smaller one holds fewer. Each takes up to 20 times its bytes in the body."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a dictionary. Raises RequestError (400) for anything but one well-formed JSON object in UTF-8.

    Duplicate keys, NaN and Infinity, numbers beyond a double, a byte order mark, text after the object, nesting deeper
    than the interpreter's limit and more than `MAX_CONTAINERS` lists and objects are all refused.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json"
        ) from None
    if text.startswith("\ufeff"):
        raise RequestError("the body starts with a byte order mark: send plain UTF-8", code="invalid_json")
    try:
        value = (_DECODER if len(body) < LARGE_BYTES else _YieldingDecoder()).decode(text)
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
        raise RequestError(
            f"holds an unpaired surrogate escape at character {error.start}: that is not text", field
        ) from None
    return text


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


class _YieldingDecoder(_Decoder):
    """Lets other threads run meanwhile: the standard library's C scanner holds the interpreter to the end.

    Strings, which make most bodies large, are scanned in C all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = MAX_CONTAINERS
        # What the scanner calls for a list and an object: attributes that type stubs leave out.
        self.parse_array = self._counted(self.parse_array)  # type: ignore[has-type]
        self.parse_object = self._counted(self.parse_object)  # type: ignore[has-type]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise RequestError(
                    f"the body holds more than {MAX_CONTAINERS} lists and objects: send fewer", code="invalid_json"
                )
            return parse(*arguments)

        return counted


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


_DECODER = _Decoder()
"""Made once: making one costs more than reading most bodies."""
