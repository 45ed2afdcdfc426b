"""Least squares with coefficients that must not be negative, exact, for a handful of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

_SINGULAR = 1e-9
"""Pivot, relative to a diagonal of ones, under which features are taken to be multiples of one another."""


def nonnegative_least_squares(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """The b ≥ 0 that minimises bᵀ·gram·b / 2 - momentᵀ·b; gram = Σ x·xᵀ, moment = Σ x·y of observations (x, y).

    The minimum is where the coefficients of some set of features solve their normal equations, are not negative, and
    the gradient of every other feature is not negative either (Karush, Kuhn, Tucker). With n features there are 2^n
    sets: all are tried, largest first. Features that are never seen, or are multiples of others, get 0.
    """
    size = len(moment)
    scale = [math.sqrt(gram[i][i]) or 1.0 for i in range(size)]
    scaled = [[gram[i][j] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
    target = [moment[i] / scale[i] for i in range(size)]
    tolerance = 1e-9 * max(1e-300, *map(abs, target))
    seen = [i for i in range(size) if gram[i][i] > 0]
    best, least = [0.0] * size, 0.0
    for count in range(len(seen), 0, -1):
        for chosen in combinations(seen, count):
            solved = _solve(scaled, target, chosen)
            if solved is None or min(solved) < 0:
                continue
            gradient = [sum(scaled[i][j] * b for j, b in zip(chosen, solved, strict=True)) - target[i] for i in seen]
            coefficients = [0.0] * size
            for i, b in zip(chosen, solved, strict=True):
                coefficients[i] = b / scale[i]
            if min(gradient) >= -tolerance:
                return coefficients
            value = -sum(target[i] * b for i, b in zip(chosen, solved, strict=True)) / 2
            if value < least:
                best, least = coefficients, value
    return best


def _solve(gram: Sequence[Sequence[float]], moment: Sequence[float], chosen: Sequence[int]) -> list[float] | None:
    """Solves the normal equations of the chosen features by Cholesky factors; None when they are dependent."""
    size = len(chosen)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            value = gram[chosen[i]][chosen[j]] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j:
                if value < _SINGULAR:
                    return None
                lower[i][i] = math.sqrt(value)
            else:
                lower[i][j] = value / lower[j][j]
    solved = [0.0] * size
    for i in range(size):
        solved[i] = (moment[chosen[i]] - sum(lower[i][k] * solved[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(size)):
        solved[i] = (solved[i] - sum(lower[k][i] * solved[k] for k in range(i + 1, size))) / lower[i][i]
    return solved
