"""Attention over paged keys and values on a CPU.

A decoding row reads its blocks where they lie: the scores of a block are a weighted sum of rows of its keys (the weights are the query),
the output a weighted sum of rows of its values (the weights are the probabilities), and a weighted sum of chosen rows is what
`embedding_bag` computes, at the speed of memory. Nothing is gathered, and no key is copied.

A prefill chunk reads each key many times, so its sequence is gathered once into a buffer. The layout of a batch is worked out once and used
by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_runtime.attention_layout import Run, Span, chunk_span, decode_runs, visible_keys
from headway_runtime.flat_batch import FlatBatch
from headway_runtime.kv_cache import KVCache
from headway_runtime.models.config import ModelConfig

_SLACK = 1.25
_BAG_ENTRIES = 1 << 22
"""Rows of keys from which on a run takes no further row. Index arrays take groups · (1 / block_size + 1 / head_dim) / 2 of the bytes of
the keys and values of one layer."""
_TILE = 64


@dataclass(frozen=True, slots=True)
class _Decodes:
    """A run of decoding rows, as bags of rows to add up."""

    first: int
    last: int
    blocks: int
    key_rows: torch.Tensor
    """(rows · H · G · blocks · D,) rows of `KVCache.key_rows`: one bag of D for each block that a query sees."""
    key_bags: torch.Tensor
    value_rows: torch.Tensor
    """(rows · H · G · blocks · block_size,) rows of `KVCache.value_rows`: one bag for each query."""
    value_bags: torch.Tensor
    mask: torch.Tensor | None
    """(rows, 1, 1, blocks · block_size) additive."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A chunk: the pieces to gather, keys then values, (2 · H · blocks,), and (first, last, keys, additive mask) of each tile."""

    first: int
    last: int
    blocks: int
    pieces: torch.Tensor
    tiles: tuple[tuple[int, int, int, torch.Tensor], ...]


class CpuAttention:
    """Attention of a runner's batches. `begin` lays out a batch; then `attend` once for each layer, in order."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: NDArray[np.int32]) -> None:
        """`tables` (rows, blocks): the block numbers of each row; read at each `begin`."""
        self._windows = config.windows
        self._cache = cache
        self._tables = tables
        self._groups = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._row_type = np.int32 if cache.data.numel() < 2**31 else np.int64
        self._most_blocks = max(1, _BAG_ENTRIES // (config.num_heads * max(cache.head_dim, cache.block_size)))
        self._buffer = torch.empty(0, dtype=cache.data.dtype)
        self._masks: dict[int | None, torch.Tensor] = {}
        """For each window (_TILE, keys) additive, up to the newest token."""
        self._decodes: dict[int | None, list[_Decodes]] = {}
        self._prefills: dict[int | None, list[_Prefill]] = {}
        self._slots = (torch.empty(0, dtype=torch.int64),) * 2

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: where its new keys go, and what each kind of layer reads."""
        size, tables = self._cache.block_size, self._tables
        blocks = tables[batch.rows, batch.positions // size].astype(np.int64)
        self._slots = torch.from_numpy(blocks), torch.from_numpy(batch.positions % size)
        for window in dict.fromkeys(self._windows):
            runs = decode_runs(batch, tables, size, window, slack=_SLACK, most_blocks=self._most_blocks)
            self._decodes[window] = [self._bags_of(run) for run in runs]
            spans = [chunk_span(chunk, tables, size, window, tile=_TILE) for chunk in batch.chunks]
            self._grow_mask(window, max((span.tiles[-1].keys for span in spans), default=0))
            self._prefills[window] = [self._pieces_of(span, self._masks[window]) for span in spans]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `models.decoder.Attention`."""
        cache = self._cache
        cache.store(layer, k, v, *self._slots)
        q = q.view(-1, cache.kv_heads, self._groups, cache.head_dim)  # (tokens, H, G, D)
        out = torch.empty_like(q)
        for run in self._decodes[self._windows[layer]]:
            out[run.first : run.last] = self._decode(layer, run, q[run.first : run.last])
        for chunk in self._prefills[self._windows[layer]]:
            self._prefill(layer, chunk, q[chunk.first : chunk.last], out[chunk.first : chunk.last])
        return out.flatten(1)

    def _decode(self, layer: int, run: _Decodes, q: torch.Tensor) -> torch.Tensor:
        """q (rows, H, G, D) → the same."""
        cache = self._cache
        weights = (q * self._scale).unsqueeze(3).expand(*q.shape[:3], run.blocks, cache.head_dim)
        scores = _sum_rows(cache.key_rows[layer], run.key_rows, run.key_bags, weights.reshape(-1))
        scores = scores.view(*q.shape[:3], run.blocks * cache.block_size)  # (rows, H, G, keys)
        if run.mask is not None:
            scores += run.mask
        weights = scores.softmax(-1)
        return _sum_rows(cache.value_rows[layer], run.value_rows, run.value_bags, weights.view(-1)).view(q.shape)

    def _prefill(self, layer: int, chunk: _Prefill, q: torch.Tensor, out: torch.Tensor) -> None:
        """q and out (queries, H, G, D)."""
        cache = self._cache
        count = chunk.pieces.numel() * cache.piece_size
        if count * 3 // 2 > self._buffer.numel():
            self._buffer = torch.empty(count * 3 // 2, dtype=self._buffer.dtype)
        gathered = self._buffer[:count].view(-1, cache.piece_size)
        torch.index_select(cache.pieces[layer], 0, chunk.pieces, out=gathered)
        laid, values = gathered.view(2, cache.kv_heads, chunk.blocks, cache.piece_size)
        keys = self._buffer[count : count * 3 // 2].view(cache.kv_heads, chunk.blocks, cache.block_size, cache.head_dim)
        keys.copy_(laid.view(cache.kv_heads, chunk.blocks, cache.head_dim, cache.block_size).transpose(2, 3))
        keys = keys.view(cache.kv_heads, 1, -1, cache.head_dim)  # (H, 1, keys, D)
        values = values.view(cache.kv_heads, 1, -1, cache.head_dim)
        for first, last, visible, mask in chunk.tiles:
            seen = functional.scaled_dot_product_attention(
                q[first:last].permute(1, 2, 0, 3),  # (H, G, queries, D)
                keys[:, :, :visible].expand(-1, self._groups, -1, -1),  # the G queries of a KV head read one copy
                values[:, :, :visible].expand(-1, self._groups, -1, -1),
                mask,
            )
            out[first:last] = seen.permute(2, 0, 1, 3)

    # ------------------------------------------------------------ layout

    def _bags_of(self, run: Run) -> _Decodes:
        cache, size = self._cache, self._cache.block_size
        pieces = cache.key_pieces(run.table)[:, :, None, :, None]  # (rows, H, 1, blocks, 1)
        return _Decodes(
            run.first,
            run.last,
            run.table.shape[1],
            *self._bags(pieces * cache.head_dim + np.arange(cache.head_dim), 1),
            *self._bags((pieces + cache.kv_heads) * size + np.arange(size), run.table.shape[1]),
            mask=None if run.visible is None else self._mask(torch.from_numpy(run.visible))[:, None, None],
        )

    def _bags(self, rows: NDArray[np.int64], blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, H, 1, blocks, n) as the flat rows of all G queries, and where each bag of n · `blocks` of them begins, and the end."""
        flat = np.repeat(rows.astype(self._row_type), self._groups, axis=2).reshape(-1)
        bags = np.arange(0, flat.size + 1, rows.shape[4] * blocks, dtype=self._row_type)
        return torch.from_numpy(flat), torch.from_numpy(bags)

    def _grow_mask(self, window: int | None, keys: int) -> None:
        """One mask serves all tiles, however far they are in their sequences: each takes the corner of it that it needs."""
        held = self._masks.get(window)
        if held is None or held.shape[1] < keys:
            self._masks[window] = self._mask(visible_keys(_TILE, keys * 5 // 4, window, self._cache.data.device))

    def _pieces_of(self, span: Span, mask: torch.Tensor) -> _Prefill:
        keys = self._cache.key_pieces(span.table)
        pieces = torch.from_numpy(np.stack((keys, keys + self._cache.kv_heads)).reshape(-1))
        tiles = tuple(
            (tile.first, tile.last, tile.keys, mask[_TILE - (tile.last - tile.first) :, mask.shape[1] - tile.keys :]) for tile in span.tiles
        )
        return _Prefill(span.first, span.last, span.table.shape[1], pieces, tiles)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """True → 0, False → -inf, in the dtype of the queries."""
        return torch.zeros(visible.shape, dtype=self._cache.data.dtype).masked_fill_(~visible, -torch.inf)


def _sum_rows(table: torch.Tensor, rows: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One weighted sum of rows of `table` (n, width) for each bag: (bags, width)."""
    sums: torch.Tensor = torch.embedding_bag(table, rows, bags, False, 0, False, weights, True)[0]
    return sums
