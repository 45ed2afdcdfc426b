"""The counters of all gateways of one pool, differenced and summed: what `Snapshot.traffic` is made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headway_core.contract.reports import ClassReport, GatewayReport
from headway_core.histogram import LogHistogram
from headway_core.planning.counter_window import CounterReading, CounterTotal, CounterWindow
from headway_core.planning.snapshot import ClassTraffic, Demand, Traffic

Key = tuple[str, str, str]
"""(class, figure, member): ``("batch", "attained", "ttft")``."""

_MAPS = ("outcomes", "shed", "attained", "judged", "ttft", "tpot")
_COUNTS = ("offered", "retries")


class TrafficWindow:
    """One pool's traffic. `record` each poll of the gateways, then ask for the `traffic` of a window."""

    def __init__(self, pool: str, window: float) -> None:
        self.pool = pool
        self.window = window
        self._counters: CounterWindow[Key] = CounterWindow(window)
        self._recorded_at = float("-inf")

    def record(self, reports: Mapping[str, GatewayReport], alive: Collection[str], now: float) -> None:
        """`reports` by gateway pod, `alive` all gateway pods. A gateway that does not know the pool counted nothing.

        A poll that is not newer than the last one recorded is that one again, and adds nothing.
        """
        if now <= self._recorded_at:
            return
        self._recorded_at = now
        self._counters.record(
            {name: CounterReading(report.boot_id, _flat(report, self.pool)) for name, report in reports.items()},
            alive,
            now,
        )

    def traffic(self, now: float) -> Traffic | None:
        """None until two polls span some time."""
        total = self._counters.total(self.window, now)
        steady = self._counters.steady_total(self.window, now)
        recent = self._counters.steady_total(self.window / 4, now) or steady
        if total is None or steady is None or recent is None:
            return None
        names = sorted({name for name, _, _ in total.increments})
        return Traffic(
            total.seconds, {name: _class_traffic(name, total) for name in names}, _demand(steady), _demand(recent)
        )


def _flat(report: GatewayReport, pool: str) -> dict[Key, int]:
    counters: dict[Key, int] = {}
    for known in report.pools:
        if known.pool == pool:
            for name, counted in known.classes.items():
                counters.update(_flat_class(name, counted))
    return counters


def _flat_class(name: str, counted: ClassReport) -> dict[Key, int]:
    counters = {(name, figure, ""): int(getattr(counted, figure)) for figure in _COUNTS}
    for figure in _MAPS:
        for member, count in getattr(counted, figure).items():
            counters[(name, figure, str(member))] = count
    return counters


def _class_traffic(name: str, total: CounterTotal[Key]) -> ClassTraffic:
    def members(figure: str) -> dict[str, int]:
        return {key[2]: count for key, count in total.increments.items() if key[:2] == (name, figure)}

    def histogram(figure: str) -> LogHistogram:
        return LogHistogram({int(index): count for index, count in members(figure).items()})

    return ClassTraffic(
        name=name,
        offered=total.get((name, "offered", "")),
        retries=total.get((name, "retries", "")),
        outcomes=members("outcomes"),
        shed=sum(members("shed").values()),
        attained=members("attained"),
        judged=members("judged"),
        ttft=histogram("ttft"),
        tpot=histogram("tpot"),
    )


def _demand(total: CounterTotal[Key]) -> Demand:
    arrived = sum(count for (_, figure, _), count in total.increments.items() if figure == "offered")
    retried = sum(count for (_, figure, _), count in total.increments.items() if figure == "retries")
    return Demand(max(0, arrived - retried), total.seconds)
