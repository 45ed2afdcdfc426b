"""A checkpoint so small that its forward pass costs almost nothing, in whose vocabulary every word of the load
generator is one token.

With it a prompt has exactly the length that was asked for, which the arithmetic of a test needs. What it writes is
words in no order.
"""

from __future__ import annotations

import json
from pathlib import Path

from headway_cli.load_generator import PromptWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE_TOKENS = 1
"""What the chat template adds to the words of one user message."""
POSITIONS = 4096

_SPECIAL = ("<s>", "</s>", "<|turn|>", "<unk>")
_TEMPLATE = "{{ '<|turn|>' }}{%- for m in messages -%}{{ m.content }}{%- endfor -%}"


def write(folder: Path) -> Path:
    """Makes the checkpoint in `folder`, readable for everybody, since a pod's user is nobody here."""
    folder.mkdir(parents=True)
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *(f"▁{word}" for word in _words())))}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE})
    )
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def _words() -> list[str]:
    """Every word that the generator writes, and so many others that a special token, which is no text, is hardly ever
    drawn."""
    return sorted(set(PromptWriter().text(10_000, 0).split())) + [f"word{number}" for number in range(1000)]
