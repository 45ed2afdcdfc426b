"""Matrix products with weights that never change, in the layout that is fastest here for the number of rows.

Three layouts are known: the ordinary one, oneDNN's blocked one, which is reached through two private operators of
torch, and our own (`kernels/matrix_product.c`, float32), which needs a C compiler. Each is tried at start, compared
with the ordinary product, and done without where it is missing or wrong. Which one serves few rows and which one many
is measured, on the model's own weights. No model is known here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from headway_runtime.model.kernels.library import Kernels, kernels

MANY_ROWS = 128
"""From here on rows are many. Between 64 and 128 no two layouts changed places wherever it was measured."""
_FEW_MEASURED, _MANY_MEASURED = 8, 256
_WORTH_A_COPY = 1.03
"""What serves many rows must be faster by this to be kept beside what serves few."""
_MEMORY_SHARE = 0.1
"""A second copy of the weights may take at most this part of the machine's memory."""
_PANEL_BYTES = 18 << 10
"""Of a panel of weights at one depth: it stays in a first-level cache of 32 KiB beside the inputs of six rows."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""(rows, in) → (rows, out)."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """A way to lay out weights (out, in) and a bias (out,) or None, and to multiply with them."""

    name: str
    lay_out: Callable[[torch.Tensor, torch.Tensor | None], Product]


@dataclass(frozen=True, slots=True)
class WeightLayouts:
    """What serves fewer than MANY_ROWS rows, and what serves more."""

    few: WeightLayout
    many: WeightLayout

    def __str__(self) -> str:
        return self.few.name if self.many is self.few else f"{self.few.name}, from {MANY_ROWS} rows on {self.many.name}"


class Linear:
    """x @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, layouts: WeightLayouts) -> None:
        self._few = layouts.few.lay_out(weight, bias)
        self._many = self._few if layouts.many is layouts.few else layouts.many.lay_out(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) → (rows, out)."""
        return (self._few if len(x) < MANY_ROWS else self._many)(x)


def choose_layouts(weights: Sequence[torch.Tensor], total_bytes: int, device: torch.device) -> WeightLayouts:
    """The layouts on this device for a model that has matrices like `weights`, `total_bytes` of them in all.

    Two different ones, and so two copies, only where the second pays and there is memory for it.
    """
    working = known_layouts(weights[0].dtype) if device.type == "cpu" else [_PLAIN]
    if len(working) == 1:
        return WeightLayouts(_PLAIN, _PLAIN)
    seconds = {layout.name: [0.0, 0.0] for layout in working}  # of few rows and of many
    for weight in weights:
        few = torch.ones((_FEW_MEASURED, weight.shape[1]), dtype=weight.dtype)
        many = torch.ones((_MANY_MEASURED, weight.shape[1]), dtype=weight.dtype)
        for layout in working:
            product = layout.lay_out(weight, None)
            seconds[layout.name][0] += _seconds(partial(product, few))
            seconds[layout.name][1] += _seconds(partial(product, many))
    best_few = min(working, key=lambda layout: seconds[layout.name][0])
    best_many = min(working, key=lambda layout: seconds[layout.name][1])
    affordable = total_bytes <= _MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pays = seconds[best_few.name][1] > _WORTH_A_COPY * seconds[best_many.name][1]
    return WeightLayouts(best_few, best_many if affordable and pays else best_few)


def known_layouts(dtype: torch.dtype) -> list[WeightLayout]:
    """All that work on this machine's processor, the ordinary one first."""
    found = [WeightLayout("oneDNN's", _onednn)] if torch._C._has_mkldnn else []
    if dtype == torch.float32 and isinstance(compiled := kernels(), Kernels):  # for another dtype nothing is compiled
        found.append(WeightLayout("compiled for this processor", partial(_compiled, compiled)))
    return [_PLAIN, *(layout for layout in found if _agrees(layout, dtype))]


# ------------------------------------------------------------ the layouts


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: functional.linear(x, weight, bias)


_PLAIN = WeightLayout("torch's", _plain)


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _compiled(kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Weights in panels, see `kernels/matrix_product.c`: (in / depth, out / panel, depth, panel)."""
    outputs, inputs = weight.shape
    panel = kernels.panel
    panels = -(-outputs // panel)
    if outputs % panel:
        weight = functional.pad(weight, (0, 0, 0, panels * panel - outputs))
    depth = -(-inputs // -(-inputs * panel * weight.itemsize // _PANEL_BYTES))
    packed = weight.new_empty(weight.numel())
    laid = 0
    for part in torch.split(weight.reshape(panels, panel, inputs), depth, dim=2):  # (panels, panel, depth)
        packed[laid : laid + part.numel()].view(panels, -1, panel).copy_(part.transpose(1, 2))
        laid += part.numel()
    start = weight.new_zeros(panels * panel)
    if bias is not None:
        start[:outputs] = bias

    def product(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((len(x), outputs))
        places = x.data_ptr(), packed.data_ptr(), start.data_ptr(), y.data_ptr()
        kernels.product(
            places[0], len(x), inputs, places[1], places[2], outputs, places[3], depth, torch.get_num_threads()
        )
        return y

    return product


# ------------------------------------------------------------ what they are worth


def _agrees(layout: WeightLayout, dtype: torch.dtype) -> bool:
    """Whether the layout exists here and its product is the ordinary one: tried on a small example, never assumed."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((47, 33), generator=generator).to(dtype)
    x = torch.randn((13, 33), generator=generator).to(dtype)
    bias = torch.randn(47, generator=generator).to(dtype)
    try:
        product = layout.lay_out(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError):  # another torch, or a processor that lacks the format
        return False
    return torch.allclose(product.float(), functional.linear(x, weight, bias).float(), rtol=0.02, atol=0.02)


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """The best of five, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
