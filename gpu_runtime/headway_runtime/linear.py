"""Matrix products with weights that never change: laid out once for the processor, where it has a layout that is faster.

oneDNN's blocked layout is reached through two private operators of torch, so they are probed at start, compared with the plain product,
and done without when they are not there. No model is known here.
"""

from __future__ import annotations

import torch
from torch.nn import functional


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


class Linear:
    """x @ weight.T + bias. `packed`: the weight is kept in the processor's own layout alone."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, packed: bool) -> None:
        self.packed = packed
        self._weight = _pack(weight) if packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) → (rows, out)."""
        if self.packed:
            return _packed_product(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
