"""How many KV blocks a replica gets: what was asked for, or a share of the memory that is there."""

from __future__ import annotations

import math

import torch

from headway_runtime.model.checkpoint import Checkpoint
from headway_runtime.model.kv_cache import KVCache
from headway_runtime.settings import EngineSettings

CPU_DEFAULT = 2**30
"""Bytes for keys and values on a CPU when nothing is said."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory for weights, keys and values; the rest is for activations and fragmentation."""


def choose_num_blocks(settings: EngineSettings, checkpoint: Checkpoint, max_model_len: int) -> int:
    """Blocks of the pool. Never more than a full batch of longest sequences could fill."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    block_bytes = KVCache.bytes_per_token(checkpoint.config, checkpoint.dtype) * settings.block_size
    memory = settings.kv_cache_memory_bytes
    if memory is None:
        memory = CPU_DEFAULT if settings.device == "cpu" else _free_gpu_bytes(settings.device, checkpoint)
    useful = settings.max_num_seqs * -(-max_model_len // settings.block_size)
    return min(memory // block_bytes, useful)


def _free_gpu_bytes(device: str, checkpoint: Checkpoint) -> int:
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    weights = sum(math.prod(shape) for shape in checkpoint.config.tensor_shapes().values()) * checkpoint.dtype.itemsize
    return max(0, int(free * GPU_SHARE) - weights)
