"""Model and weights: the same numbers as transformers, and the same bits after a round trip."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from practicum.errors import CheckpointError, InvalidInput
from services.trainer.megatron.backend import MegatronBackend, OptimizerConfig
from services.trainer.megatron.shape import shape_from_config
from tests.fixtures.megatron import FAMILIES, VOCAB_SIZE, model_folder

Load = Callable[..., MegatronBackend]


@pytest.fixture
def load() -> Iterator[Load]:
    backends: list[MegatronBackend] = []

    def load_backend(folder: Path, **options: object) -> MegatronBackend:
        backends.append(MegatronBackend.load(folder, optimizer=OptimizerConfig(), **options))  # type: ignore[arg-type]
        return backends[-1]

    yield load_backend
    for backend in reversed(backends):
        backend.close()


def reference_logprobs(folder: Path, ids_T: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(ids_T.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
    return np.concatenate([[0], logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


@pytest.mark.parametrize("family", FAMILIES)
def test_score_for_each_family_then_equals_transformers(family: str, tmp_path: Path, load: Load) -> None:
    folder = model_folder(tmp_path / "base", family)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, VOCAB_SIZE, 25)
    # Mixed lengths, rows with a shared prefix, one alone, one of a single token.
    rows = [
        np.concatenate([shared, rng.integers(0, VOCAB_SIZE, own)]).astype(np.int32) for own in (3, 40, 11, 0)
    ]
    rows += [rng.integers(0, VOCAB_SIZE, size).astype(np.int32) for size in (60, 1, 9)]
    backend = load(folder)
    assert backend.vocab_size == VOCAB_SIZE
    for ids_T, scored_T in zip(rows, backend.score(rows, temperature=0.7), strict=True):
        expected_T = reference_logprobs(folder, ids_T, temperature=0.7)
        assert scored_T.dtype == np.float32
        np.testing.assert_allclose(scored_T, expected_T, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_when_nothing_was_trained_then_the_same_bits(
    family: str, dtype: torch.dtype, tmp_path: Path, load: Load
) -> None:
    folder = model_folder(tmp_path / "base", family, dtype=dtype)
    load(folder).export(tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype
        assert torch.equal(after[name], tensor), name
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text())


def test_export_when_source_is_bf16_then_by_default_what_the_trainer_computes_in(
    tmp_path: Path, load: Load
) -> None:
    folder = model_folder(tmp_path / "base", dtype=torch.bfloat16)
    load(folder).export(tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_export_when_the_folder_is_not_empty_then_refused(tmp_path: Path, load: Load) -> None:
    folder = model_folder(tmp_path / "base")
    with pytest.raises(CheckpointError, match="not empty"):
        load(folder).export(folder)


def test_load_then_torch_itself_is_unchanged(tmp_path: Path, load: Load) -> None:
    before = (torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.current_device)
    load(model_folder(tmp_path / "base"))
    assert (torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.current_device) == before
    with torch.device("meta"):
        assert torch.zeros(1).is_meta


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"vocab_size": None}, "vocab_size"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_config_when_a_field_is_wrong_then_refused_by_name(change: dict[str, object], field: str) -> None:
    config: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    assert shape_from_config(config).head_size == 8
    with pytest.raises(InvalidInput) as caught:
        shape_from_config({**config, **change})
    assert caught.value.field == field


def test_load_when_config_is_absent_or_broken_then_invalid_input(tmp_path: Path, load: Load) -> None:
    with pytest.raises(InvalidInput, match="config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InvalidInput, match="config.json"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "misshapen", "left_over", "truncated", "absent"])
def test_load_when_weights_are_damaged_then_checkpoint_error(damage: str, tmp_path: Path, load: Load) -> None:
    folder = model_folder(tmp_path / "base")
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    match damage:
        case "missing":
            del weights[name]
        case "misshapen":
            weights[name] = weights[name][:, :-1].contiguous()
        case "left_over":
            weights["model.layers.2.mlp.up_proj.weight"] = weights[name].clone()
    save_file(weights, path, metadata={"format": "pt"})
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "absent":
        path.unlink()
    with pytest.raises(CheckpointError, match=r"up_proj|cannot be read"):
        load(folder)


@pytest.mark.parametrize(("option", "value"), [("precision", "fp8"), ("microbatch_tokens", 0)])
def test_load_when_an_option_is_wrong_then_refused_by_name(
    option: str, value: object, tmp_path: Path, load: Load
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path, **{option: value})
    assert caught.value.field == option
