"""What a flag may hold: functions for argparse's `type`, shared by all programs.

Each raises ArgumentTypeError, to which argparse adds the flag: the rule first, then what arrived.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable

from headway_core.durations import format_duration, parse_duration
from headway_core.errors import SpecError

DAY = 86_400.0
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|K|M|G|T|Ki|Mi|Gi|Ti)B?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from `low` to `high`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < low or (high is not None and value > high):
            rule = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ArgumentTypeError(f"must be {rule}, not {value}")
        return value

    return parse


port = whole_number(0, 65535)
"""A TCP port; 0 is any free one."""


def seconds(low: float, high: float = DAY) -> Callable[[str], float]:
    """Seconds as a plain number from `low` to `high`, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ArgumentTypeError(f"must be from {low:g} to {high:g} seconds, not {text!r}")
        return value

    return parse


def duration(low: float = 0.0) -> Callable[[str], float]:
    """Seconds of a GEP-2257 duration such as ``1m30s``, more than 0 and at least `low`."""

    def parse(text: str) -> float:
        try:
            value = parse_duration(text)
        except SpecError as error:
            raise ArgumentTypeError(error.reason) from None
        if value <= 0 or value < low:
            rule = f"at least {format_duration(low)}" if low else "more than 0s"
            raise ArgumentTypeError(f"must be {rule}, not {text}")
        return value

    return parse


def size(text: str) -> int:
    """Bytes of ``512MiB``, ``2G`` or a bare number, at least 1."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a size such as 512MiB, 2GiB or 1073741824")
    value = int(float(match[1]) * _UNITS[match[2]])
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1 byte, not {text}")
    return value


def dns_label(text: str) -> str:
    """A name as Kubernetes has them: at most 63 lower-case letters, digits and '-'."""
    if not DNS_LABEL.fullmatch(text):
        raise ArgumentTypeError(f"must be at most 63 lower-case letters, digits and '-', not {text!r}")
    return text


def step_time_coefficients(text: str) -> tuple[float, ...]:
    """``a,b,d,e`` in seconds: an iteration takes a + b·prefill tokens + d·decoding sequences + e·context tokens."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 4 or not all(math.isfinite(number) and number >= 0 for number in numbers) or numbers[0] <= 0:
        raise ArgumentTypeError(
            f"{text!r} is not four numbers of seconds a,b,d,e, such as 0.03,0.0005,0.002,0.00001 (a above 0, none "
            "negative)"
        )
    return numbers
