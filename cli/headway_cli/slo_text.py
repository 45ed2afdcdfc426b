"""A class's objectives in one line, for messages."""

from __future__ import annotations

from headway_core.durations import format_duration
from headway_core.slo import PriorityClass


def slo_in_words(known: PriorityClass) -> str:
    """``interactive: TTFT 1s for 95%, TPOT 50ms for 99.9%``."""
    ttft, tpot = known.objectives.ttft, known.objectives.tpot
    words = []
    if ttft is not None:
        more = ttft.per_thousand_prompt_tokens
        grows = f" + {format_duration(more)} per 1000 prompt tokens" if more else ""
        words.append(f"TTFT {format_duration(ttft.target)}{grows} for {ttft.percentile:g}%")
    if tpot is not None:
        words.append(f"TPOT {format_duration(tpot.target)} for {tpot.percentile:g}%")
    return f"{known.name}: {', '.join(words)}"
