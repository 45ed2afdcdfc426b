"""Tiny checkpoints made by code: real folders that the runtime and transformers both open.

Weights are drawn with standard deviation 0.2: at the usual 0.02 a random model repeats
one or two tokens, and comparing texts proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

torch.set_num_threads(1)

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = (
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("o", "r"),
    ("Ġw", "or"),
    ("t", "h"),
    ("i", "n"),
    ("Ġ", "th"),
)
CHAT_TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES)
FAMILIES: dict[str, dict[str, Any]] = {
    # grouped-query attention, a head of its own
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # one KV head for all, a window on every layer
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 24,
    },
    # q, k, v biases, tied embeddings, a window from the second layer on
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    # q and k norms, a head_dim that is not hidden_size / heads, tied embeddings
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}


def tiny_config(family: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a tiny model; an override of `...` removes the key."""
    config = {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **FAMILIES[family],
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not ...}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint with this config holds, by their public names."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or (
        128 if config["model_type"] == "qwen3" else hidden // config["num_attention_heads"]
    )
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias = config.get("attention_bias", False)
    qkv_bias = attention_bias or config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, out, inside, bias in (
            ("self_attn.q_proj", q, hidden, qkv_bias),
            ("self_attn.k_proj", kv, hidden, qkv_bias),
            ("self_attn.v_proj", kv, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q, attention_bias),
            ("mlp.gate_proj", inter, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", inter, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, inter, config.get("mlp_bias", False)),
        ):
            shapes[f"{at}{name}.weight"] = (out, inside)
            if bias:
                shapes[f"{at}{name}.bias"] = (out,)
        if config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head_dim,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def draw_tensors(config: Mapping[str, Any], seed: int, std: float = 0.2) -> dict[str, torch.Tensor]:
    """Random weights: std for matrices and biases, 1 ± std for norms."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * std + (1.0 if "norm" in name else 0.0)
        for name, shape in tensor_shapes(config).items()
    }


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE: four special tokens, 256 bytes, a few merges. Every text has ids, every id has bytes."""
    vocab = {token: at for at, token in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """A complete model folder: config, weights in one file, tokenizer with a chat template, two end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 3]}))
    write_tokenizer(folder)
    return folder


class TinyCheckpoints:
    """Makes and keeps tiny checkpoints: the same arguments give the same folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}

    def __call__(self, family: str, *, seed: int = 0, **overrides: Any) -> Path:
        """The folder of a tiny `family` model whose config.json has `overrides` in it (`...` removes a key)."""
        key = repr((family, seed, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in self._made:
            config = tiny_config(family, overrides)
            folder = self._root / f"tiny-{family}-{len(self._made)}"
            self._made[key] = write_checkpoint(folder, config, draw_tensors(config, seed))
        return self._made[key]

    def from_tensors(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
        """A folder with exactly this config and these tensors, whether they agree or not."""
        return write_checkpoint(self._root / name, config, tensors)

    config = staticmethod(tiny_config)
    tensors = staticmethod(draw_tensors)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    """Factory of tiny checkpoint folders: ``tiny_checkpoint("qwen3", tie_word_embeddings=False)``."""
    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    """The folder of the tiny Llama: config, weights, byte-level tokenizer, chat template, end tokens 1 and 3."""
    return tiny_checkpoint("llama")
