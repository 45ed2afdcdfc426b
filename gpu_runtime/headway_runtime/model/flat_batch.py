"""One iteration's tokens in one flat batch: decoding rows first, shortest first, then the prefill chunks. Host arrays
only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from headway_core.batching.plan import PlanItem
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a row, at [offset, offset + count) of the flat batch."""

    row: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """`decode_rows[i]` computes its token at `decode_positions[i]`; it stands at place i of the batch. Ascending
    positions."""

    decode_rows: NDArray[np.int64]
    decode_positions: NDArray[np.int64]
    chunks: tuple[Chunk, ...]
    rows: NDArray[np.int64]
    """(tokens,) the row of each token."""
    positions: NDArray[np.int64]
    """(tokens,) the position of each token in its sequence."""
    offsets: NDArray[np.int64]
    """(items,) the place of each item's first token, in the order of the items."""
    sample_places: NDArray[np.int64]
    """Places in the batch whose logits are sampled, in the order of the items that sample."""
    sample_rows: NDArray[np.int64]
    """Their rows."""


def flatten(items: Sequence[PlanItem]) -> FlatBatch:
    """Lay an iteration's items out. A one-token chunk is a decode, whatever it is a part of: the arithmetic is the
    same."""
    singles = sorted(
        (index for index, item in enumerate(items) if item.count == 1), key=lambda index: items[index].start
    )
    longer = [index for index, item in enumerate(items) if item.count > 1]
    decode_rows = np.array([items[index].row for index in singles], dtype=np.int64)
    decode_positions = np.array([items[index].start for index in singles], dtype=np.int64)
    offsets = np.empty(len(items), dtype=np.int64)
    offsets[singles] = np.arange(len(singles))
    chunks, rows, positions, offset = [], [decode_rows], [decode_positions], len(singles)
    for index in longer:
        item = items[index]
        chunks.append(Chunk(item.row, item.start, item.count, offset))
        rows.append(np.full(item.count, item.row, dtype=np.int64))
        positions.append(np.arange(item.start, item.start + item.count, dtype=np.int64))
        offsets[index] = offset
        offset += item.count
    sampling = [index for index, item in enumerate(items) if item.samples]
    return FlatBatch(
        decode_rows=decode_rows,
        decode_positions=decode_positions,
        chunks=tuple(chunks),
        rows=np.concatenate(rows),
        positions=np.concatenate(positions),
        offsets=offsets,
        sample_places=offsets[sampling] + np.array([items[index].count - 1 for index in sampling], dtype=np.int64),
        sample_rows=np.array([items[index].row for index in sampling], dtype=np.int64),
    )
