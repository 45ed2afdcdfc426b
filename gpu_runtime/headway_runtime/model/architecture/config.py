"""What a model is, by its config.json: whatever changes its results is understood, or refused by file and field.

Keys that do not change what the model computes are ignored. Nothing here opens weights or touches a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from headway_core.errors import CheckpointError

from headway_runtime.model.architecture.rope import Rope, read_rope

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. `windows` has an entry a layer: None attends to everything, w to the newest w tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_positions: int
    """The longest sequence, prompt and output together, that the positions allow; a window does not shorten it."""
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    """The LM head is the embedding matrix."""

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows needs an entry for each of {self.num_layers} layers, not {len(self.windows)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or of the values, of one token."""
        return self.num_kv_heads * self.head_dim

    def matrix_bytes(self, dtype: torch.dtype) -> int:
        """Size of the matrices of all layers, embedding and head apart."""
        in_layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        return self.num_layers * in_layer * dtype.itemsize

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model reads: public name → shape. A tied model's head is not among them."""
        hidden, inter = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (hidden,)
            shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            for name, rows, columns, bias in (
                ("self_attn.q_proj", self.q_size, hidden, self.qkv_bias),
                ("self_attn.k_proj", self.kv_size, hidden, self.qkv_bias),
                ("self_attn.v_proj", self.kv_size, hidden, self.qkv_bias),
                ("self_attn.o_proj", hidden, self.q_size, self.o_bias),
                ("mlp.gate_proj", inter, hidden, self.mlp_bias),
                ("mlp.up_proj", inter, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, inter, self.mlp_bias),
            ):
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[at + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes


def read_config(config: Mapping[str, Any], path: str) -> ModelConfig:
    """The model of a parsed config.json. Raises CheckpointError for fields missing, malformed or not computed here."""
    fields = _Fields(config, path)
    family = _family(config, path)
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            path, "quantization_config", "quantised weights are not supported: use the model's unquantised checkpoint"
        )
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(path, "hidden_act", f"only silu is computed here, not {config['hidden_act']!r}")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(path, "num_key_value_heads", f"must divide num_attention_heads = {heads}, not {kv_heads}")
    if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
        raise CheckpointError(
            path, "head_dim", f"must be given: hidden_size = {hidden} is no multiple of num_attention_heads = {heads}"
        )
    head_dim = fields.count("head_dim", 128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise CheckpointError(path, "head_dim", f"must be even, to be rotated in pairs, not {head_dim}")
    declared = fields.count("max_position_embeddings")
    rope = read_rope(config, path, declared)
    attention_bias = fields.flag("attention_bias", False) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=rope.max_positions(declared),
        windows=_windows(fields, family, layers),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) and family == "llama",
        qk_norm=family == "qwen3",
        tied=fields.flag("tie_word_embeddings", False),
    )


def read_token_ids(config: Mapping[str, Any], path: str, key: str) -> frozenset[int]:
    """A field that holds a token id, a list of them, or null."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise CheckpointError(path, key, f"must be a token id, a list of them or null, not {value!r}")
    return frozenset(ids)


def _family(config: Mapping[str, Any], path: str) -> str:
    architectures = config.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if architectures:
        if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
            raise CheckpointError(path, "architectures", f"must name one of {known}, not {architectures!r}")
        family = ARCHITECTURES[architectures[0]]
        if config.get("model_type", family) != family:
            raise CheckpointError(
                path, "model_type", f"contradicts architectures: {config['model_type']!r} is not {architectures[0]}"
            )
        return family
    if config.get("model_type") in ARCHITECTURES.values():
        return str(config["model_type"])
    reason = f"is missing, and model_type = {config.get('model_type')!r} is none of the known families"
    raise CheckpointError(path, "architectures", reason)


def _windows(fields: _Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer.

    Llama has none. Mistral: a number on every layer; null or absent means none. Qwen: only if `use_sliding_window`, and
    then on the layers that `layer_types` calls sliding_attention, or without it on those from `max_window_layers` on.
    """
    if family == "llama" or (family in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False)):
        return (None,) * layers
    if fields.config.get("sliding_window") is None:
        return (None,) * layers
    window = fields.count("sliding_window")
    if family == "mistral":
        return (window,) * layers
    types = fields.config.get("layer_types")
    if types is None:
        first = fields.count("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            fields.path, "layer_types", f"must name full_attention or sliding_attention for each of {layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


class _Fields:
    """Typed reading of a config's members; null counts as absent."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self.config = config
        self.path = path

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(self.path, key, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(self.path, key, f"must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(self.path, key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(self.path, key, f"must be a text, not {value!r}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(self.path, key, "is missing and has no default")
        return value
