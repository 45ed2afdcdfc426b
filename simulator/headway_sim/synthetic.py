"""Made-up traces with the statistics of the published ones: quantiles of lengths and gaps, and shares of prefixes.

Use them where the files are not at hand (they are not part of this project). Correlations between neighbours are not
imitated, since lengths show next to none; only the code trace has them: its short gaps follow short gaps.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from headway_sim.traces import MOONCAKE_BLOCK, TraceRequest

_AT = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The quantiles that the tables below give."""
_GAP_FLOOR = 1e-5
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Family:
    """One published trace: its rate, and at the quantiles `_AT` its lengths (tokens) and gaps (seconds)."""

    rate: float
    prompt: tuple[float, ...]
    output: tuple[float, ...]
    gaps: tuple[float, ...] | None = None
    """None: groups every `group_seconds`, of gamma-Poisson size."""
    persistence: float = 0.0
    """How much a gap takes after the one before it: the AR(1) coefficient of a Gaussian copula, in [0, 1)."""
    group_seconds: float = 0.0
    continued: float = 0.0
    """Share of requests that continue an earlier conversation."""


# Unformatted: the numbers of one quantity stand together.
# fmt: off
FAMILIES = {
    "conv": Family(
        rate=5.53,
        prompt=(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6122, 14050),
        output=(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000),
        gaps=(0, 0.0005, 0.0063, 0.0161, 0.0365, 0.0607, 0.0873, 0.1184,
              0.1587, 0.2136, 0.2888, 0.4205, 0.565, 0.889, 1.3765, 4.3146),
    ),
    "code": Family(
        rate=2.57,
        prompt=(3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3192, 5186, 7302, 7436, 7437, 7437),
        output=(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 249, 824, 1899),
        gaps=(0, 0, 0.0001, 0.0002, 0.0012, 0.0033, 0.0151, 0.0638,
              0.095, 0.1001, 0.16, 0.2728, 0.4008, 2.2046, 78.4441, 217.169),
        persistence=0.7,
    ),
    "mooncake": Family(
        rate=3.40,
        prompt=(891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39549, 85399, 121298, 126195),
        output=(1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1115, 2000, 2000),
        group_seconds=3.0,
        continued=0.78,
    ),
}
# fmt: on


def synthetic(family: str, requests: int, seed: int = 0) -> list[TraceRequest]:
    """`requests` requests like those of `family` (a name in `FAMILIES`); the same seed gives the same trace.

    Raises:
        ValueError: no such family, or fewer than two requests.
    """
    known = FAMILIES.get(family)
    if known is None or requests < 2:
        raise ValueError(
            f"needs a family of {', '.join(FAMILIES)} and at least 2 requests, not {family!r} and {requests}"
        )
    rng = random.Random(seed)
    arrivals = (
        _grouped(known, requests, rng) if known.gaps is None else _spaced(known.gaps, known.persistence, requests, rng)
    )
    factor = requests / known.rate / arrivals[-1]
    trace: list[TraceRequest] = []
    fresh = 0
    for at in arrivals:
        prompt = max(1, round(_draw(known.prompt, rng)))
        output = max(1, round(_draw(known.output, rng)))
        prefix: tuple[int, ...] = ()
        if known.continued:
            parent = rng.choice(trace[-400:]).prefix if trace and rng.random() < known.continued else ()
            blocks = -(-prompt // MOONCAKE_BLOCK)
            # Every conversation begins with the one system prompt: id 0.
            head = (parent or (0,))[:blocks]
            prefix = head + tuple(range(fresh + 1, fresh + 1 + blocks - len(head)))
            fresh += blocks - len(head)
        trace.append(TraceRequest(at * factor, prompt, output, prefix))
    return trace


def _spaced(gaps: tuple[float, ...], persistence: float, requests: int, rng: random.Random) -> list[float]:
    """Gaps of the given distribution: where most are tiny and a few are minutes long, bursts come by themselves."""
    at = 0.0
    arrivals = [at]
    state = rng.gauss()
    for _ in range(requests - 1):
        state = persistence * state + math.sqrt(1 - persistence * persistence) * rng.gauss()
        at += _inverse(gaps, _NORMAL.cdf(state))
        arrivals.append(at)
    return arrivals


def _grouped(family: Family, requests: int, rng: random.Random) -> list[float]:
    arrivals: list[float] = []
    at = 0.0
    while len(arrivals) < requests:
        # Twice the variance of a Poisson number, as in the trace.
        mean = family.rate * family.group_seconds
        arrivals += [at] * _poisson(rng.gammavariate(mean, 1.0), rng)
        at += family.group_seconds
    return arrivals[:requests]


def _draw(quantiles: tuple[float, ...], rng: random.Random) -> float:
    return _inverse(quantiles, rng.random())


def _inverse(quantiles: tuple[float, ...], u: float) -> float:
    """Inverse of the distribution function, straight between the quantiles on a logarithmic scale."""
    index = min(bisect.bisect_right(_AT, u), len(_AT) - 1)
    low, high = (math.log(max(_GAP_FLOOR, quantiles[i])) for i in (index - 1, index))
    return math.exp(low + (high - low) * (u - _AT[index - 1]) / (_AT[index] - _AT[index - 1]))


def _poisson(mean: float, rng: random.Random) -> int:
    """Knuth's product of uniforms; the means here are about ten."""
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count
