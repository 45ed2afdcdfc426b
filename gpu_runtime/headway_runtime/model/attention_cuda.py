"""Attention over paged keys and values on a GPU: gathers and batched products, launched without waiting for it.

What a launch needs (how many rows and blocks) the host knows from the plan; index arrays go over in one asynchronous
copy each before the first layer, and masks are made there. Only the reasons are CUDA's, so it is tested on a CPU too.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway_runtime.model.architecture.config import ModelConfig
from headway_runtime.model.attention_layout import (
    DecodeRun,
    MaskedTile,
    Span,
    Tile,
    attend_tiles,
    chunk_span,
    decode_runs,
    visible_keys,
)
from headway_runtime.model.flat_batch import FlatBatch
from headway_runtime.model.kv_cache import KVCache
from headway_runtime.model.logits_processors import to_device

_SLACK = 2.0
"""A launch costs more than some padding does."""
_MOST_BLOCKS = 1 << 15
_TILE = 1024


@dataclass(frozen=True, slots=True)
class _Gather:
    """Rows [first, last) of the batch over `blocks` blocks of each of `rows` sequences."""

    first: int
    last: int
    rows: int
    blocks: int
    key_pieces: torch.Tensor
    """(rows · H · blocks,)."""
    value_pieces: torch.Tensor
    masks: tuple[MaskedTile, ...]
    """One for decodes, some for a chunk."""


class CudaAttention:
    """Attention of a runner's batches. `begin` lays out a batch; then `attend` once for each layer, in order."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: NDArray[np.int32]) -> None:
        """`tables` (rows, blocks): the block numbers of each row; read at each `begin`."""
        self._windows = config.windows
        self._cache = cache
        self._tables = tables
        self._groups = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._device = cache.data.device
        self._decodes: dict[int | None, list[_Gather]] = {}
        self._prefills: dict[int | None, list[_Gather]] = {}
        self._new_keys_at = (torch.empty(0, dtype=torch.int64),) * 2

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: where its new keys go, and what each kind of layer reads."""
        size, tables = self._cache.block_size, self._tables
        blocks = tables[batch.slots, batch.positions // size].astype(np.int64)
        self._new_keys_at = to_device(blocks, self._device), to_device(batch.positions % size, self._device)
        for window in dict.fromkeys(self._windows):
            runs = decode_runs(batch, tables, size, window, slack=_SLACK, most_blocks=_MOST_BLOCKS)
            self._decodes[window] = [self._gather(run, [(0, 1, 0, self._run_mask(run))]) for run in runs]
            spans = [chunk_span(chunk, tables, size, window, tile=_TILE) for chunk in batch.chunks]
            self._prefills[window] = [
                self._gather(span, [(*astuple(tile), self._tile_mask(tile, window)) for tile in span.tiles])
                for span in spans
            ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `architecture.decoder.Attention`."""
        cache = self._cache
        cache.store(layer, k, v, *self._new_keys_at)
        q = q.view(-1, cache.kv_heads, self._groups, cache.head_dim)  # (tokens, H, G, D)
        out = torch.empty_like(q)
        for run in self._decodes[self._windows[layer]]:
            out[run.first : run.last] = self._decode(layer, run, q[run.first : run.last])
        for chunk in self._prefills[self._windows[layer]]:
            self._prefill(layer, chunk, q[chunk.first : chunk.last], out[chunk.first : chunk.last])
        return out.flatten(1)

    def _decode(self, layer: int, run: _Gather, q: torch.Tensor) -> torch.Tensor:
        """q (rows, H, G, D) → the same. Softmax in float32."""
        keys, values = self._read(layer, run)
        scores = (q * self._scale).unsqueeze(2) @ keys  # (rows, H, 1, G, D) @ (rows, H, blocks, D, block_size)
        scores = scores.transpose(2, 3).flatten(3).float()  # (rows, H, G, keys)
        mask = run.masks[0][3]
        if mask is not None:
            scores = scores + mask[:, None, None]
        return torch.matmul(scores.softmax(-1).to(q.dtype), values.flatten(2, 3))

    def _prefill(self, layer: int, chunk: _Gather, q: torch.Tensor, out: torch.Tensor) -> None:
        """q and out (queries, H, G, D)."""
        keys, values = self._read(layer, chunk)
        keys = keys.transpose(3, 4).flatten(2, 3).squeeze(0)  # (H, keys, D)
        attend_tiles(q, keys, values.flatten(2, 3).squeeze(0), chunk.masks, out)

    def _read(self, layer: int, gather: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rows, H, blocks, D, block_size) and values (rows, H, blocks, block_size, D)."""
        cache, pieces = self._cache, self._cache.pieces[layer]
        shape = (gather.rows, cache.kv_heads, gather.blocks)
        keys = pieces.index_select(0, gather.key_pieces).view(*shape, cache.head_dim, cache.block_size)
        values = pieces.index_select(0, gather.value_pieces).view(*shape, cache.block_size, cache.head_dim)
        return keys, values

    def _gather(self, part: DecodeRun | Span, tiles: list[MaskedTile]) -> _Gather:
        keys = self._cache.key_pieces(part.table)
        return _Gather(
            first=part.first,
            last=part.last,
            rows=part.table.shape[0],
            blocks=part.table.shape[1],
            key_pieces=to_device(keys.reshape(-1), self._device),
            value_pieces=to_device((keys + self._cache.kv_heads).reshape(-1), self._device),
            masks=tuple(tiles),
        )

    def _run_mask(self, run: DecodeRun) -> torch.Tensor | None:
        """(rows, keys) for scores in float32; one byte a key goes over."""
        return None if run.visible is None else _additive(to_device(run.visible, self._device), torch.float32)

    def _tile_mask(self, tile: Tile, window: int | None) -> torch.Tensor:
        """(queries, keys) in the dtype of the queries."""
        return _additive(visible_keys(tile.last - tile.first, tile.keys, window, self._device), self._cache.data.dtype)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """True → 0, False → -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
