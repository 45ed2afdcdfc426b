"""Durations as Kubernetes writes them (GEP-2257): ``1h30m``, ``1s500ms``; whole milliseconds, no sign, no decimals."""

from __future__ import annotations

import re

from headway_core.errors import SpecError

PATTERN = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
"""The regular expression of GEP-2257, also in the CRD's schema."""

_WHOLE = re.compile(PATTERN)
_PART = re.compile(r"([0-9]{1,5})(h|ms|m|s)")
_MILLISECONDS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


def parse_duration(text: object, field: str = "") -> float:
    """Seconds of a GEP-2257 duration.

    Raises:
        SpecError: `text` is not such a duration; the message names `field` and shows one that is.
    """
    if not isinstance(text, str) or not _WHOLE.fullmatch(text):
        raise SpecError(f"must be a duration such as 500ms, 2s or 1m30s, not {text!r}", field)
    return sum(int(number) * _MILLISECONDS[unit] for number, unit in _PART.findall(text)) / 1000


def format_duration(seconds: float) -> str:
    """The shortest GEP-2257 spelling of `seconds`, rounded to whole milliseconds.

    Raises:
        ValueError: `seconds` is negative, or longer than 99,999 hours can say.
    """
    rest = round(seconds * 1000)
    if rest < 0 or rest >= 100_000 * _MILLISECONDS["h"]:
        raise ValueError(f"a duration lies between 0 and 99999h, not {seconds} s")
    text = ""
    for unit, size in _MILLISECONDS.items():
        count, rest = divmod(rest, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
