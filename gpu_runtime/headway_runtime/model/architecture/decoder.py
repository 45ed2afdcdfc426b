"""The decoder of all families: Llama, Mistral, Qwen2 and Qwen3 differ in their config alone.

One iteration is one flat batch of tokens of many sequences. Only the attention, which is passed in, knows which token
belongs to which sequence. Inference only: no gradients, no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from headway_runtime.model.architecture.config import EMBEDDING, HEAD
from headway_runtime.model.architecture.rope import RopeTable, rotate
from headway_runtime.model.checkpoint import Checkpoint
from headway_runtime.model.linear import Linear, WeightLayouts, choose_layouts


class Attention(Protocol):
    """What the decoder asks of an iteration's attention."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores the new keys and values; each query attends to its own sequence up to itself.

        q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) → (tokens, heads · head_dim).
        """


class Decoder:
    """The weights of a model, and what an iteration does with them. `max_len` positions get a rotation."""

    def __init__(self, checkpoint: Checkpoint, max_len: int, device: torch.device) -> None:
        config = checkpoint.config
        at = "model.layers.0.mlp."
        examples = [checkpoint.tensor(f"{at}up_proj.weight"), checkpoint.tensor(f"{at}down_proj.weight")]
        layouts = choose_layouts(examples, config.matrix_bytes(checkpoint.dtype), device)

        def load(*names: str) -> torch.Tensor:
            tensors = [checkpoint.tensor(name) for name in names]
            return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).to(device)

        def linear(*names: str, bias: bool) -> Linear:
            weights, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names]
            return Linear(load(*weights), load(*biases) if bias else None, layouts)

        self.config = config
        self.layouts = layouts
        self.embedding = load(EMBEDDING)  # (vocab, hidden)
        self.rope = RopeTable(config.rope, config.head_dim, max_len, checkpoint.dtype, device)
        self.layers = []
        for index in range(config.num_layers):
            at = f"model.layers.{index}."
            self.layers.append(
                _Layer(
                    input_norm=load(at + "input_layernorm.weight"),
                    qkv=linear(*(f"{at}self_attn.{part}_proj" for part in "qkv"), bias=config.qkv_bias),
                    q_norm=load(at + "self_attn.q_norm.weight") if config.qk_norm else None,
                    k_norm=load(at + "self_attn.k_norm.weight") if config.qk_norm else None,
                    output=linear(at + "self_attn.o_proj", bias=config.o_bias),
                    mlp_norm=load(at + "post_attention_layernorm.weight"),
                    # Apart: on a CPU one product twice as wide is slower: with many rows its result leaves the cache.
                    gate=linear(at + "mlp.gate_proj", bias=config.mlp_bias),
                    up=linear(at + "mlp.up_proj", bias=config.mlp_bias),
                    down=linear(at + "mlp.down_proj", bias=config.mlp_bias),
                )
            )
        self.norm = load("model.norm.weight")
        self.head = Linear(self.embedding if config.tied else load(HEAD), None, WeightLayouts(layouts.few, layouts.few))

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention, wanted: torch.Tensor
    ) -> torch.Tensor:
        """ids, positions (tokens,), `wanted` places (rows,), int64 → the last layer's output there, not normed.

        Of the other tokens only keys and values are needed, so the last layer computes nothing else for them.
        """
        config = self.config
        first_k, first_v = config.num_heads, config.num_heads + config.num_kv_heads
        cos, sin = self.rope.at(positions)
        x = self.embedding.index_select(0, ids)  # (tokens, hidden)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            heads = qkv.view(len(ids), -1, config.head_dim)  # (tokens, heads + 2 · kv_heads, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                heads[:, :first_k] = self._norm(heads[:, :first_k], layer.q_norm)
                heads[:, first_k:first_v] = self._norm(heads[:, first_k:first_v], layer.k_norm)
            rotated = rotate(heads[:, :first_v], cos, sin)  # (tokens, heads + kv_heads, head_dim)
            attended = attention.attend(index, rotated[:, :first_k], rotated[:, first_k:], heads[:, first_v:])
            if layer is self.layers[-1]:
                attended, x = attended.index_select(0, wanted), x.index_select(0, wanted)  # (rows, …)
                if not len(wanted):
                    break
            x = layer.output(attended).add_(x)
            normed = self._norm(x, layer.mlp_norm)
            gate = functional.silu(layer.gate(normed), inplace=True)  # (tokens, intermediate)
            x = layer.down(gate.mul_(layer.up(normed))).add_(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) of `hidden` → float32 (rows, vocab)."""
        return self.head(self._norm(hidden, self.norm)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_eps)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear
