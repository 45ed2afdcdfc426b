"""Who sees what in an iteration: which rows attend together, over which blocks, and which keys there they see.

Host arrays, but for what a chunk's queries see, computed on the device that asks. Decoding rows are padded to others of
nearly their length, never to the longest. A prefill chunk stands alone and is cut into tiles of queries: most of the
half of the square that lies in the future is not computed. `attend_tiles` is for backends that gather keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_runtime.model.flat_batch import Chunk, FlatBatch

MaskedTile = tuple[int, int, int, torch.Tensor | None]
"""(first query, last query, keys, additive mask) of a tile."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Rows [first, last) of the batch, one query each, over the same number of blocks."""

    first: int
    last: int
    table: NDArray[np.int32]
    """(rows, blocks): a row that has fewer repeats its last one, masked."""
    visible: NDArray[np.bool_] | None
    """(rows, blocks · block_size); None when every row sees every key of its blocks."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, last) of a chunk over the first `keys` keys of its blocks, up to the last query's own."""

    first: int
    last: int
    keys: int


@dataclass(frozen=True, slots=True)
class Span:
    """Queries [first, last) of the batch, all of one row, over that row's blocks."""

    first: int
    last: int
    table: NDArray[np.int32]
    """(1, blocks)."""
    tiles: tuple[Tile, ...]


def decode_runs(
    batch: FlatBatch, tables: NDArray[np.int32], block_size: int, window: int | None, *, slack: float, most_blocks: int
) -> list[DecodeRun]:
    """The decoding rows in runs: the longest of a run has at most `slack` times the blocks of the shortest (or one
    more), and all of them together at most `most_blocks`. Only blocks that the window reaches are among them."""
    newest = batch.decode_positions
    oldest = np.zeros_like(newest) if window is None else np.maximum(newest - window + 1, 0)
    first_blocks, last_blocks = oldest // block_size, newest // block_size
    runs = []
    for first, last in _alike((last_blocks - first_blocks + 1).tolist(), slack, most_blocks):
        lowest, highest = first_blocks[first:last, None], last_blocks[first:last, None]  # (rows, 1)
        blocks = int((highest - lowest).max()) + 1
        table = tables[batch.decode_slots[first:last, None], np.minimum(lowest + np.arange(blocks), highest)]
        places = lowest * block_size + np.arange(blocks * block_size)  # (rows, keys)
        visible = (places <= newest[first:last, None]) & (places >= oldest[first:last, None])
        runs.append(DecodeRun(first, last, table, None if visible.all() else visible))
    return runs


def _alike(counts: list[int], slack: float, most_blocks: int) -> list[tuple[int, int]]:
    runs, first = [], 0
    low = high = 0
    for index, count in enumerate(counts):
        if index == first:
            low = high = count
            continue
        low, high = min(low, count), max(high, count)
        if high > max(low * slack, low + 1) or high * (index - first + 1) > most_blocks:
            runs.append((first, index))
            first, low, high = index, count, count
    if counts:
        runs.append((first, len(counts)))
    return runs


def chunk_span(chunk: Chunk, tables: NDArray[np.int32], block_size: int, window: int | None, *, tile: int) -> Span:
    """A prefill chunk, its queries in tiles of `tile`."""
    oldest = 0 if window is None else max(chunk.start - window + 1, 0)
    first_block, last_block = oldest // block_size, (chunk.start + chunk.count - 1) // block_size
    origin = first_block * block_size
    lasts = (min(first + tile, chunk.count) for first in range(0, chunk.count, tile))
    tiles = tuple(Tile((last - 1) // tile * tile, last, chunk.start + last - origin) for last in lasts)
    table = tables[chunk.slot, None, first_block : last_block + 1]
    return Span(chunk.offset, chunk.offset + chunk.count, table, tiles)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(queries, keys) of bool: what the newest `queries` tokens of a sequence see of its newest `keys`.

    Positions do not enter, so a part that ends at the same corner is what fewer queries see of fewer keys.
    """
    query_ages = torch.arange(queries - 1, -1, -1, device=device)[:, None]
    key_ages = torch.arange(keys - 1, -1, -1, device=device)
    visible = query_ages <= key_ages
    return visible if window is None else visible & (key_ages - query_ages < window)


def attend_tiles(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tiles: Iterable[MaskedTile], out: torch.Tensor
) -> None:
    """A chunk's attention, tile by tile: q and out (queries, H, G, D); keys and values (H, keys, D)."""
    keys, values = keys.unsqueeze(1), values.unsqueeze(1)
    groups = q.shape[2]
    for first, last, visible, mask in tiles:
        attended = functional.scaled_dot_product_attention(
            q[first:last].permute(1, 2, 0, 3),  # (H, G, queries, D)
            keys[:, :, :visible].expand(-1, groups, -1, -1),  # the G queries of a KV head read one copy
            values[:, :, :visible].expand(-1, groups, -1, -1),
            mask,
        )
        out[first:last] = attended.permute(2, 0, 1, 3)
