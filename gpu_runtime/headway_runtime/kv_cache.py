"""Keys and values of all sequences, in blocks. Which sequence owns which block is decided elsewhere; this is only where they lie."""

from __future__ import annotations

import torch

from headway_runtime.models.config import ModelConfig


class KVCache:
    """One tensor for everything: (blocks, layers, 2, kv_heads, block_size, head_dim), keys before values.

    Block-major, so that a block is one contiguous piece whatever is done with it as a whole; head-major inside, so that one head's keys
    are contiguous over a block's tokens and a sequence is gathered in pieces of block_size · head_dim numbers.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = config.num_layers
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.data = torch.zeros((num_blocks, self.layers, 2, self.kv_heads, block_size, self.head_dim), dtype=dtype, device=device)
        self.pieces = self.data.view(-1, block_size * self.head_dim)
        """(blocks · layers · 2 · kv_heads, block_size · head_dim): one head's keys or values of one block."""
        self.tokens = self.data.view(-1, self.head_dim)
        """(blocks · layers · 2 · kv_heads · block_size, head_dim): one head's key or value of one token."""

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * config.num_layers * config.kv_size * dtype.itemsize

    @property
    def pieces_per_block(self) -> int:
        """Rows of `pieces` from a block to the next."""
        return self.layers * 2 * self.kv_heads

    def store(self, layer: int, kind: int, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys (kind 0) or values (kind 1) of the newest tokens.

        `values` (tokens, kv_heads, head_dim); `slots` (tokens · kv_heads,) int64: rows of `tokens` for layer 0's keys.
        """
        step = self.block_size * self.kv_heads
        self.tokens.index_copy_(0, slots + (2 * layer + kind) * step, values.reshape(-1, self.head_dim))
