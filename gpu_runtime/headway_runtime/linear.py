"""Matrix products with weights that never change, in the layout that is fastest on this processor for the number of rows at hand.

oneDNN's blocked layout is reached through two private operators of torch, so they are probed at start, compared with the plain product,
and done without when they are not there. It wins where few rows stream the weights from memory; on some processors the plain product
wins where many rows share them. Which is so is measured at start, on the model's own weights. No model is known here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

MANY_ROWS = 128
"""From here on rows are many. Between 64 and 128 the two layouts were within 3% of each other wherever it was measured."""
_WORTH_A_COPY = 1.03
"""The plain product must be faster by this to be kept beside the packed one."""
_MEMORY_SHARE = 0.1
"""A second copy of the weights may take at most this part of the machine's memory."""


def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the packed product exists here and agrees with the plain one: tried on a small example, never assumed."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 32), generator=generator).to(dtype)
    x = torch.randn((5, 32), generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        product = _packed_product(x, _pack(weight), bias)
    except (AttributeError, RuntimeError, NotImplementedError):  # another torch, or a processor that lacks the format
        return False
    return torch.allclose(product.float(), functional.linear(x, weight, bias).float(), rtol=0.02, atol=0.02)


def plain_pays(weights: list[torch.Tensor], total_bytes: int) -> bool:
    """Whether to keep a plain copy beside the packed one, for products of many rows: it is faster here, and there is memory for it.

    `weights` are a few of the model's own matrices, `total_bytes` the size of all that would be kept twice.
    """
    if total_bytes > _MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return False
    plain = packed = 0.0
    for weight in weights:
        x = torch.ones((2 * MANY_ROWS, weight.shape[1]), dtype=weight.dtype)
        layout = _pack(weight)
        plain += _seconds(partial(functional.linear, x, weight))
        packed += _seconds(partial(_packed_product, x, layout, None))
    return packed > _WORTH_A_COPY * plain


class Linear:
    """x @ weight.T + bias. `packed`: use the processor's own layout; `plain`: keep the ordinary one too, for many rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, packed: bool, plain: bool) -> None:
        self._bias = bias
        self._packed = _pack(weight) if packed else None
        self._plain = weight if plain or not packed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) → (rows, out)."""
        if self._packed is None or (self._plain is not None and len(x) >= MANY_ROWS):
            return functional.linear(x, self._plain, self._bias)  # type: ignore[arg-type] # one of the two is there
        return _packed_product(x, self._packed, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """The best of five, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
