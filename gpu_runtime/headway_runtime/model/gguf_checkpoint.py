"""A model in one GGUF file: config from metadata, weights dequantised by `gguf`, names and row order as elsewhere.

Only the architecture `llama`. Its files hold the rows of Q and K so that rotated pairs are neighbours; here dimension i
pairs with i + head_dim / 2, so the rows are put back. No tokenizer is built here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from headway_core.errors import CheckpointError

from headway_runtime.model.architecture.config import EMBEDDING, HEAD, ModelConfig, read_token_ids
from headway_runtime.model.architecture.rope import Rope, read_rope

_OUTER = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BULKY = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges")
_REFUSED = ("rope.scale_linear", "expert_count", "attention.sliding_window", "rope.scaling.attn_factor")
"""Metadata that would change the results and that is not computed for this format."""


def _read_config(metadata: dict[str, Any], path: str, tensors: dict[str, ReaderTensor]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        reason = f"must be llama, not {architecture!r}: use a safetensors folder for other families"
        raise CheckpointError(path, "general.architecture", reason)
    for key in _REFUSED:
        if value := metadata.get(f"llama.{key}"):
            raise CheckpointError(path, f"llama.{key}", f"is not supported in GGUF, and is {value!r}")

    def count(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(path, f"llama.{key}", f"must be a whole number of at least 1, not {value!r}")
        return value

    hidden, heads, layers = count("embedding_length"), count("attention.head_count"), count("block_count")
    head_dim = count("attention.key_length", hidden // heads)
    if count("attention.value_length", head_dim) != head_dim or count("rope.dimension_count", head_dim) != head_dim:
        reason = f"keys, values and rotation must all span {head_dim} dimensions of a head"
        raise CheckpointError(path, "llama.rope.dimension_count", reason)
    declared = count("context_length")
    rope = _read_rope(metadata, path, declared)
    return ModelConfig(
        family="llama",
        vocab_size=int(tensors[EMBEDDING].shape[1]) if EMBEDDING in tensors else count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=float(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-6)),
        rope=rope,
        max_positions=rope.max_positions(declared),
        windows=(None,) * layers,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        tied=HEAD not in tensors,
    )


def _read_rope(metadata: dict[str, Any], path: str, declared: int) -> Rope:
    """The file's rope keys in config.json's words, read by the same rules."""
    kind = metadata.get("llama.rope.scaling.type", "none")
    scaling = {
        "rope_type": {"none": "default"}.get(kind, kind),
        "factor": metadata.get("llama.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get("llama.rope.scaling.original_context_length", declared),
    }
    config = {"rope_scaling": scaling, "rope_theta": metadata.get("llama.rope.freq_base", 10000.0)}
    return read_rope(config, path, declared)


def _public_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if name in _OUTER:
        return _OUTER[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
    return name


class GgufFile:
    """One open file: its config, its end tokens, and its tensors, dequantised when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the file. Raises CheckpointError, naming the metadata key or the tensor."""
        try:
            reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise CheckpointError(str(path), "", f"cannot be read as GGUF: {error}") from error
        metadata = {name: entry.contents() for name, entry in reader.fields.items() if name not in _BULKY}
        self._path = str(path)
        self._tensors = {_public_name(tensor.name): tensor for tensor in reader.tensors}
        self.config = _read_config(metadata, str(path), self._tensors)
        ids = {
            key: read_token_ids(metadata, str(path), f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot")
        }
        self.eos_ids = ids["eos"] | ids["eot"]
        self.bos_id = min(ids["bos"]) if ids["bos"] else None
        self._check(self.config.tensor_shapes())

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if name not in self._tensors:
                raise CheckpointError(
                    self._path, name, f"is missing: the model needs this tensor of shape {list(shape)}"
                )
            # GGUF names the fastest dimension first.
            stored = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if stored != shape:
                raise CheckpointError(
                    self._path, name, f"has shape {list(stored)}, but the metadata asks for {list(shape)}"
                )
        for name in sorted(set(self._tensors) - set(shapes)):
            raise CheckpointError(
                self._path, name, "is read by no part of this model: its metadata does not describe it"
            )

    def load(self, name: str) -> torch.Tensor:
        """The tensor in float32, Q and K rows in the order that `architecture.rope` rotates."""
        found = self._tensors[name]
        try:
            # A copy: the file is mapped read-only.
            values = torch.from_numpy(np.array(dequantize(found.data, found.tensor_type)))
        except NotImplementedError as error:
            raise CheckpointError(
                self._path, name, f"is stored as {found.tensor_type.name}, which cannot be dequantised"
            ) from error
        if ".q_proj." in name or ".k_proj." in name:
            values = _unpermute(values, self.config.head_dim)
        return values


def _unpermute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from neighbouring pairs to halves: (H, D/2, 2, …) → (H, 2, D/2, …)."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])  # (H, D/2, 2, columns)
    return heads.transpose(1, 2).reshape(rows.shape)
