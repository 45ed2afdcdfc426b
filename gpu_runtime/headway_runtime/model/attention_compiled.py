"""Attention over paged keys and values on a CPU, by kernels compiled at start (`kernels/attention.c`, float32).

Decoding rows and prefill chunks are both jobs: some queries of a sequence, which read its blocks where they lie.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_runtime.model.architecture.config import ModelConfig
from headway_runtime.model.flat_batch import FlatBatch
from headway_runtime.model.kernels.library import Kernels, kernels
from headway_runtime.model.kv_cache import KVCache

_ROWS = 96
"""Queries times heads of a group that are computed together: their scores of 512 keys stay in a second-level cache."""
_FIELDS = (
    "kv_heads",
    "groups",
    "head_dim",
    "block_size",
    "block_step",
    "table_width",
    "q_step",
    "k_step",
    "v_step",
    "window",
)


class _Shape(ctypes.Structure):
    """`shape_t` of `kernels/attention.c`."""

    _fields_ = (*((name, ctypes.c_long) for name in _FIELDS), ("scale", ctypes.c_float))


def kernels_for(head_dim: int, block_size: int, dtype: torch.dtype) -> Kernels | None:
    """The kernels, where there are any, they are right, and they are made for this shape."""
    if dtype != torch.float32:  # nothing is compiled then
        return None
    found = kernels()
    if not isinstance(found, Kernels) or head_dim % found.panel or block_size % found.panel:
        return None
    return found if _agrees(found) else None


class CompiledAttention:
    """Attention of a runner's batches. `begin` lays out a batch; then `attend` once for each layer, in order."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: NDArray[np.int32], kernels: Kernels) -> None:
        """`tables` (rows, blocks): the block numbers of each row, read at each `attend`."""
        self._attend = kernels.attend
        self._windows = config.windows
        self._cache = cache
        self._tables = tables
        groups = config.num_heads // config.num_kv_heads
        self._queries = max(1, _ROWS // groups)
        self._shape = _Shape(
            kv_heads=cache.kv_heads,
            groups=groups,
            head_dim=cache.head_dim,
            block_size=cache.block_size,
            block_step=cache.data.stride(0),
            table_width=tables.shape[1],
            scale=cache.head_dim**-0.5,
        )
        self._jobs = np.empty((0, 4), dtype=np.int64)
        """(jobs, 4): first token, tokens, position of the first, row."""

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: which queries are computed together."""
        count = len(batch.decode_slots)
        ones = np.ones(count, dtype=np.int64)
        decodes = np.stack((np.arange(count), ones, batch.decode_positions, batch.decode_slots), axis=1)
        chunks = [
            (chunk.offset + done, min(self._queries, chunk.count - done), chunk.start + done, chunk.slot)
            for chunk in batch.chunks
            for done in range(0, chunk.count, self._queries)
        ]
        self._jobs = np.concatenate((decodes, np.array(chunks, dtype=np.int64).reshape(-1, 4)))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `architecture.decoder.Attention`."""
        cache, shape, jobs = self._cache, self._shape, self._jobs
        q, k, v = (x if x.stride()[1:] == (cache.head_dim, 1) else x.contiguous() for x in (q, k, v))
        shape.q_step, shape.k_step, shape.v_step = q.stride(0), k.stride(0), v.stride(0)
        shape.window = self._windows[layer] or 0
        out = q.new_empty((len(q), q.shape[1] * cache.head_dim))
        tensors = (x.data_ptr() for x in (q, k, v, cache.pieces[layer]))
        arrays = (x.ctypes.data for x in (self._tables, jobs))
        self._attend(ctypes.addressof(shape), *tensors, *arrays, len(jobs), out.data_ptr(), torch.get_num_threads())
        return out


def _agrees(kernels: Kernels) -> bool:
    """Whether a prompt of two blocks, in no order, gets what the plain formula gives: tried, never assumed."""
    size = dim = kernels.panel
    tokens = size + 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((tokens, heads, dim), generator=generator) for heads in (2, 1, 1))
    cache, out = torch.full((3, 2, dim * size), torch.nan), torch.empty((tokens, 2, dim))
    table, jobs = np.array([[2, 0]], dtype=np.int32), np.array([[0, tokens, 0, 0]], dtype=np.int64)
    shape = _Shape(1, 2, dim, size, cache.stride(0), 2, q.stride(0), k.stride(0), v.stride(0), 0, dim**-0.5)
    tensors = (x.data_ptr() for x in (q, k, v, cache))
    kernels.attend(ctypes.addressof(shape), *tensors, table.ctypes.data, jobs.ctypes.data, 1, out.data_ptr(), 1)
    q, k, v = (x.transpose(0, 1) for x in (q, k.expand(-1, 2, -1), v.expand(-1, 2, -1)))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.allclose(out.transpose(0, 1), expected, rtol=1e-4, atol=1e-4)
