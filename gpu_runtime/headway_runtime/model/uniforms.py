"""Randomness without state: a token's uniform number is a function of (seed, choice, index in the output).

A generator object per request would give other tokens after a preemption, beside other neighbours, or with steps that
overlap. Here a token computed again is the same token. Not for secrets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48
"""Few enough that u · total stays below total in float64 arithmetic, many enough for any vocabulary."""


def stream_key(seed: int, choice: int) -> np.uint64:
    """The key of one output: different for every (seed, choice). `seed` is any int64, `choice` ≥ 0."""
    with np.errstate(over="ignore"):
        words = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
        return np.uint64(_mix(_mix(words) + np.uint64(choice) * _GOLDEN)[0])


def uniforms(keys: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (stream key, output index): (R,), (R,) → (R,)."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al.: Fast Splittable Pseudorandom Number Generators, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
