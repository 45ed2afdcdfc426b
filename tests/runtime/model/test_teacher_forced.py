"""Logits of given tokens, in chunks, beside others: within rounding of transformers' plain pass, at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
LENGTHS = [40, 97, 130]


def sequences(vocab_size):
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def batched_logits(folder, dtype, tokens, block_size, chunk, device="cpu"):
    """Each sequence's logits; all advance together, `chunk` tokens an iteration, the second one token behind the first
    and so on."""
    per_row = [-(-len(one) // block_size) for one in tokens]
    runner = ModelRunner(
        open_checkpoint(folder, dtype, device),
        max_num_seqs=len(tokens),
        num_blocks=sum(per_row),
        block_size=block_size,
        max_model_len=256,
        device=device,
    )
    blocks = np.random.default_rng(1).permutation(sum(per_row)).tolist()
    for row, one in enumerate(tokens):
        runner.bind(row, np.array(one, dtype=np.int32), SamplingParams(temperature=0.0), len(one))
    found = [[] for _ in tokens]
    done = [0] * len(tokens)
    while any(done[row] < len(one) for row, one in enumerate(tokens)):
        items = []
        for row, one in enumerate(tokens):
            count = min(chunk if done[row] else max(1, chunk - row), len(one) - done[row])
            if count:
                new = tuple(blocks.pop() for _ in range(per_row[row])) if done[row] == 0 else ()
                items.append(PlanItem(row, 0, row, done[row], count, False, new))
        logits = runner.logits(items).cpu()
        for item, part in zip(items, logits.split([item.count for item in items]), strict=True):
            found[item.slot].append(part)
            done[item.slot] += item.count
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (16, 1), (16, 64), (32, 16), (32, 1000)])
def test_float32_logits_are_those_of_a_plain_pass(family, block_size, chunk, oracle):
    tokens = sequences(oracle(family).vocab_size)
    for one, logits in zip(
        tokens, batched_logits(oracle(family).folder, "float32", tokens, block_size, chunk), strict=True
    ):
        assert float((logits - oracle(family).logits(one)).abs().max()) < 1e-3


def assert_within_the_format(family, dtype, oracle, reference, device="cpu"):
    """Our error against float32 is at most twice that of transformers in the same format: neither is the truth."""
    tokens = sequences(oracle(family).vocab_size)
    theirs = reference(oracle(family).folder).to(getattr(torch, dtype))
    for one, logits in zip(tokens, batched_logits(oracle(family).folder, dtype, tokens, 16, 16, device), strict=True):
        exact = oracle(family).logits(one)
        with torch.inference_mode():
            rounded = theirs(torch.tensor([one])).logits[0].float()
        assert logits.dtype == torch.float32
        assert float((logits - exact).abs().mean()) <= 2 * float((rounded - exact).abs().mean())
        assert float((logits - exact).abs().max()) <= 2 * float((rounded - exact).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_no_worse_than_transformers(family, dtype, oracle, reference):
    assert_within_the_format(family, dtype, oracle, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_rounds_no_worse_than_transformers(family, dtype, oracle, reference):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
    if dtype == "float32":
        tokens = sequences(oracle(family).vocab_size)
        for one, logits in zip(
            tokens, batched_logits(oracle(family).folder, dtype, tokens, 16, 16, "cuda"), strict=True
        ):
            assert float((logits - oracle(family).logits(one)).abs().max()) < 1e-2
    else:
        assert_within_the_format(family, dtype, oracle, reference, "cuda")


def test_a_gpu_step_never_waits_for_the_device(oracle):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
    runner = ModelRunner(
        open_checkpoint(oracle("llama").folder, "float32", "cuda"),
        max_num_seqs=2,
        num_blocks=8,
        block_size=16,
        max_model_len=64,
        device="cuda",
    )
    for row in range(2):
        runner.bind(row, np.arange(4, 24, dtype=np.int32), SamplingParams(temperature=0.0), 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.logits([PlanItem(0, 0, 0, 0, 20, False, (0, 1)), PlanItem(1, 0, 1, 0, 20, False, (2, 3))])
        runner.logits([PlanItem(0, 0, 0, 19, 1, False, ()), PlanItem(1, 0, 1, 19, 1, False, ())])
    finally:
        torch.cuda.set_sync_debug_mode("default")
