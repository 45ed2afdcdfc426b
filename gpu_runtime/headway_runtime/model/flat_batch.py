"""One iteration's tokens in one flat batch: decodes, shortest first, then prefill chunks. Host arrays, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from headway_core.batching.iteration_plan import PlanItem
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a slot, at [offset, offset + count) of the flat batch."""

    slot: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """`decode_slots[i]` computes its token at `decode_positions[i]`, at place i of the batch; positions ascend."""

    decode_slots: NDArray[np.int64]
    decode_positions: NDArray[np.int64]
    chunks: tuple[Chunk, ...]
    slots: NDArray[np.int64]
    """(tokens,) the slot of each token."""
    positions: NDArray[np.int64]
    """(tokens,) the position of each token in its sequence."""
    offsets: NDArray[np.int64]
    """(items,) the place of each item's first token, in the order of the items."""
    sample_places: NDArray[np.int64]
    """Places in the batch whose logits are sampled, in the order of the items that sample."""
    sample_slots: NDArray[np.int64]
    """Their slots."""


def flatten(items: Sequence[PlanItem]) -> FlatBatch:
    """Lay an iteration's items out. A one-token chunk counts as a decode: the arithmetic is the same."""
    singles = [index for index, item in enumerate(items) if item.count == 1]
    singles.sort(key=lambda index: items[index].start)
    longer = [index for index, item in enumerate(items) if item.count > 1]
    decode_slots = np.array([items[index].slot for index in singles], dtype=np.int64)
    decode_positions = np.array([items[index].start for index in singles], dtype=np.int64)
    offsets = np.empty(len(items), dtype=np.int64)
    offsets[singles] = np.arange(len(singles))
    chunks, slots, positions, offset = [], [decode_slots], [decode_positions], len(singles)
    for index in longer:
        item = items[index]
        chunks.append(Chunk(item.slot, item.start, item.count, offset))
        slots.append(np.full(item.count, item.slot, dtype=np.int64))
        positions.append(np.arange(item.start, item.start + item.count, dtype=np.int64))
        offsets[index] = offset
        offset += item.count
    sampling = [index for index, item in enumerate(items) if item.samples]
    return FlatBatch(
        decode_slots=decode_slots,
        decode_positions=decode_positions,
        chunks=tuple(chunks),
        slots=np.concatenate(slots),
        positions=np.concatenate(positions),
        offsets=offsets,
        sample_places=offsets[sampling] + np.array([items[index].count - 1 for index in sampling], dtype=np.int64),
        sample_slots=np.array([items[index].slot for index in sampling], dtype=np.int64),
    )
