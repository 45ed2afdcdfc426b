"""Both paged attentions against the plain formula, over scattered blocks, mixed batches, windows, and stale
neighbours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_runtime.model import attention_cpu
from headway_runtime.model.architecture.config import read_config
from headway_runtime.model.attention_compiled import CompiledAttention, kernels_for
from headway_runtime.model.attention_cpu import CpuAttention
from headway_runtime.model.attention_cuda import CudaAttention
from headway_runtime.model.flat_batch import flatten
from headway_runtime.model.kernels.library import kernels
from headway_runtime.model.kv_cache import KVCache

ATTENTIONS = {
    "cpu": (CpuAttention, "cpu"),
    "compiled": (CompiledAttention, "cpu"),
    "cuda's on a cpu": (CudaAttention, "cpu"),
    "cuda": (CudaAttention, "cuda"),
}
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 100, 7, 64]
DECODES, CHUNKS = 8, ((8, 3, 4), (9, 0, 64))
"""The first eight rows decode their last token; (row, start, count) for the others."""


def config_with(window, kv_heads=2, layers=2):
    return read_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 96,
            "intermediate_size": 8,
            "num_hidden_layers": layers,
            "num_attention_heads": 6,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 512,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 1,
        },
        "config.json",
    )


def scattered_tables(block_size, draw):
    """A block table for each length, blocks in no order, and how many there are."""
    counts = [-(-length // block_size) for length in LENGTHS]
    blocks = draw.permutation(sum(counts) + 3)
    tables = np.zeros((len(LENGTHS), max(counts)), dtype=np.int32)
    at = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[at : at + count]
        at += count
    return tables, len(blocks)


def plain(q, keys, values, position, window):
    """One query (heads, D) at `position` over keys and values (length, kv_heads, D)."""
    group = q.shape[0] // keys.shape[1]
    low = 0 if window is None else max(0, position - window + 1)
    keys, values = (x[low : position + 1].repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,lhd->hl", q, keys) / q.shape[-1] ** 0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


def make(attention_type, config, cache, tables):
    """An attention of this type; a skip says why there is none here."""
    if attention_type is not CompiledAttention:
        return attention_type(config, cache, tables)
    found = kernels_for(cache.head_dim, cache.block_size, cache.data.dtype)
    if found is None and isinstance(kernels(), str):
        pytest.skip(f"no kernels here: {kernels()}")
    return (
        pytest.skip("the kernels take no blocks of this size")
        if found is None
        else CompiledAttention(config, cache, tables, found)
    )


@pytest.mark.parametrize("name", [*list(ATTENTIONS)[:3], pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 16, 20])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_each_query_sees_its_own_past_and_nothing_else(name, block_size, window, kv_heads):
    attention_type, device = ATTENTIONS[name]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
    draw = np.random.default_rng(3)
    torch.manual_seed(3)
    config = config_with(window, kv_heads)
    tables, num_blocks = scattered_tables(block_size, draw)
    cache = KVCache(config, num_blocks, block_size, torch.float32, torch.device(device))
    cache.data.fill_(1e4)  # what is not a row's own must not count
    attention = make(attention_type, config, cache, tables)
    starts = [length - 1 for length in LENGTHS[:DECODES]] + [start for _, start, _ in CHUNKS]
    keys, values = (torch.randn(2, len(LENGTHS), max(LENGTHS), kv_heads, 16) for _ in range(2))
    for layer in range(2):
        for row, start in enumerate(starts):
            for position in range(start):
                block, offset = (
                    torch.tensor([int(x)]) for x in (tables[row, position // block_size], position % block_size)
                )
                cache.store(
                    layer,
                    keys[layer, row, position][None].to(device),
                    values[layer, row, position][None].to(device),
                    block,
                    offset,
                )
    items = [PlanItem(row, 0, row, start, 1, True, ()) for row, start in enumerate(starts[:DECODES])]
    items += [PlanItem(row, 0, row, start, count, True, ()) for row, start, count in CHUNKS]
    batch = flatten(items)
    attention.begin(batch)
    q = torch.randn(len(batch.slots), config.num_heads, 16)
    for layer in range(2):
        new_keys, new_values = (x[layer, batch.slots, batch.positions].to(device) for x in (keys, values))
        out = attention.attend(layer, q.to(device), new_keys, new_values).cpu().view(q.shape)
        for place, (row, position) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)):
            expected = plain(q[place], keys[layer, row], values[layer, row], position, config.windows[layer])
            torch.testing.assert_close(out[place], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entries", [1, 700, 1500])
def test_rows_that_are_too_many_for_one_sum_go_in_parts(entries, monkeypatch):
    config, draw = config_with(None), np.random.default_rng(3)
    tables, num_blocks = scattered_tables(16, draw)
    cache = KVCache(config, num_blocks, 16, torch.float32, torch.device("cpu"))
    cache.data.normal_()
    batch = flatten([PlanItem(row, 0, row, length - 1, 1, True, ()) for row, length in enumerate(LENGTHS)])
    q, new_keys, new_values = (torch.randn(len(LENGTHS), heads, 16) for heads in (6, 2, 2))
    whole = CpuAttention(config, cache, tables)
    monkeypatch.setattr(attention_cpu, "_BAG_ENTRIES", entries)
    parted = CpuAttention(config, cache, tables)
    for attention in (whole, parted):
        attention.begin(batch)
    assert len(whole._decodes[None]) == 1 < len(parted._decodes[None])
    for layer in range(2):
        torch.testing.assert_close(
            parted.attend(layer, q, new_keys, new_values), whole.attend(layer, q, new_keys, new_values)
        )


def test_decoding_rows_are_never_padded_to_the_longest():
    config = config_with(None)
    block_size, lengths = 16, [20, 30, 400, 500, 5000]
    tables = np.arange(5 * 400, dtype=np.int32).reshape(5, 400)
    cache = KVCache(config, 1, block_size, torch.float32, torch.device("cpu"))
    attention = CpuAttention(config, cache, tables)
    attention.begin(flatten([PlanItem(row, 0, row, length - 1, 1, True, ()) for row, length in enumerate(lengths)]))
    read = sum(run.value_rows.numel() for run in attention._decodes[None]) / config.num_heads
    assert read < 1.25 * sum(lengths)


def held_bytes(parts):
    """Bytes of the storages behind all tensors in nested tuples, lists, dictionaries and dataclasses; a shared one
    counts once."""
    storages, stack = {}, [parts]
    while stack:
        part = stack.pop()
        if isinstance(part, torch.Tensor):
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, (list, tuple)):
            stack += part
        elif dataclasses.is_dataclass(part):
            stack += [getattr(part, field.name) for field in dataclasses.fields(part)]
    return sum(storages.values())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_kernels_give_the_same_bits_on_any_number_of_threads(count):
    config, draw = config_with(20), np.random.default_rng(4)
    torch.manual_seed(4)
    tables, num_blocks = scattered_tables(16, draw)
    cache = KVCache(config, num_blocks, 16, torch.float32, torch.device("cpu"))
    cache.data.normal_()
    attention = make(CompiledAttention, config, cache, tables)
    attention.begin(flatten([PlanItem(row, 0, row, 0, length, True, ()) for row, length in enumerate(LENGTHS)]))
    q, new_keys, new_values = (torch.randn(sum(LENGTHS), heads, 16) for heads in (6, 2, 2))
    alone = [attention.attend(layer, q, new_keys, new_values) for layer in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        for layer in range(2):
            assert torch.equal(attention.attend(layer, q, new_keys, new_values), alone[layer])
    finally:
        torch.set_num_threads(before)


def test_in_kernels_a_broken_number_stays_with_its_sequence():
    """Neither NaN nor infinity becomes a number on the way, and no other sequence sees it, stale blocks included."""
    config, draw = config_with(None), np.random.default_rng(5)
    torch.manual_seed(5)
    tables, num_blocks = scattered_tables(16, draw)
    cache = KVCache(config, num_blocks, 16, torch.float32, torch.device("cpu"))
    cache.data.fill_(torch.nan)  # what a sequence has not written must not be read
    attention = make(CompiledAttention, config, cache, tables)
    batch = flatten([PlanItem(row, 0, row, 0, length, True, ()) for row, length in enumerate(LENGTHS)])
    q, new_keys, new_values = (torch.randn(sum(LENGTHS), heads, 16) for heads in (6, 2, 2))
    broken = {6: torch.nan, 7: torch.inf}
    for row, number in broken.items():
        q[batch.slots == row, 0, 0] = number
        new_keys[batch.slots == row] = 1.0
    attention.begin(batch)
    out = attention.attend(0, q, new_keys, new_values).view(q.shape)
    for row in range(len(LENGTHS)):
        own = out[batch.slots == row]
        assert torch.isfinite(own).all() == (row not in broken)
        assert torch.isfinite(own[:, 1:]).all()


@pytest.mark.parametrize("window", [None, 70_000])
def test_a_long_context_costs_little_beside_its_keys_and_values(window):
    length, block_size, layers = 100_000, 32, 1 if window is None else 2
    config = config_with(window, layers=layers)
    blocks = -(-length // block_size)
    torch.manual_seed(5)
    cache = KVCache(config, blocks, block_size, torch.float32, torch.device("cpu"))
    cache.data.normal_()
    tables = np.random.default_rng(5).permutation(blocks).astype(np.int32)[None]
    attention = CpuAttention(config, cache, tables)
    groups, head_dim = 3, config.head_dim

    attention.begin(flatten([PlanItem(0, 0, 0, length - 1, 1, True, ())]))
    one_layer = cache.data.nbytes / layers
    share = groups * (1 / block_size + 1 / head_dim) / 2
    assert held_bytes(attention._decodes) <= 1.1 * layers * one_layer * share
    assert held_bytes((attention._weights, attention._probabilities)) <= 1.3 * one_layer * share, (
        "one pair of buffers for all layers"
    )

    held = {}
    for count in (64, 1024):
        attention.begin(flatten([PlanItem(0, 0, 0, length - count, count, True, ())]))
        held[count] = held_bytes((attention._prefills, attention._masks))
    assert held[1024] < 1.1 * held[64], "a longer chunk needs no more"

    layer = layers - 1
    found = kernels_for(head_dim, block_size, torch.float32)
    compiled = None if found is None else CompiledAttention(config, cache, tables, found)
    for start in (length - 1, length - 100):
        batch = flatten([PlanItem(0, 0, 0, start, length - start, True, ())])
        attention.begin(batch)
        q = torch.randn(len(batch.slots), config.num_heads, head_dim)
        new_keys, new_values = (torch.randn(len(batch.slots), 2, head_dim) for _ in range(2))
        for one in range(layers):
            out = attention.attend(one, q, new_keys, new_values).view(q.shape)
        if compiled is not None:
            compiled.begin(batch)
            torch.testing.assert_close(
                compiled.attend(layer, q, new_keys, new_values).view(q.shape), out, rtol=1e-4, atol=1e-5
            )
        order = torch.from_numpy(tables[0].astype(np.int64))
        keys = cache._keys[order, layer].permute(0, 3, 1, 2).flatten(0, 1)  # (tokens, H, D)
        values = cache._values[order, layer].transpose(1, 2).flatten(0, 1)
        for place in {0, len(batch.slots) - 1}:
            expected = plain(q[place], keys, values, start + place, config.windows[layer])
            torch.testing.assert_close(out[place], expected, rtol=1e-4, atol=1e-5)
