"""Checkpoints that differ in one field: the logits are transformers' own, or the checkpoint is refused before it is
loaded, by name.

Each row of a table is one kind of config.json that exists in the wild.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_core.errors import CheckpointError
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner

BLOCK = 16
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits_of(folder, tokens, chunk=70):
    """Ours, (tokens, vocab), computed in chunks over shuffled blocks."""
    count = -(-len(tokens) // BLOCK)
    runner = ModelRunner(
        open_checkpoint(folder), max_num_seqs=1, num_blocks=count, block_size=BLOCK, max_model_len=len(tokens)
    )
    runner.bind(0, np.array(tokens, dtype=np.int32), SamplingParams(temperature=0.0), len(tokens))
    blocks = tuple(np.random.default_rng(0).permutation(count).tolist())
    parts = []
    for start in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - start)
        parts.append(runner.logits([PlanItem(0, 0, 0, start, count, False, blocks if start == 0 else ())]))
    return torch.cat(parts)


def some_tokens(count):
    return torch.randint(4, 260, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def assert_same_logits(folder, reference, length, **reference_overrides):
    tokens = some_tokens(length)
    with torch.inference_mode():
        expected = reference(folder, **reference_overrides)(torch.tensor([tokens])).logits[0]
    difference = (logits_of(folder, tokens) - expected).abs()
    assert float(difference.max()) < 1e-3
    for position in (1, 63, 64, length - 1):
        assert float(difference[position].max()) < 1e-3


ROPES = {
    "null": {"rope_scaling": None},
    "yarn by its old name": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", **YARN}},
    "yarn, original length from the config": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "max_position_embeddings": 128,
    },
    "yarn, factor of attention given": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.3, **YARN}},
    "yarn, betas given": {"rope_scaling": {"rope_type": "yarn", "beta_fast": 16, "beta_slow": 2, **YARN}},
    "yarn, not truncated": {"rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
    "yarn, mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **YARN}},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic, within the original length": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "default said aloud": {"rope_scaling": {"rope_type": "default"}},
    "newer form, default": {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "newer form, yarn": {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN}},
    "newer form, llama3": {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "another theta": {"rope_theta": 1000000.0},
    "no theta": {"rope_theta": ...},
    "head_dim of its own": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32},
    "head_dim of its own, yarn": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "rope_scaling": {"type": "yarn", **YARN},
    },
}


@pytest.mark.parametrize("overrides", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_embeddings_are_read_in_every_spelling(family, overrides, tiny_checkpoint, reference):
    assert_same_logits(tiny_checkpoint(family, **overrides), reference, 201)


BIASES_AND_NORMS = {
    "attention bias": ("llama", {"attention_bias": True}),
    "mlp bias": ("llama", {"mlp_bias": True}),
    "attention bias beside q and k norms": ("qwen3", {"attention_bias": True}),
    "every head its own keys": ("llama", {"num_key_value_heads": 4}),
    "KV heads not said": ("llama", {"num_key_value_heads": 4, "attention_dropout": 0.1}),
    "larger epsilon": ("llama", {"rms_norm_eps": 1e-2}),
    "keys that mean nothing here": ("llama", {"pretraining_tp": 1, "use_cache": False, "some_new_key": {"a": 1}}),
    "no architectures, only model_type": ("qwen2", {"architectures": ...}),
}


@pytest.mark.parametrize(("family", "overrides"), BIASES_AND_NORMS.values(), ids=BIASES_AND_NORMS)
def test_biases_norms_and_head_counts(family, overrides, tiny_checkpoint, reference):
    assert_same_logits(tiny_checkpoint(family, **overrides), reference, 80)


QWEN_WINDOW = {"sliding_window": 16}
WINDOWS = {  # family, overrides, the windows that must come out, what the reference is told
    "mistral: a number": ("mistral", {"sliding_window": 16}, (16, 16), {}),
    "mistral: null": ("mistral", {"sliding_window": None}, (None, None), {}),
    "mistral: absent is null": ("mistral", {"sliding_window": ...}, (None, None), {"sliding_window": None}),
    "qwen2: flag off": ("qwen2", {**QWEN_WINDOW, "use_sliding_window": False}, (None,) * 3, {}),
    "qwen2: flag absent": ("qwen2", {**QWEN_WINDOW, "use_sliding_window": ...}, (None,) * 3, {}),
    "qwen2: from the second layer": ("qwen2", {**QWEN_WINDOW, "max_window_layers": 1}, (None, 16, 16), {}),
    "qwen2: no layer left": ("qwen2", {**QWEN_WINDOW, "max_window_layers": 3}, (None,) * 3, {}),
    "qwen2: every layer": ("qwen2", {**QWEN_WINDOW, "max_window_layers": 0}, (16,) * 3, {}),
    "qwen2: layers named": (
        "qwen2",
        {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        (16, None, 16),
        {},
    ),
    "qwen3: flag off": (
        "qwen3",
        {**QWEN_WINDOW, "use_sliding_window": False, "max_window_layers": 1},
        (None, None),
        {},
    ),
    "qwen3: flag on": ("qwen3", {**QWEN_WINDOW, "use_sliding_window": True, "max_window_layers": 1}, (None, 16), {}),
    "llama: none of its business": ("llama", {"sliding_window": 16}, (None, None), {}),
}


@pytest.mark.parametrize(("family", "overrides", "windows", "told"), WINDOWS.values(), ids=WINDOWS)
def test_sliding_windows_apply_where_the_family_says_so(family, overrides, windows, told, tiny_checkpoint, reference):
    folder = tiny_checkpoint(family, **overrides)
    config = open_checkpoint(folder).config
    assert config.windows == windows
    assert config.max_positions == 1024  # a window never shortens the context
    assert_same_logits(folder, reference, 80, **told)


def tied_variants(tiny_checkpoint):
    """Folders made from one set of weights: (tie_word_embeddings, head in the file)."""
    untied = tiny_checkpoint.config("llama", {})
    tensors = tiny_checkpoint.tensors(untied, 0)
    embedding = tensors["model.embed_tokens.weight"]
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    heads = {"none": without, "own": tensors, "same": {**without, "lm_head.weight": embedding.clone()}}
    flags = {"true": True, "false": False, "absent": ...}

    def folder(flag, head):
        config = tiny_checkpoint.config("llama", {"tie_word_embeddings": flags[flag]})
        return tiny_checkpoint.from_tensors(f"tied-{flag}-{head}", config, heads[head])

    return folder


@pytest.mark.parametrize(
    ("flag", "head"), [("true", "none"), ("true", "same"), ("false", "own"), ("false", "same"), ("absent", "own")]
)
def test_the_head_is_the_embedding_or_its_own(flag, head, tiny_checkpoint, reference):
    assert_same_logits(tied_variants(tiny_checkpoint)(flag, head), reference, 80)


@pytest.mark.parametrize(("flag", "head"), [("true", "own"), ("false", "none"), ("absent", "none")])
def test_a_head_that_contradicts_the_flag_is_refused_by_name(flag, head, tiny_checkpoint):
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tied_variants(tiny_checkpoint)(flag, head))
    assert refused.value.key == "lm_head.weight"


REFUSED = {
    "architectures": {"architectures": ["GPT2LMHeadModel"]},
    "model_type": {"model_type": "mamba"},
    "quantization_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "hidden_act": {"hidden_act": "gelu"},
    "rope_scaling.rope_type": {"rope_scaling": {"rope_type": "banana"}},
    "rope_scaling.factor": {"rope_scaling": {"rope_type": "linear"}},
    "rope_scaling.high_freq_factor": {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
    "rope_parameters.rope_type": {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
    "rope_parameters": {
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "rope_theta": {"rope_theta": -1},
    "hidden_size": {"hidden_size": "64"},
    "vocab_size": {"vocab_size": ...},
    "num_attention_heads": {"num_attention_heads": 0},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "head_dim": {"head_dim": 15},
    "tie_word_embeddings": {"tie_word_embeddings": "yes"},
    "max_position_embeddings": {"max_position_embeddings": None},
    "eos_token_id": {"eos_token_id": "</s>"},
}


@pytest.mark.parametrize(("field", "overrides"), REFUSED.items(), ids=REFUSED)
def test_what_would_change_the_result_is_refused_naming_file_and_field(field, overrides, tiny_llama, tmp_path):
    config = json.loads((tiny_llama / "config.json").read_text()) | overrides
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    (tmp_path / "model.safetensors").symlink_to(tiny_llama / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path)
    assert refused.value.path == str(tmp_path / "config.json")
    assert refused.value.key == field


LENGTHS = {  # the documented rule of `Rope.max_positions`
    "default": ({}, 1024),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 2560),
    "yarn": ({"rope_scaling": {"type": "yarn", **YARN}}, 256),
    "llama3": ({"rope_scaling": LLAMA3}, 1024),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
}


@pytest.mark.parametrize(("overrides", "longest"), LENGTHS.values(), ids=LENGTHS)
def test_no_position_beyond_what_the_embedding_can_tell_apart(overrides, longest, tiny_checkpoint):
    checkpoint = open_checkpoint(tiny_checkpoint("llama", **overrides))
    assert checkpoint.config.max_positions == longest
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        ModelRunner(checkpoint, max_num_seqs=1, num_blocks=1, block_size=16, max_model_len=longest + 1)
