"""Figures as people read them, in messages and tables. A figure that is not known is a dash."""

from __future__ import annotations

from collections.abc import Iterable

UNKNOWN = "–"


def format_seconds(seconds: float | None) -> str:
    """Three digits, in milliseconds below one second: ``31ms``, ``1.25s``; for GEP-2257 use `format_duration`."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.3g}ms"
    return f"{seconds:.3g}s" if abs(seconds) < 999.5 else f"{seconds:.0f}s"


def format_share(share: float | None) -> str:
    """A share of 0..1 in percent: ``97.0%``."""
    return UNKNOWN if share is None else f"{share:.1%}"


def format_number(value: float | None, digits: int = 1) -> str:
    """`value` with this many decimals."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def format_series(values: Iterable[float | None], factor: float, digits: int) -> str:
    """Figures of one cell, each times `factor`: ``0.12 / 0.98 / –``."""
    return " / ".join(format_number(None if value is None else value * factor, digits) for value in values)
