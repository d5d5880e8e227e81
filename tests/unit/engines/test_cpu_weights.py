"""Reading weights: what is refused, and that checksums are those of the folder."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from engines.cpu.config import ModelConfig, read_config
from engines.cpu.weights import WeightsRefused, checksums, load_weights
from tests.fixtures.engine_models import Tensors, changed_copy, llama_config, save_random_model

QWEN3 = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attention_bias=True,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", llama_config(), with_tokenizer=False)


def file_checksums(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def test_checksums_when_served_equal_those_of_the_files(tmp_path: Path) -> None:
    for index, config in enumerate((llama_config(attention_bias=True, mlp_bias=True), QWEN3)):
        folder = save_random_model(tmp_path / str(index), config, with_tokenizer=False)
        served = read_config(folder)
        assert checksums(load_weights(folder, served, torch.float32), served) == file_checksums(folder)


def test_checksums_when_the_folder_is_bfloat16_equal_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    halved = changed_copy(folder, tmp_path / "half", halve)
    config = read_config(halved)
    assert checksums(load_weights(halved, config, torch.float32), config) == file_checksums(halved)


def test_load_weights_when_the_config_is_of_another_model_refuses(folder: Path, tmp_path: Path) -> None:
    config = read_config(folder)
    other = changed_copy(folder, tmp_path / "other", lambda tensors: None)
    raw = json.loads((other / "config.json").read_text())
    raw["rope_parameters"]["rope_theta"] = 77.0  # same shapes, other logits
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(WeightsRefused, match="another model"):
        load_weights(other, config, torch.float32)


def tied(folder: Path, target: Path, head: torch.Tensor | None) -> tuple[Path, ModelConfig]:
    model = save_random_model(folder, llama_config(tie_word_embeddings=True), with_tokenizer=False)

    def add_head(tensors: Tensors) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if head is None else head.expand_as(embedding).clone()

    return changed_copy(model, target, add_head), read_config(model)


def test_load_weights_when_a_tied_head_is_written_twice_takes_only_an_equal_copy(tmp_path: Path) -> None:
    equal, config = tied(tmp_path / "a", tmp_path / "equal", None)
    assert "lm_head.weight" not in checksums(load_weights(equal, config, torch.float32), config)
    other, config = tied(tmp_path / "b", tmp_path / "other", torch.ones(1))
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight"):
        load_weights(other, config, torch.float32)


def test_load_weights_when_sharded_reads_every_shard(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    sharded = changed_copy(folder, tmp_path / "sharded", lambda tensors: None)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for part in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == part}, sharded / part)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = read_config(sharded)
    assert checksums(load_weights(sharded, config, torch.float32), config) == file_checksums(folder)
