"""Stages of load on a release, one after the other without a pause, and what was seen of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from deeds import Deeds, PolicyWrite, Scaling
from fleet_watch import Look
from open_loop import Load, OpenLoop, Summary
from paced_release import SLO, PacedRelease

LATE = 0.05
"""A generator later than this share of the TTFT target, or iterations longer by this share than told: the run says
nothing."""
_AHEAD = 3.0
"""Seconds before a stage's end in which the next one's generator gets ready."""


class Inconclusive(Exception):
    """The machine was too busy for this run to say anything."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Seconds, seconds, and the share of requests that have to keep both."""

    ttft: float
    tpot: float
    share: float

    def kept_by(self, line: Mapping[str, Any]) -> bool:
        """Whether one request got what was promised, by the generator's stopwatch."""
        return line["outcome"] == "ok" and line["ttft"] <= self.ttft and line["tpot"] <= self.tpot


@dataclass(slots=True)
class Stage:
    """One stage as it went. Times are of the wall clock."""

    name: str
    load: Load
    promise: Promise
    begin: float
    before: int
    """Replicas asked for at the beginning."""
    end: float = 0.0
    after: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    """Of the ServingSLO at the end."""
    looks: list[Look] = field(default_factory=list)
    policies: list[PolicyWrite] = field(default_factory=list)
    scalings: list[Scaling] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    overrun: float = 0.0
    summary: Summary | None = None

    @property
    def arrivals(self) -> float:
        """Requests per second, as the seed made them."""
        return len(self.lines) / self.load.seconds

    @property
    def share_kept(self) -> float:
        """Of all that were sent in the second half; those that were refused are misses."""
        late = [line for line in self.lines if line["due"] >= self.begin + self.load.seconds / 2]
        return sum(map(self.promise.kept_by, late)) / len(late)

    @property
    def kept_after(self) -> float | None:
        """Seconds after which the promise was kept by all that came then, together; None: not while a quarter were
        still to come."""
        lines = sorted(self.lines, key=lambda line: line["due"])
        kept = [self.promise.kept_by(line) for line in lines]
        for at in range(len(lines) * 3 // 4 + 1):
            if sum(kept[at:]) >= self.promise.share * len(kept[at:]):
                return lines[at]["due"] - self.begin if at else 0.0
        return None


def run(
    release: PacedRelease, promise: Promise, loads: Mapping[str, Load], until: Mapping[str, Callable[[Look], bool]]
) -> list[Stage]:
    """The stages in order. One in `until` ends when that holds for a look at the replicas (within four minutes), not
    with its load.

    Raises:
        Inconclusive: the generator or the emulated accelerators were late.
    """
    stages: list[Stage] = []
    with ExitStack() as stack:
        watch = stack.enter_context(release.watch())
        running: list[OpenLoop] = []
        begin = time.time() + _AHEAD
        for name, load in loads.items():
            stage = Stage(name, load, promise, begin, before=release.scale)
            running.append(stack.enter_context(release.start_load(name, load, begin)))
            if stages:
                _finish(stages[-1], running[-2])
            stages.append(stage)
            time.sleep(max(0.0, begin + load.seconds - _AHEAD - time.time()))
            if name in until:
                release.cluster.wait_for(lambda: until[name](watch.last), f"the end of {name}", patience=240, pause=1)  # noqa: B023
            stage.status, stage.after = release.status, release.scale
            stage.end = begin = max(begin + load.seconds, time.time())
        _finish(stages[-1], running[-1])
    for stage in stages:
        _look_back(release, stage, watch.looks)
    return stages


def _finish(stage: Stage, loop: OpenLoop) -> None:
    stage.summary, stage.lines = loop.finish(), loop.lines()
    lengths = {line["prompt_tokens"] for line in stage.lines if line["outcome"] == "ok"}
    assert lengths == {stage.load.prompt_tokens}, (
        f"prompts of {lengths} tokens, {stage.load.prompt_tokens} were asked for"
    )


def _look_back(release: PacedRelease, stage: Stage, looks: list[Look]) -> None:
    deeds: Deeds = release.deeds
    stage.policies = deeds.policies(SLO, stage.begin, stage.end)
    stage.scalings = deeds.scalings(stage.begin, stage.end)
    stage.looks = [look for look in looks if stage.begin <= look.at < stage.end]
    stage.overrun = release.overrun(stage.begin, stage.end)
    assert stage.summary is not None
    if stage.summary.lag_p99 > LATE * stage.promise.ttft or stage.overrun > LATE:
        raise Inconclusive(
            f"{stage.name}: requests left up to {stage.summary.lag_p99:.3f} s late, iterations took "
            f"{stage.overrun:.1%} longer than told"
        )
