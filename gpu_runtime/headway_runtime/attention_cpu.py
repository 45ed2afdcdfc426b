"""Attention over paged keys and values on a CPU: gather what a few rows see into a buffer that stays in the cache, then attend to it there.

Rows are never padded to the longest: decoding rows of nearly the same length share a gather, a prefill chunk has one of its own and is cut
into tiles of queries, so that the half of the square that the future would fill is mostly not computed. Grouped-query attention is a view:
the queries that share a KV head stand beside each other. The layout of a batch is worked out once and used by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_runtime.flat_batch import Chunk, FlatBatch
from headway_runtime.kv_cache import KVCache
from headway_runtime.models.config import ModelConfig

_SLACK = 1.125
"""Rows share a gather while the longest has at most this many times the blocks of the shortest (or one more)."""
_GATHER_BYTES = 2 << 20
"""Size of a shared gather, keys and values together: past the second-level cache, well within the third."""
_TILE = 128
"""Queries of a prefill chunk that attend together."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows [first, last) of the batch, one query each, over `blocks` blocks each."""

    first: int
    last: int
    blocks: int
    mask: torch.Tensor | None
    """(rows, 1, 1, blocks · block_size) additive; None when every gathered key is visible to its row."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Queries [first, last) of the batch, all of one row, over `blocks` blocks."""

    first: int
    last: int
    blocks: int
    tiles: tuple[tuple[int, int, int, torch.Tensor], ...]
    """(first query, last query, visible keys, additive mask (queries, keys)), queries counted within the chunk."""


class CpuAttention:
    """Attention of a runner's batches. `begin` lays out a batch; then `attend` once for each layer, in order."""

    def __init__(self, config: ModelConfig, cache: KVCache, tables: NDArray[np.int32]) -> None:
        """`tables` (rows, blocks): the block numbers of each row; read at each `begin`."""
        self._config = config
        self._cache = cache
        self._tables = tables
        self._groups = config.num_heads // config.num_kv_heads
        self._piece_bytes = cache.pieces.shape[1] * cache.pieces.element_size()
        self._buffer = torch.empty(0, dtype=cache.data.dtype)
        self._layouts: dict[int | None, tuple[list[_Decodes | _Prefill], torch.Tensor]] = {}
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: where its new keys go, and which gathers each kind of layer does."""
        size, heads = self._cache.block_size, self._cache.kv_heads
        blocks = self._tables[batch.rows, batch.positions // size].astype(np.int64)
        first = (blocks * self._cache.pieces_per_block * size + batch.positions % size)[:, None]
        self._slots = torch.from_numpy((first + np.arange(heads) * size).ravel())  # (tokens · kv_heads,)
        self._layouts = {window: self._layout(batch, window) for window in dict.fromkeys(self._config.windows)}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `models.decoder.Attention`."""
        config, cache = self._config, self._cache
        cache.store(layer, 0, k, self._slots)
        cache.store(layer, 1, v, self._slots)
        gathers, pieces = self._layouts[config.windows[layer]]
        pieces = pieces + layer * 2 * cache.kv_heads
        q = q.view(-1, cache.kv_heads, self._groups, cache.head_dim)  # (tokens, H, G, D)
        out = torch.empty_like(q)
        at = 0
        for gather in gathers:
            rows = gather.last - gather.first if isinstance(gather, _Decodes) else 1
            keys, values = self._gather(pieces[at : (at := at + 2 * rows * cache.kv_heads * gather.blocks)], rows, gather.blocks)
            queries, result = q[gather.first : gather.last], out[gather.first : gather.last]
            if isinstance(gather, _Decodes):
                result.copy_(functional.scaled_dot_product_attention(queries, keys, values, gather.mask))
            else:
                self._prefill(gather, queries, keys[0], values[0], result)
        return out.flatten(1)

    def _gather(self, pieces: torch.Tensor, rows: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(2 · rows · H · blocks,) pieces → keys and values, (rows, H, blocks · block_size, D) each, in the buffer."""
        cache = self._cache
        needed = pieces.numel() * cache.pieces.shape[1]
        if needed > self._buffer.numel():
            self._buffer = torch.empty(needed, dtype=self._buffer.dtype)
        buffer = self._buffer[:needed].view(-1, cache.pieces.shape[1])
        torch.index_select(cache.pieces, 0, pieces, out=buffer)
        keys, values = buffer.view(2, rows, cache.kv_heads, blocks * cache.block_size, cache.head_dim)
        return keys, values

    def _prefill(self, gather: _Prefill, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """q and out (queries, H, G, D); keys and values (H, keys, D)."""
        for first, last, visible, mask in gather.tiles:
            queries = q[first:last].permute(1, 2, 0, 3)  # (H, G, queries, D)
            shape = (*queries.shape[:2], visible, keys.shape[-1])
            seen = functional.scaled_dot_product_attention(
                queries,
                keys[:, None, :visible].expand(shape),  # the G queries of a KV head read one copy
                values[:, None, :visible].expand(shape),
                mask,
            )
            out[first:last].copy_(seen.permute(2, 0, 1, 3))

    # ------------------------------------------------------------ layout

    def _layout(self, batch: FlatBatch, window: int | None) -> tuple[list[_Decodes | _Prefill], torch.Tensor]:
        """The gathers of layers with this window, and the pieces of all of them for layer 0, one after the other."""
        gathers: list[_Decodes | _Prefill] = []
        pieces: list[NDArray[np.int64]] = []
        size = self._cache.block_size
        newest = batch.decode_positions
        oldest = np.zeros_like(newest) if window is None else np.maximum(newest - window + 1, 0)
        first_blocks, last_blocks = oldest // size, newest // size
        counts = last_blocks - first_blocks + 1
        for first, last in self._share(counts):
            blocks = int(counts[first:last].max())
            columns = np.minimum(first_blocks[first:last, None] + np.arange(blocks), last_blocks[first:last, None])
            pieces.append(self._pieces(self._tables[batch.decode_rows[first:last, None], columns]))
            places = first_blocks[first:last, None] * size + np.arange(blocks * size)  # (rows, keys)
            visible = (places <= newest[first:last, None]) & (places >= oldest[first:last, None])
            gathers.append(_Decodes(first, last, blocks, None if visible.all() else self._mask(visible)[:, None, None]))
        for chunk in batch.chunks:
            gather, table = self._chunk(chunk, window)
            gathers.append(gather)
            pieces.append(self._pieces(table[None]))
        return gathers, torch.from_numpy(np.concatenate(pieces))

    def _share(self, counts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Runs of rows that gather together: like lengths, and not more bytes than stay in the cache."""
        most = max(1, _GATHER_BYTES // (2 * self._cache.kv_heads * self._piece_bytes))  # blocks in one gather
        runs, first = [], 0
        low = high = 0
        for index, count in enumerate(counts.tolist()):
            if index == first:
                low = high = count
                continue
            low, high = min(low, count), max(high, count)
            if high > max(low * _SLACK, low + 1) or high * (index - first + 1) > most:
                runs.append((first, index))
                first, low, high = index, count, count
        if len(counts):
            runs.append((first, len(counts)))
        return runs

    def _pieces(self, table: NDArray[np.int32]) -> NDArray[np.int64]:
        """Blocks (rows, blocks) → pieces of layer 0 in the order (2, rows, H, blocks), flat."""
        start = table.astype(np.int64) * self._cache.pieces_per_block
        heads = np.arange(self._cache.kv_heads)
        keys = start[:, None, :] + heads[None, :, None]  # (rows, H, blocks)
        return np.stack((keys, keys + self._cache.kv_heads)).ravel()

    def _chunk(self, chunk: Chunk, window: int | None) -> tuple[_Prefill, NDArray[np.int32]]:
        size = self._cache.block_size
        oldest = 0 if window is None else max(chunk.start - window + 1, 0)
        first_block, last_block = oldest // size, (chunk.start + chunk.count - 1) // size
        origin = first_block * size
        tiles = []
        for first in range(0, chunk.count, _TILE):
            last = min(first + _TILE, chunk.count)
            visible = chunk.start + last - origin
            queries = np.arange(chunk.start + first, chunk.start + last)[:, None]
            keys = origin + np.arange(visible)
            seen = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
            tiles.append((first, last, visible, self._mask(seen)))
        gather = _Prefill(chunk.offset, chunk.offset + chunk.count, last_block - first_block + 1, tuple(tiles))
        return gather, self._tables[chunk.row, first_block : last_block + 1]

    def _mask(self, visible: NDArray[np.bool_]) -> torch.Tensor:
        """True → 0, False → -inf, in the dtype of the queries."""
        mask = torch.zeros(visible.shape, dtype=self._cache.data.dtype)
        return mask.masked_fill_(torch.from_numpy(~visible), -torch.inf)
