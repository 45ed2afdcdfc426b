"""Attention over paged keys and values on a CPU.

A decoding row reads its blocks where they lie: the scores of a block are a weighted sum of rows of its keys (the
weights are the query), the output a weighted sum of rows of its values (the weights are the probabilities), and a
weighted sum of chosen rows is what `embedding_bag` computes, at the speed of memory. No key is copied.

A prefill chunk reads each key many times, so its sequence is gathered once into a buffer; a chunk that begins its
sequence has all of it in the batch. The layout of a batch is worked out once and used by all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway_runtime.model.architecture.config import ModelConfig
from headway_runtime.model.attention_layout import (
    DecodeRun,
    MaskedTile,
    Span,
    attend_tiles,
    chunk_span,
    decode_runs,
    visible_keys,
)
from headway_runtime.model.flat_batch import FlatBatch
from headway_runtime.model.kv_cache import KVCache

_SLACK = 1.1
_BAG_ENTRIES = 1 << 22
"""Most rows of keys, or of values, added up at once: an operator allocates at most 32 MB. Index arrays and buffers each
take groups · (1 / block_size + 1 / head_dim) / 2 of the bytes of one layer's keys and values."""
_TILE = 64


@dataclass(frozen=True, slots=True)
class _Run:
    """Decoding rows of like length, whose probabilities are computed together."""

    scores: slice
    """Their part of all scores."""
    shape: tuple[int, int, int]
    """(rows, H · G, keys)."""
    mask: torch.Tensor | None
    """(rows, 1, keys) additive."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decoding rows [first, last) of the batch, as bags of cache rows to add up, in the order of row, head, block."""

    first: int
    last: int
    queries: torch.Tensor
    """(key bags,) which of the rows · H · G queries weighs each bag."""
    key_rows: torch.Tensor
    """(key bags · D,) rows of `KVCache.key_rows`: one bag of D for each block that a query sees."""
    key_bags: torch.Tensor
    value_rows: torch.Tensor
    """(key bags · block_size,) rows of `KVCache.value_rows`: one bag for each query."""
    value_bags: torch.Tensor
    runs: tuple[_Run, ...]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Queries [first, last) of the batch, a chunk of one sequence, over `blocks` blocks."""

    first: int
    last: int
    blocks: int
    pieces: torch.Tensor | None
    """(2 · H · blocks,) what to gather, keys then values; None for a chunk that begins its sequence."""
    tiles: tuple[MaskedTile, ...]


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
        self._weights = torch.empty(0, dtype=cache.data.dtype)
        """(key bags · D,) the query of each bag."""
        self._probabilities = torch.empty(0, dtype=cache.data.dtype)
        """(key bags · block_size,)."""
        self._decodes: dict[int | None, list[_Decodes]] = {}
        self._prefills: dict[int | None, list[_Prefill]] = {}
        self._new_keys_at = (torch.empty(0, dtype=torch.int64),) * 2

    def begin(self, batch: FlatBatch) -> None:
        """Lay out one iteration: where its new keys go, and what each kind of layer reads."""
        size, tables = self._cache.block_size, self._tables
        blocks = tables[batch.slots, batch.positions // size].astype(np.int64)
        self._new_keys_at = torch.from_numpy(blocks), torch.from_numpy(batch.positions % size)
        for window in dict.fromkeys(self._windows):
            runs = decode_runs(batch, tables, size, window, slack=_SLACK, most_blocks=self._most_blocks)
            self._decodes[window] = [self._bags_of(some) for some in _together(runs, self._most_blocks)]
            spans = [chunk_span(chunk, tables, size, window, tile=_TILE) for chunk in batch.chunks]
            self._grow_mask(window, max((span.tiles[-1].keys for span in spans), default=0))
            self._prefills[window] = [self._pieces_of(span, self._masks[window]) for span in spans]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `architecture.decoder.Attention`."""
        cache = self._cache
        cache.store(layer, k, v, *self._new_keys_at)
        q = q.view(-1, cache.kv_heads, self._groups, cache.head_dim)  # (tokens, H, G, D)
        out = torch.empty_like(q)
        for decodes in self._decodes[self._windows[layer]]:
            out[decodes.first : decodes.last] = self._decode(layer, decodes, q[decodes.first : decodes.last])
        for chunk in self._prefills[self._windows[layer]]:
            part = slice(chunk.first, chunk.last)
            if chunk.pieces is None:
                seen = k[part].transpose(0, 1), v[part].transpose(0, 1)
            else:
                seen = self._gather(layer, chunk.blocks, chunk.pieces)
            attend_tiles(q[part], *seen, chunk.tiles, out[part])
        return out.flatten(1)

    def _decode(self, layer: int, decodes: _Decodes, q: torch.Tensor) -> torch.Tensor:
        """q (rows, H, G, D) → the same."""
        cache = self._cache
        weights = self._weights[: len(decodes.key_rows)]
        torch.index_select(
            (q * self._scale).view(-1, cache.head_dim), 0, decodes.queries, out=weights.view(-1, cache.head_dim)
        )
        scores = _sum_rows(cache.key_rows[layer], decodes.key_rows, decodes.key_bags, weights).view(-1)
        probabilities = self._probabilities[: len(scores)]
        for run in decodes.runs:
            seen = scores[run.scores].view(run.shape)
            torch.softmax(
                seen if run.mask is None else seen.add_(run.mask), -1, out=probabilities[run.scores].view(run.shape)
            )
        return _sum_rows(cache.value_rows[layer], decodes.value_rows, decodes.value_bags, probabilities).view(q.shape)

    def _gather(self, layer: int, blocks: int, pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (H, blocks · block_size, D), in the buffer."""
        cache = self._cache
        count = pieces.numel() * cache.piece_size
        if count * 3 // 2 > self._buffer.numel():
            self._buffer = torch.empty(count * 3 // 2, dtype=self._buffer.dtype)
        gathered = self._buffer[:count].view(-1, cache.piece_size)
        torch.index_select(cache.pieces[layer], 0, pieces, out=gathered)
        laid, values = gathered.view(2, cache.kv_heads, blocks, cache.piece_size)
        keys = self._buffer[count : count * 3 // 2].view(cache.kv_heads, blocks, cache.block_size, cache.head_dim)
        keys.copy_(laid.view(cache.kv_heads, blocks, cache.head_dim, cache.block_size).transpose(2, 3))
        return keys.flatten(1, 2), values.view(cache.kv_heads, -1, cache.head_dim)

    # ------------------------------------------------------------ layout

    def _bags_of(self, runs: list[DecodeRun]) -> _Decodes:
        cache, size, heads = self._cache, self._cache.block_size, self._cache.kv_heads * self._groups
        pieces = [cache.key_pieces(run.table)[:, :, None, :, None] for run in runs]  # (rows, H, 1, blocks, 1) each
        blocks = np.concatenate([np.full(len(run.table) * heads, run.table.shape[1]) for run in runs])  # (rows·H·G,)
        key_bags = int(blocks.sum())
        if key_bags * size > len(self._probabilities):
            self._weights = torch.empty(key_bags * cache.head_dim * 5 // 4, dtype=cache.data.dtype)
            self._probabilities = torch.empty(key_bags * size * 5 // 4, dtype=cache.data.dtype)
        return _Decodes(
            first=runs[0].first,
            last=runs[-1].last,
            queries=torch.from_numpy(np.repeat(np.arange(len(blocks)), blocks)),
            key_rows=self._for_each_query([piece * cache.head_dim + np.arange(cache.head_dim) for piece in pieces]),
            key_bags=self._bags(np.full(key_bags, cache.head_dim)),
            value_rows=self._for_each_query([(piece + cache.kv_heads) * size + np.arange(size) for piece in pieces]),
            value_bags=self._bags(blocks * size),
            runs=tuple(self._laid(runs, heads)),
        )

    def _laid(self, runs: list[DecodeRun], heads: int) -> Iterator[_Run]:
        last = 0
        for run in runs:
            shape = len(run.table), heads, run.table.shape[1] * self._cache.block_size
            first, last = last, last + math.prod(shape)
            mask = None if run.visible is None else self._mask(torch.from_numpy(run.visible))[:, None]
            yield _Run(slice(first, last), shape, mask)

    def _for_each_query(self, rows: list[NDArray[np.int64]]) -> torch.Tensor:
        """(rows, H, 1, blocks, n) of each run → the flat rows of all their queries: a KV head's read the same."""
        return torch.from_numpy(
            np.concatenate([np.repeat(part.astype(self._row_type), self._groups, axis=2).ravel() for part in rows])
        )

    def _bags(self, sizes: NDArray[np.int64]) -> torch.Tensor:
        """Where each bag begins, and the end."""
        return torch.from_numpy(np.concatenate(([0], np.cumsum(sizes))).astype(self._row_type))

    def _grow_mask(self, window: int | None, keys: int) -> None:
        """One mask serves all tiles, wherever they are in their sequences: each takes the corner that it needs."""
        held = self._masks.get(window)
        if held is None or held.shape[1] < keys:
            self._masks[window] = self._mask(visible_keys(_TILE, keys * 5 // 4, window, self._cache.data.device))

    def _pieces_of(self, span: Span, mask: torch.Tensor) -> _Prefill:
        pieces = None
        if span.tiles[-1].keys > span.last - span.first:
            keys = self._cache.key_pieces(span.table)
            pieces = torch.from_numpy(np.stack((keys, keys + self._cache.kv_heads)).reshape(-1))
        tiles = tuple(
            (tile.first, tile.last, tile.keys, mask[_TILE - (tile.last - tile.first) :, mask.shape[1] - tile.keys :])
            for tile in span.tiles
        )
        return _Prefill(span.first, span.last, span.table.shape[1], pieces, tiles)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """True → 0, False → -inf, in the dtype of the queries."""
        return torch.zeros(visible.shape, dtype=self._cache.data.dtype).masked_fill_(~visible, -torch.inf)


def _together(runs: list[DecodeRun], most_blocks: int) -> Iterator[list[DecodeRun]]:
    """The runs in order, as many at a time as have at most `most_blocks` blocks; a larger one alone."""
    some: list[DecodeRun] = []
    for run in runs:
        if some and sum(other.table.size for other in some) + run.table.size > most_blocks:
            yield some
            some = []
        some.append(run)
    if some:
        yield some


def _sum_rows(table: torch.Tensor, rows: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One weighted sum of rows of `table` (n, width) for each bag: (bags, width)."""
    sums: torch.Tensor = torch.embedding_bag(table, rows, bags, False, 0, False, weights, True)[0]
    return sums
