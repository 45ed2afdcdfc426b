"""Attention over paged keys and values on a CPU, by kernels that are compiled at start (`kernels/attention.c`, float32).

Decoding rows and prefill chunks are one thing here, jobs: some queries of one sequence, which read that sequence's blocks where they lie.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_runtime.flat_batch import FlatBatch
from headway_runtime.kernels.library import Kernels, kernels
from headway_runtime.kv_cache import KVCache
from headway_runtime.models.config import ModelConfig

_ROWS = 96
"""Queries times heads of a group that are computed together: their scores of 512 keys stay in a second-level cache."""
_FIELDS = ("kv_heads", "groups", "head_dim", "block_size", "block_step", "table_width", "q_step", "window")


class _Shape(ctypes.Structure):
    """`shape_t` of `kernels/attention.c`."""

    _fields_ = (*((name, ctypes.c_long) for name in _FIELDS), ("scale", ctypes.c_float))


def kernels_for(head_dim: int, block_size: int, dtype: torch.dtype) -> Kernels | None:
    """The kernels, where there are any, they are right, and they are made for this shape."""
    found = kernels()
    if not isinstance(found, Kernels) or dtype != torch.float32 or head_dim % found.panel or block_size % found.panel:
        return None
    return found if _agrees(found) else None


class CompiledAttention:
    """Attention of a runner's batches. `begin` lays out a batch; then `attend` once for each layer, in order."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: NDArray[np.int32], kernels: Kernels) -> None:
        """`tables` (rows, blocks): the block numbers of each row; read at each `attend`. `kernels` as `kernels_for` gives them."""
        self._attend = kernels.attend
        self._windows = config.windows
        self._cache = cache
        self._tables = tables
        groups = config.num_heads // config.num_kv_heads
        self._queries = max(1, _ROWS // groups)
        self._shape = _Shape(
            cache.kv_heads, groups, cache.head_dim, cache.block_size, cache.data.stride(0), tables.shape[1], 0, 0, cache.head_dim**-0.5
        )
        self._jobs = np.empty((0, 4), dtype=np.int64)
        """(jobs, 4): first token, tokens, position of the first, row."""
        self._slots = (torch.empty(0, dtype=torch.int64),) * 2

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: where its new keys go, and which queries are computed together."""
        size, count = self._cache.block_size, len(batch.decode_rows)
        blocks = self._tables[batch.rows, batch.positions // size].astype(np.int64)
        self._slots = torch.from_numpy(blocks), torch.from_numpy(batch.positions % size)
        decodes = np.stack((np.arange(count), np.ones(count, dtype=np.int64), batch.decode_positions, batch.decode_rows), axis=1)
        chunks = [
            (chunk.offset + done, min(self._queries, chunk.count - done), chunk.start + done, chunk.row)
            for chunk in batch.chunks
            for done in range(0, chunk.count, self._queries)
        ]
        self._jobs = np.concatenate((decodes, np.array(chunks, dtype=np.int64).reshape(-1, 4)))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `models.decoder.Attention`."""
        cache, shape, jobs = self._cache, self._shape, self._jobs
        cache.store(layer, k, v, *self._slots)
        if q.stride()[1:] != (cache.head_dim, 1):
            q = q.contiguous()
        shape.q_step, shape.window = q.stride(0), self._windows[layer] or 0
        out = torch.empty((len(q), q.shape[1] * cache.head_dim))
        keys = cache.pieces[layer].data_ptr()
        self._attend(
            ctypes.addressof(shape),
            q.data_ptr(),
            keys,
            self._tables.ctypes.data,
            jobs.ctypes.data,
            len(jobs),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _agrees(kernels: Kernels) -> bool:
    """Whether four queries of two heads over two blocks, in no order, get what the plain formula gives: tried, never assumed."""
    size = dim = kernels.panel
    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn((4, 2, dim), generator=generator), torch.randn((3, 2, dim * size), generator=generator)
    table, jobs, position = np.array([[2, 0]], dtype=np.int32), np.array([[0, 4, size - 2, 0]]), size - 2
    shape = _Shape(1, 2, dim, size, cache.stride(0), 2, q.stride(0), 0, dim**-0.5)
    out = torch.empty((4, 2, dim))
    kernels.attend(ctypes.addressof(shape), q.data_ptr(), cache.data_ptr(), table.ctypes.data, jobs.ctypes.data, 1, out.data_ptr(), 1)
    blocks = cache[[2, 0]]
    keys = blocks[:, 0].view(2, dim, size).transpose(1, 2).reshape(1, -1, dim)  # (1, tokens, D)
    values = blocks[:, 1].reshape(1, -1, dim)
    seen = torch.arange(2 * size) <= position + torch.arange(4)[:, None]
    expected = functional.scaled_dot_product_attention(q.transpose(0, 1), keys.expand(2, -1, -1), values.expand(2, -1, -1), seen)
    return torch.allclose(out.transpose(0, 1), expected, rtol=1e-4, atol=1e-4)
