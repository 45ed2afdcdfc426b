"""Keys and values of all sequences, in blocks: only where they lie. Who owns which block is decided elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway_runtime.model.architecture.config import ModelConfig


class KVCache:
    """One tensor for everything, block-major: a block is one contiguous piece, whatever is done with all of it.

    Inside a block: (layers, keys then values, kv_heads, piece). A piece is what one head keeps of a block's tokens:
    values lie token by token, (block_size, head_dim), keys dimension by dimension, (head_dim, block_size). So scores
    and output of a block are weighted sums of rows of its keys and of its values (see `attention_cpu`).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = config.num_layers
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.piece_size = block_size * config.head_dim
        shape = num_blocks, self.layers, 2, self.kv_heads, self.piece_size
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._keys = self.data[:, :, 0].view(num_blocks, self.layers, self.kv_heads, self.head_dim, block_size)
        self._values = self.data[:, :, 1].view(num_blocks, self.layers, self.kv_heads, block_size, self.head_dim)
        flat = self.data.view(-1)
        step = 2 * self.kv_heads * self.piece_size  # from a layer to the next within a block
        self.pieces = [flat[layer * step :].view(-1, self.piece_size) for layer in range(self.layers)]
        """For each layer (pieces, piece_size): `key_pieces` says which piece holds what."""
        self.key_rows = [pieces.view(-1, block_size) for pieces in self.pieces]
        """For each layer: row piece · head_dim + d holds dimension d of the keys of a block's tokens."""
        self.value_rows = [pieces.view(-1, self.head_dim) for pieces in self.pieces]
        """For each layer: row piece · block_size + t holds the values of a block's token t."""

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * config.num_layers * config.kv_size * dtype.itemsize

    def key_pieces(self, table: NDArray[np.int32]) -> NDArray[np.int64]:
        """Blocks (rows, blocks) → pieces of their keys (rows, kv_heads, blocks); values are `kv_heads` pieces on."""
        start = table.astype(np.int64) * (self.layers * 2 * self.kv_heads)
        return start[:, None, :] + np.arange(self.kv_heads)[:, None]

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Write keys and values (tokens, kv_heads, head_dim) to places `offsets` of `blocks`, int64 (tokens,) each."""
        self._keys[:, layer].permute(0, 3, 1, 2)[blocks, offsets] = keys  # (blocks, block_size, H, D)
        self._values[:, layer].transpose(1, 2)[blocks, offsets] = values  # (blocks, block_size, H, D)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero these blocks."""
        self.data.index_fill_(0, blocks, 0)
