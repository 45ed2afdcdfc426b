"""A checkpoint is checked in full when it is opened: what is missing, torn, misshapen or unknown is named, file and
tensor."""

from __future__ import annotations

import json

import pytest
import torch
from headway_core.errors import CheckpointError
from headway_runtime.model.checkpoint import choose_dtype, open_checkpoint
from safetensors.torch import load_file, save_file

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def shards(tiny_llama, tmp_path):
    """The tiny Llama in three shards with an index."""
    tensors = load_file(tiny_llama / "model.safetensors")
    weight_map = {}
    for index in range(3):
        file = f"model-0000{index + 1}-of-00003.safetensors"
        part = dict(sorted(tensors.items())[index::3])
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """Writes the tiny Llama with some of its tensors changed."""

    def write(**changes):
        tensors = {
            name.replace(".", "_"): (name, tensor)
            for name, tensor in load_file(tiny_llama / "model.safetensors").items()
        }
        tensors |= {name.replace(".", "_"): (name, tensor) for name, tensor in changes.pop("also", {}).items()}
        changed = {name: changes.get(key, tensor) for key, (name, tensor) in tensors.items()}
        save_file(
            {name: tensor for name, tensor in changed.items() if tensor is not None}, tmp_path / "model.safetensors"
        )
        (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
        return tmp_path

    return write


def refusal(path):
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(path)
    return refused.value


def test_shards_hold_the_same_tensors_as_one_file(shards, tiny_llama):
    whole, parts = open_checkpoint(tiny_llama), open_checkpoint(shards)
    for name in whole.config.tensor_shapes():
        assert torch.equal(parts.tensor(name), whole.tensor(name))


def test_weights_that_were_read_do_not_follow_the_file(tiny_llama, tmp_path):
    """A checkpoint is replaced in place, or its disk goes away, while a model made from it serves."""
    file = tmp_path / "model.safetensors"
    file.write_bytes((tiny_llama / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.config.tensor_shapes()}
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, tensor in load_file(tiny_llama / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor), name


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    assert refusal(shards).path.endswith("model-00002-of-00003.safetensors")


def test_a_torn_shard_is_named(shards):
    torn = shards / "model-00002-of-00003.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert refusal(shards).path == str(torn)


def test_a_tensor_that_its_shard_does_not_hold_is_named(shards):
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    wrong = next(file for file in set(content["weight_map"].values()) if file != content["weight_map"][Q_PROJ])
    content["weight_map"][Q_PROJ] = wrong
    index.write_text(json.dumps(content))
    error = refusal(shards)
    assert (error.path, error.key) == (str(shards / wrong), Q_PROJ)


def test_a_missing_tensor_is_named(folder):
    path = folder(model_layers_1_self_attn_q_proj_weight=None)
    error = refusal(path)
    assert (error.path, error.key) == (str(path / "model.safetensors"), Q_PROJ)


def test_a_wrong_shape_names_both(folder):
    error = refusal(folder(model_layers_1_self_attn_q_proj_weight=torch.zeros(64, 32)))
    assert error.key == Q_PROJ
    assert "[64, 32]" in str(error) and "[64, 64]" in str(error)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_an_unexpected_number_format_is_refused(dtype, folder):
    error = refusal(folder(model_layers_1_self_attn_q_proj_weight=torch.zeros(64, 64).to(dtype)))
    assert error.key == Q_PROJ


def test_a_tensor_that_nothing_reads_is_refused(folder):
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert refusal(folder(also={bias: torch.zeros(64)})).key == bias


def test_tensors_that_follow_from_the_config_are_passed_over(folder):
    path = folder(also={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert open_checkpoint(path).config.num_layers == 2


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(missing, folder):
    path = folder()
    (path / missing).unlink()
    assert missing in str(refusal(path))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "model.gguf").write_bytes(b"GGUF is not all it takes")
    for path in (tmp_path / "nothing", tmp_path / "model.bin", tmp_path / "model.gguf", tmp_path):
        assert refusal(path).path.startswith(str(tmp_path))


def test_broken_json_is_refused(folder):
    path = folder()
    (path / "config.json").write_text("{")
    assert refusal(path).path == str(path / "config.json")


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1, 3]}, 7, {1, 3, 7}),
        ({"eos_token_id": 3}, [1, 2], {1, 2, 3}),
        ({}, None, set()),
        (None, 1, {1}),
    ],
)
def test_end_tokens_are_those_of_both_files(generation, config, ends, folder):
    path = folder()
    content = json.loads((path / "config.json").read_text()) | {"eos_token_id": config}
    (path / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(path).eos_ids == ends


def test_an_end_token_that_is_none_names_its_file(folder):
    path = folder()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, "x"]}))
    error = refusal(path)
    assert (error.path, error.key) == (str(path / "generation_config.json"), "eos_token_id")


def test_the_dtype_is_chosen_or_told(tiny_llama):
    assert open_checkpoint(tiny_llama).dtype == torch.float32
    assert open_checkpoint(tiny_llama, "bfloat16").tensor("model.norm.weight").dtype == torch.bfloat16
    assert choose_dtype("auto", "cuda", torch.float16) == torch.float16
    assert choose_dtype("auto", "cpu", torch.float16) == torch.float32
    with pytest.raises(CheckpointError, match="int4"):
        open_checkpoint(tiny_llama, "int4")
