"""What the engine's two kinds of work cost on this processor: decode attention by layout, and matrix products by layout
and rows.

    python benchmarks/layouts.py

135M Llama shape, float32, one thread, CPU seconds of this process, best of several. Every layer has keys, values and
matrices of its own, so they come from memory, as in a model. The floor of attention is reading each cached key and
value once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_runtime.model.architecture.config import ModelConfig, read_config
from headway_runtime.model.attention_compiled import CompiledAttention, kernels_for
from headway_runtime.model.attention_cpu import CpuAttention
from headway_runtime.model.flat_batch import flatten
from headway_runtime.model.kv_cache import KVCache
from headway_runtime.model.linear import Linear, WeightLayouts, known_layouts
from torch.nn import functional

LAYERS, BLOCK, PREFILL = 30, 32, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}


def best(run: Callable[[], object], tries: int = 5) -> float:
    """CPU seconds of the fastest call."""
    run()
    times = []
    for _ in range(tries):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


class Gathered:
    """The usual way, for comparison: rows of like length are gathered into a buffer, head by head, and given to SDPA
    with a mask."""

    def __init__(self, config: ModelConfig, lengths: list[int], tables: np.ndarray) -> None:
        self._shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        heads, _, head_dim = self._shape
        blocks = int(tables.max()) + 1
        self.pieces = torch.randn(LAYERS, blocks * 2 * heads, BLOCK * head_dim)
        self._buffer = torch.empty(8 << 20)
        self._groups = []
        order = np.argsort(lengths)
        counts = -(-np.array(lengths)[order] // BLOCK)
        first = 0
        while first < len(order):
            last = int(np.searchsorted(counts, counts[first] * 1.125 + 1, side="right"))
            last = min(last, first + max(1, (2 << 20) // int(counts[last - 1] * 2 * heads * BLOCK * head_dim * 4)))
            width = int(counts[last - 1])
            rows = tables[order[first:last], :width].astype(np.int64) * 2 * heads
            keys = rows[:, None, :] + np.arange(heads)[:, None]
            seen = np.arange(width * BLOCK) < np.array(lengths)[order[first:last], None]
            mask = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), -torch.inf)[:, None, None]
            self._groups.append((first, last, width, torch.from_numpy(np.stack((keys, keys + heads)).ravel()), mask))
            first = last

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q (rows, heads, D), rows by length → the same."""
        heads, _, head_dim = self._shape
        q = q.view(-1, *self._shape)
        out = torch.empty_like(q)
        for first, last, width, index, mask in self._groups:
            buffer = self._buffer[: len(index) * BLOCK * head_dim].view(-1, BLOCK * head_dim)
            torch.index_select(self.pieces[layer], 0, index, out=buffer)
            keys, values = buffer.view(2, last - first, heads, width * BLOCK, head_dim)
            out[first:last] = functional.scaled_dot_product_attention(q[first:last], keys, values, mask)
        return out


def attention() -> None:
    """48 ragged rows, one new token each; and a prompt."""
    draw = random.Random(0)
    lengths = [draw.randint(64, 600) for _ in range(48)]
    config = read_config(CONFIG, "config.json")
    counts = [-(-length // BLOCK) for length in lengths]
    shuffled = np.random.default_rng(0).permutation(sum(counts)).tolist()
    tables = np.zeros((48, max(counts)), dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [shuffled.pop() for _ in range(count)]
    cache = KVCache(config, sum(counts), BLOCK, torch.float32, torch.device("cpu"))
    cache.data.normal_()
    tokens = sum(lengths)
    decodes = flatten([PlanItem(row, 0, row, length - 1, 1, True, ()) for row, length in enumerate(lengths)])
    chunk = flatten([PlanItem(0, 0, 0, 0, PREFILL, True, ())])
    ways = {"torch's operators, in place": CpuAttention(config, cache, tables)}
    if (kernels := kernels_for(64, BLOCK, torch.float32)) is not None:
        ways["our kernels, in place"] = CompiledAttention(config, cache, tables, kernels)
    print(
        f"Attention, {LAYERS} layers: decode of 48 rows with {tokens} tokens of context, and prefill of "
        f"{PREFILL} tokens.\n"
    )
    print("| | decode, ms | prefill, ms |\n|---|---|---|")
    for name, way in ways.items():
        milliseconds = []
        for batch in (decodes, chunk):
            count = len(batch.rows)
            q, new = torch.randn(count, 9, 64), torch.randn(count, 3, 64)
            way.begin(batch)
            milliseconds.append(
                best(lambda way=way, q=q, new=new: [way.attend(layer, q, new, new) for layer in range(LAYERS)]) * 1e3
            )
        print(f"| {name} | {milliseconds[0]:.0f} | {milliseconds[1]:.0f} |")
    usual, q = Gathered(config, lengths, tables), torch.randn(48, 9, 64)
    gathered = best(lambda: [usual.attend(layer, q) for layer in range(LAYERS)])
    floor = best(cache.data.sum) * tokens / (sum(counts) * BLOCK)
    print(f"| gathered, torch's | {gathered * 1e3:.0f} | |\n| reading keys and values once | {floor * 1e3:.0f} | |\n")


def products() -> None:
    """The matrices of 30 layers, and the head."""
    shapes = ((960, 576), (576, 576), (3072, 576), (576, 1536))
    weights = [[torch.randn(shape) for shape in shapes] for _ in range(LAYERS)]
    layouts = {
        layout.name: [[Linear(weight, None, WeightLayouts(layout, layout)) for weight in layer] for layer in weights]
        for layout in known_layouts(torch.float32)
    }
    print(f"| rows | {' | '.join(f'{name}, GFLOP/s' for name in layouts)} |\n|---|{'---|' * len(layouts)}")
    for rows in (1, 4, 8, 16, 48, 128, 256, 2048):
        inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
        work = 2 * rows * LAYERS * sum(out * width for out, width in shapes)
        rates = []
        for layers in layouts.values():
            seconds = best(
                lambda layers=layers, inputs=inputs: [
                    linear(inputs[width]) for layer in layers for linear, (_, width) in zip(layer, shapes, strict=True)
                ]
            )
            rates.append(f"{work / seconds / 1e9:.0f}")
        print(f"| {rows} | {' | '.join(rates)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        attention()
        products()
