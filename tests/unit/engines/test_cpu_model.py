"""The forward pass against transformers, for every option of a config that the engine serves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from engines.cpu.arena import KvArena
from engines.cpu.config import UnsupportedModel, read_config
from engines.cpu.model import Model, Segment, kv_rows
from engines.cpu.weights import load_weights
from tests.fixtures.engine_models import Reference, llama_config, save_random_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": llama_config(),
    "llama_tied": llama_config(tie_word_embeddings=True),
    "llama_no_groups": llama_config(num_key_value_heads=4),
    "llama_one_kv_head": llama_config(num_key_value_heads=1),
    "llama_biases": llama_config(attention_bias=True, mlp_bias=True),
    "llama3_rope": llama_config(rope_parameters=LLAMA3_ROPE),
    "linear_rope": llama_config(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    "qwen2": Qwen2Config(**QWEN),
    "qwen3": Qwen3Config(**QWEN, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_when_prefilled_in_pieces_and_decoded_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path, CONFIGS[name], with_tokenizer=False)
    config = read_config(folder)
    model = Model(config, load_weights(folder, config, torch.float32), torch.float32)
    torch.manual_seed(1)
    sequences = torch.randint(3, 260, (2, 90))
    expected = [Reference(folder).logits(sequence.tolist()) for sequence in sequences]
    arena = KvArena(config, torch.float32)
    arena.resize(2, 128, 0)
    # the first sequence comes in two pieces, the second in one that shares the second step
    first = model.prefill(arena, sequences[0, :40], torch.arange(40), [Segment(slot=0, start=0, length=40)])
    ids = torch.cat((sequences[0, 40:70], sequences[1, :60]))
    positions = torch.cat((torch.arange(40, 70), torch.arange(60)))
    segments = [Segment(slot=0, start=40, length=30), Segment(slot=1, start=0, length=60)]
    second = model.prefill(arena, ids, positions, segments)
    found = [model.logits(first), model.logits(second[:30]), model.logits(second[30:])]
    for logits, reference in zip(
        found, (expected[0][:40], expected[0][40:70], expected[1][:60]), strict=True
    ):
        assert (logits - reference).abs().max() < 1e-4
    positions = torch.tensor([70, 60])
    rows = kv_rows(config, arena, positions)
    for step in range(20):
        ids = torch.stack((sequences[0, 70 + step], sequences[1, 60 + step]))
        logits = model.decode(arena, ids, positions + step, rows + step, 71 + step)
        reference = torch.stack((expected[0][70 + step], expected[1][60 + step]))
        assert (logits - reference).abs().max() < 1e-4


def test_model_when_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, llama_config(initializer_range=0.05), with_tokenizer=False)
    config = read_config(folder)
    model = Model(config, load_weights(folder, config, torch.bfloat16), torch.bfloat16)
    arena = KvArena(config, torch.bfloat16)
    arena.resize(1, 128, 0)
    ids = torch.arange(3, 43)
    hidden = model.prefill(arena, ids, torch.arange(40), [Segment(slot=0, start=0, length=40)])
    difference = (model.logits(hidden) - Reference(folder).logits(ids.tolist())).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    ],
)
def test_read_config_when_an_option_is_not_implemented_refuses_it(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    llama_config(**({"architectures": ["LlamaForCausalLM"]} | changes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=word):
        read_config(tmp_path)
