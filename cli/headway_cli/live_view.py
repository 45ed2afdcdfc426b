"""What `headway up` shows while it runs: one row per class, as a table on a terminal, as plain lines elsewhere.

A closed pipe or a full disk under the output loses the output and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from headway_core.formatting import format_number, format_seconds, format_share
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000
_PLAIN_EVERY = 10.0
"""Seconds between two plain status lines."""


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """One objective against what happened. Seconds; None is unknown, or nothing promised."""

    value: float | None = None
    """At the promised percentile."""
    target: float | None = None
    per_thousand: float = 0.0
    """What each thousand prompt tokens add to the target."""
    kept: bool | None = None
    """Whether enough requests kept it: with a target that grows with the prompt, the value alone does not tell."""

    @property
    def limit(self) -> str:
        """The target in words."""
        return format_seconds(self.target) + (f" + {format_seconds(self.per_thousand)}/1k" if self.per_thousand else "")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class over the evaluation window. Shares in 0..1; None is unknown and shows as a dash."""

    name: str
    rate: float | None
    ttft: ObjectiveStatus
    tpot: ObjectiveStatus
    attainment: float | None
    queued: int
    shed: float | None
    """Share of the offered requests that was shed."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the live view shows at one time."""

    classes: Sequence[ClassRow]
    replicas_ready: int
    replicas: int
    running: int
    waiting: int
    max_num_seqs: int | None
    prefill_token_budget: int | None
    note: str
    """The planner's latest reason, or what is being waited for."""


class _Console(Console):
    """A console that goes quiet when its pipe is closed, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """The lines to come go nowhere, those that are still buffered as well."""
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


class LiveView:
    """Shows a `Status` again and again, and messages in between. Use as a context manager."""

    def __init__(self, stream: TextIO) -> None:
        if isinstance(stream, io.TextIOWrapper):
            # A dash that the terminal's encoding lacks becomes a question mark.
            stream.reconfigure(errors="replace")
        self._console = _Console(file=stream, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._last_plain = float("-inf")
        self._last_line = ""

    def __enter__(self) -> LiveView:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        with contextlib.suppress(OSError):
            self._console.print(Text(message), soft_wrap=True)

    def show(self, status: Status, now: float) -> None:
        """Replaces the table, or prints one line when something changed and the last is old enough."""
        if self._live:
            with contextlib.suppress(OSError):
                table = _table(status)
                # Squeezed into fewer columns than it needs, a table shows dots instead of figures.
                fits = (
                    Measurement.get(self._console, self._console.options.update_width(_ANY_WIDTH), table).maximum
                    <= self._console.width
                )
                figures = table if fits else Text("\n".join(map(_in_words, status.classes)))
                self._live.update(Group(figures, Text(f"{_machine(status)}\n{status.note}", style="dim")), refresh=True)
            return
        line = _plain(status)
        if line != self._last_line and now - self._last_plain >= _PLAIN_EVERY:
            self.say(line)
            self._last_plain, self._last_line = now, line


def _table(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("class", "req/s", "TTFT", "target", "TPOT", "target", "attained", "queue", "shed"):
        table.add_column(head, justify="left" if head == "class" else "right")
    for row in status.classes:
        table.add_row(
            row.name,
            format_number(row.rate),
            _colored(row.ttft),
            row.ttft.limit,
            _colored(row.tpot),
            row.tpot.limit,
            format_share(row.attainment),
            str(row.queued),
            format_share(row.shed),
        )
    return table


def _plain(status: Status) -> str:
    return f"{'; '.join(map(_in_words, status.classes))} | {_machine(status)} | {status.note}"


def _in_words(row: ClassRow) -> str:
    return (
        f"{row.name}: {format_number(row.rate)} req/s, TTFT {format_seconds(row.ttft.value)} of {row.ttft.limit}, "
        f"TPOT {format_seconds(row.tpot.value)} of {row.tpot.limit}, attained {format_share(row.attainment)}, "
        f"queue {row.queued}, shed {format_share(row.shed)}"
    )


def _machine(status: Status) -> str:
    knobs = f"max_num_seqs {status.max_num_seqs or '–'}, prefill token budget {status.prefill_token_budget or '–'}"
    return (
        f"replicas {status.replicas_ready}/{status.replicas}, running {status.running}, waiting "
        f"{status.waiting}, {knobs}"
    )


def _colored(objective: ObjectiveStatus) -> Text:
    style = {None: "", True: "green", False: "red"}[objective.kept]
    return Text(format_seconds(objective.value), style=style)
