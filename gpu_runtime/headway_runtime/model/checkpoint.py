"""A model on disk: its config, its weights and where its tokenizer lies, checked in full before anything is loaded.

`open_checkpoint` reads a folder (config.json, one or many safetensors, generation_config.json) or a .gguf file. What
would make the model compute something else than its authors meant raises CheckpointError, naming file and field or
tensor: a missing shard or tensor, a wrong shape, an unknown format, a tensor that nothing reads. No code is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from headway_core.errors import CheckpointError
from safetensors import SafetensorError, safe_open

from headway_runtime.model.architecture.config import EMBEDDING, HEAD, ModelConfig, read_config, read_token_ids
from headway_runtime.model.gguf_checkpoint import GgufFile

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED.values()}
_HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that follow from the config."""


class Weights(Protocol):
    """Where tensors come from, one at a time."""

    def load(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the CPU, and no part of its file. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that may be served. `path` is the folder or the .gguf file, which holds the tokenizer too."""

    path: Path
    name: str
    config: ModelConfig
    dtype: torch.dtype
    """What the weights are converted to and computed in."""
    eos_ids: frozenset[int]
    """End tokens of config and generation config together; the tokenizer may add its own."""
    bos_id: int | None
    weights: Weights
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json as it is, empty when there is none."""

    def tensor(self, name: str) -> torch.Tensor:
        """A weight in the dtype to compute in."""
        return self.weights.load(name).to(self.dtype)


def open_checkpoint(path: Path, dtype: str = "auto", device: str = "cpu") -> Checkpoint:
    """Open and check a model folder or .gguf file; weights are read later, tensor by tensor.

    `dtype` auto: on a GPU the stored one, on a CPU float32 unless it computes in bfloat16. Raises CheckpointError.
    """
    if dtype != "auto" and dtype not in _NAMED:
        raise CheckpointError(str(path), "dtype", f"must be one of auto, {', '.join(_NAMED)}, not {dtype!r}")
    if not path.exists():
        raise CheckpointError(str(path), "", "does not exist: give a model folder or a .gguf file")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(str(path), "", "is neither a folder nor a .gguf file")
        file = GgufFile(path)
        chosen = choose_dtype(dtype, device, torch.float32)
        return Checkpoint(path, path.stem, file.config, chosen, file.eos_ids, file.bos_id, file)
    return _open_folder(path, dtype, device)


def choose_dtype(dtype: str, device: str, stored: torch.dtype) -> torch.dtype:
    """The dtype that `auto` or a name means on this machine."""
    if dtype != "auto":
        return _NAMED[dtype]
    if not device.startswith("cpu"):
        return stored
    return torch.bfloat16 if _cpu_computes_bfloat16() and stored == torch.bfloat16 else torch.float32


def _cpu_computes_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _open_folder(path: Path, dtype: str, device: str) -> Checkpoint:
    config_path = path / "config.json"
    raw = _read_json(config_path)
    config = read_config(raw, str(config_path))
    weights = SafetensorsWeights(path)
    tied_head = config.tied and HEAD in weights.names
    weights.check(config.tensor_shapes(), ignored=(HEAD,) if tied_head else ())
    if tied_head and not torch.equal(weights.load(HEAD), weights.load(EMBEDDING)):
        reason = f"differs from {EMBEDDING}: set tie_word_embeddings to false to use this head, or remove it"
        raise CheckpointError(str(weights.file_of(HEAD)), HEAD, reason)
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    eos = read_token_ids(raw, str(config_path), "eos_token_id")
    eos |= read_token_ids(generation, str(generation_path), "eos_token_id")
    bos = read_token_ids(raw, str(config_path), "bos_token_id")
    return Checkpoint(
        path=path,
        name=path.resolve().name,
        config=config,
        dtype=choose_dtype(dtype, device, weights.dtype_of(EMBEDDING)),
        eos_ids=eos,
        bos_id=min(bos) if bos else None,
        weights=weights,
        generation=generation,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(str(path), "", "is missing from the checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), "", f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(str(path), "", f"must hold a JSON object, not {type(content).__name__}")
    return content


class SafetensorsWeights:
    """The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._listing = index if index.exists() else single
        self._shards: dict[str, Path] = {}
        if index.exists():
            listed = _read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
                raise CheckpointError(str(index), "weight_map", "must map each tensor to the file that holds it")
            files = {shard: folder / shard for shard in sorted(set(listed.values()))}
            held = {shard: self._names_in(file) for shard, file in files.items()}
            for name, shard in listed.items():
                if name not in held[shard]:
                    raise CheckpointError(
                        str(files[shard]), name, f"is missing from this shard, where {index.name} puts it"
                    )
            self._shards = {name: files[shard] for shard, names in held.items() for name in names}
        elif single.exists():
            self._shards = dict.fromkeys(self._names_in(single), single)
        else:
            raise CheckpointError(str(folder), "", "has neither model.safetensors nor model.safetensors.index.json")
        self.names = frozenset(self._shards)

    @staticmethod
    def _names_in(file: Path) -> list[str]:
        if not file.is_file():
            raise CheckpointError(str(file), "", "is missing: the checkpoint is incomplete, download it again")
        try:
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(file), "", f"cannot be read as safetensors: {error}") from error

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Every tensor of `shapes` is there in that shape and a known format, and nothing else that has a meaning."""
        for name, shape in shapes.items():
            if name not in self._shards:
                remedy = " (set tie_word_embeddings if the head is the embedding)" if name == HEAD else ""
                raise CheckpointError(
                    str(self._listing), name, f"is missing: the model needs this tensor of shape {list(shape)}{remedy}"
                )
            file = str(self._shards[name])
            with safe_open(file, framework="pt") as opened:
                found = opened.get_slice(name)
                stored, dtype = tuple(found.get_shape()), found.get_dtype()
            if stored != shape:
                raise CheckpointError(file, name, f"has shape {list(stored)}, but config.json asks for {list(shape)}")
            if dtype not in _STORED:
                raise CheckpointError(file, name, f"is stored as {dtype}: must be one of {', '.join(_STORED)}")
        for name in sorted(self.names - set(shapes) - set(ignored)):
            if not name.endswith(_HARMLESS):
                raise CheckpointError(
                    str(self._shards[name]), name, "is read by no part of this model: config.json does not describe it"
                )

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._shards[name]

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored format of a tensor that `check` has passed."""
        with safe_open(self._shards[name], framework="pt") as opened:
            return _STORED[opened.get_slice(name).get_dtype()]

    def load(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""
        try:
            with safe_open(self._shards[name], framework="pt") as opened:
                # A copy: it is mapped, and would follow what is written to the file.
                tensor: torch.Tensor = opened.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(self._shards[name]), name, f"cannot be read: {error}") from error
        return tensor
