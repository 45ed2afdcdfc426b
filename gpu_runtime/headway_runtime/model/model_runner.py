"""Runs iterations of a model: what the scheduler planned, as numbers, becomes one forward pass and new tokens.

A slot is a place in the running batch: its tokens and block table are rows of host arrays, written once and extended in
place. The runner only computes the items it is given: the same items give the same tokens, however they are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_core.errors import CheckpointError
from numpy.typing import NDArray

from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.architecture.decoder import Decoder
from headway_runtime.model.attention_compiled import CompiledAttention, kernels_for
from headway_runtime.model.attention_cpu import CpuAttention
from headway_runtime.model.attention_cuda import CudaAttention
from headway_runtime.model.checkpoint import Checkpoint
from headway_runtime.model.flat_batch import FlatBatch, flatten
from headway_runtime.model.kv_cache import KVCache
from headway_runtime.model.logits_processors import to_device
from headway_runtime.model.sampler import Sampled, Sampler


class ModelRunner:
    """A model, its KV cache of `num_blocks` blocks and `max_num_seqs` slots. Not thread-safe: one engine owns it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        device: str = "cpu",
        threads: int | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """`eos_ids`: end tokens besides the checkpoint's. Raises CheckpointError, for a long `max_model_len` too."""
        positions, rope = checkpoint.config.max_positions, checkpoint.config.rope.kind
        if max_model_len > positions:
            reason = f"with rope of type {rope} the model has {positions} positions, {max_model_len} were asked for"
            raise CheckpointError(str(checkpoint.path), "max_position_embeddings", reason)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.config = checkpoint.config
        self.max_model_len = max_model_len
        self.eos_ids = checkpoint.eos_ids | frozenset(eos_ids)
        self.kv_bytes_per_token = KVCache.bytes_per_token(checkpoint.config, checkpoint.dtype)
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        with torch.inference_mode():
            self._cache = KVCache(checkpoint.config, num_blocks, block_size, checkpoint.dtype, self.device)
            self._decoder = Decoder(checkpoint, max_model_len, self.device)
            self._attention = self._make_attention(checkpoint.dtype)
        self._sampler = Sampler(max_num_seqs, checkpoint.config.vocab_size, self.device, self.eos_ids)

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits."""
        return self.config.vocab_size

    @property
    def layouts(self) -> str:
        """How the matrices are laid out, in words."""
        return str(self._decoder.layouts)

    def bind(
        self, slot: int, tokens: Sequence[int] | NDArray[np.int32], params: SamplingParams, num_prompt: int
    ) -> None:
        """Give a slot to a sequence, before the first item of an epoch.

        `tokens` are all its known tokens, of which the first `num_prompt` are its prompt. Raises RequestError for
        parameters that this vocabulary does not allow; the slot then stays free.
        """
        known = np.asarray(tokens, dtype=np.int32)
        self._sampler.bind(slot, params, known[:num_prompt].tolist(), known[num_prompt:].tolist())
        self._tokens[slot, : len(known)] = known
        self._num_tokens[slot] = len(known)
        self._num_blocks[slot] = 0

    def free(self, slot: int) -> None:
        """Take a slot back. Freeing a free slot changes nothing."""
        self._sampler.free(slot)
        self._num_tokens[slot] = 0
        self._num_blocks[slot] = 0

    @torch.inference_mode()
    def execute(self, items: Sequence[PlanItem]) -> Sampled:
        """Compute the items; the new token of each that samples, in their order, is appended to its slot."""
        batch = self._begin(items)
        hidden = self._hidden(batch, batch.sample_places)
        sampled = Sampled(np.zeros(0, dtype=np.int32))
        if len(batch.sample_places):
            sampled = self._sampler.sample(self._decoder.logits(hidden), batch.sample_slots)
            known = self._num_tokens[batch.sample_slots]
            fits = (sampled.ids >= 0) & (known < self.max_model_len)
            slots = batch.sample_slots[fits]
            self._tokens[slots, known[fits]] = sampled.ids[fits]
            self._num_tokens[slots] += 1
        return sampled

    @torch.inference_mode()
    def logits(self, items: Sequence[PlanItem]) -> torch.Tensor:
        """Compute the items, sample nothing; the logits after every token of theirs, item by item: (tokens, vocab)."""
        batch = self._begin(items)
        places = np.concatenate([batch.offsets[index] + np.arange(item.count) for index, item in enumerate(items)])
        return self._decoder.logits(self._hidden(batch, places))

    def _make_attention(self, dtype: torch.dtype) -> CpuAttention | CompiledAttention | CudaAttention:
        config, cache, tables = self.config, self._cache, self._tables
        if self.device.type == "cuda":
            return CudaAttention(config, cache, tables)
        if (kernels := kernels_for(cache.head_dim, cache.block_size, dtype)) is not None:
            return CompiledAttention(config, cache, tables, kernels)
        return CpuAttention(config, cache, tables)

    def _begin(self, items: Sequence[PlanItem]) -> FlatBatch:
        """Extend the block tables and lay the batch out."""
        for item in items:
            if item.new_blocks:
                self._append_blocks(item)
        batch = flatten(items)
        self._attention.begin(batch)
        return batch

    def _hidden(self, batch: FlatBatch, places: NDArray[np.int64]) -> torch.Tensor:
        """Store the keys and values of all tokens, and return the last layer's output at these places."""
        ids = self._tokens[batch.slots, batch.positions].astype(np.int64)
        tokens, positions, wanted = (to_device(array, self.device) for array in (ids, batch.positions, places))
        return self._decoder.hidden(tokens, positions, self._attention, wanted)

    def _append_blocks(self, item: PlanItem) -> None:
        held = int(self._num_blocks[item.slot])
        total = held + len(item.new_blocks)
        self._tables[item.slot, held:total] = item.new_blocks
        self._num_blocks[item.slot] = total
        # Blocks before `start` hold a shared prefix. Others are read, masked, before they are written: zero them.
        fresh = item.new_blocks[max(0, -(-item.start // self._block_size) - held) :]
        if fresh:
            self._cache.clear(to_device(np.array(fresh, dtype=np.int64), self.device))
