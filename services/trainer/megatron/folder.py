"""A Hugging Face model folder: what a base model is read from and an export is written as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from practicum.errors import CheckpointError, InvalidInput

# Beside the weights and the config, a folder holds what the tokenizer and the sampler need.
_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFolder:
    """The files of a base model other than its weights, held so that exports outlive the folder."""

    config: Mapping[str, object]
    companions: Mapping[str, bytes]


def read_base(folder: Path) -> BaseFolder:
    """Read config.json and the companions. The config was checked by `shape.read_shape`."""
    companions = {name: folder / name for name in _COMPANIONS}
    return BaseFolder(
        config=json.loads((folder / "config.json").read_text()),
        companions={name: path.read_bytes() for name, path in companions.items() if path.is_file()},
    )


def write_folder(folder: Path, base: BaseFolder, weights: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Write model.safetensors in `dtype` ("float32" or "bfloat16"), config.json and the companions.

    Raises `InvalidInput` for another dtype and `CheckpointError` where `folder` holds something already or
    cannot be written.
    """
    if dtype not in _DTYPES:
        raise InvalidInput("dtype", f"{dtype!r} is not one of {', '.join(_DTYPES)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty")
        path = folder / "model.safetensors"
        tensors = {name: tensor.to(_DTYPES[dtype]).contiguous() for name, tensor in weights.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        # The writer makes the file private; an engine may run as another user.
        path.chmod(0o644)
        (folder / "config.json").write_text(json.dumps(_with_dtype(base.config, dtype), indent=2) + "\n")
        for name, content in base.companions.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _with_dtype(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    # Older readers know the dtype by its older name.
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    return {**config, **dict.fromkeys(names, dtype)}
