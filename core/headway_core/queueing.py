"""The few results of queueing theory that capacity and admission are reasoned with. Rates per second, times in seconds.

Every function raises ValueError for arguments that mean nothing (negative rates or times, second moments below the
square of the mean). At a utilization of 1 or more a queue has no steady state, and its wait is returned as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CustomerStream:
    """One stream of customers and its service time: arrivals per second λ, E[S] in seconds, E[S²] in seconds²."""

    rate: float
    mean: float
    second_moment: float

    def __post_init__(self) -> None:
        if self.rate < 0 or self.mean <= 0 or not math.isfinite(self.rate + self.mean + self.second_moment):
            raise ValueError(f"a stream has a rate of 0 or more and a positive mean service time, not {self}")
        if self.second_moment < self.mean * self.mean * (1 - 1e-9):
            raise ValueError(f"E[S²] is at least E[S]², not {self.second_moment} < {self.mean}²")

    @property
    def utilization(self) -> float:
        """ρ = λ·E[S]: the share of a server's time that the stream asks for."""
        return self.rate * self.mean


def little_number(rate: float, seconds: float) -> float:
    """L = λ·W: how many are inside on average, in any steady state (Little, Operations Research 9, 1961)."""
    _not_negative(rate=rate, seconds=seconds)
    return rate * seconds


def little_wait(number: float, rate: float) -> float:
    """W = L / λ: how long each is inside on average. Infinite when some are inside and nobody leaves; 0 if none are."""
    _not_negative(number=number, rate=rate)
    if number == 0:
        return 0.0
    return number / rate if rate else math.inf


def kingman_wait(rate: float, mean: float, arrival_cv: float, service_cv: float) -> float:
    """Approximate mean wait of G/G/1: ρ/(1-ρ) · (c_a² + c_s²)/2 · E[S] (Kingman, Math. Proc. Cambridge 57, 1961).

    `arrival_cv` and `service_cv`: σ / mean of inter-arrival and service times. Exact for M/G/1, close at high ρ.
    """
    _not_negative(rate=rate, mean=mean, arrival_cv=arrival_cv, service_cv=service_cv)
    rho = rate * mean
    return math.inf if rho >= 1 else rho / (1 - rho) * (arrival_cv**2 + service_cv**2) / 2 * mean


def kingman_bound(rate: float, mean: float, arrival_cv: float, service_cv: float) -> float:
    """Upper bound of G/G/1's mean wait: λ·(σ_a² + σ_s²) / (2·(1-ρ)) (Kingman, J. Royal Stat. Soc. B 24, 1962)."""
    _not_negative(rate=rate, mean=mean, arrival_cv=arrival_cv, service_cv=service_cv)
    rho = rate * mean
    if rate == 0:
        return 0.0
    return math.inf if rho >= 1 else rate * ((arrival_cv / rate) ** 2 + (service_cv * mean) ** 2) / (2 * (1 - rho))


def mg1_wait(stream: CustomerStream) -> float:
    """Mean wait in an M/G/1 queue, first come first served: λ·E[S²] / (2·(1-ρ)) (Pollaczek 1930, Khinchine 1932)."""
    return mg1_priority_waits((stream,))[0]


def mg1_priority_waits(streams: Sequence[CustomerStream]) -> tuple[float, ...]:
    """Mean wait of each class in an M/G/1 queue with non-preemptive priorities (Cobham, Operations Research 2, 1954).

    `streams` from the highest class to the lowest. W_k = R / ((1-σ_{k-1})·(1-σ_k)) with R = Σ λ_i·E[S_i²] / 2 over all
    classes, since a service under way is not interrupted, and σ_k the utilization of the first k. Classes from the
    first with σ_k ≥ 1 on wait for ever; those before it do not, and the customer that they find in service is then of
    any class in the proportion that still gets served.
    """
    waits: list[float] = []
    residual = _residual(streams)
    above = 0.0
    for stream in streams:
        with_own = above + stream.utilization
        waits.append(residual / ((1 - above) * (1 - with_own)) if with_own < 1 else math.inf)
        above = with_own
    return tuple(waits)


def _residual(streams: Sequence[CustomerStream]) -> float:
    """Mean time left of the service that an arrival finds: each class with the share of time that it really gets."""
    left, residual = 1.0, 0.0
    for stream in streams:
        share = min(stream.utilization, left)
        residual += share * stream.second_moment / (2 * stream.mean)
        left -= share
    return residual


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0 or math.isinf(value):
            raise ValueError(f"{name} must be finite and at least 0, not {value}")
