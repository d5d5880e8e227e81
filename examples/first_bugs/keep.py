"""Keeps a trained `tiny` in the repository: the same Hugging Face folder with bf16 weights, half the size.

    python -m examples.first_bugs.keep CHECKPOINT FOLDER

Only what loads the model is kept; optimizer state and manifest stay behind. The folder is replaced whole.
"""

import json
import shutil
import sys
from pathlib import Path

KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
WEIGHTS = "model.safetensors"


def keep(checkpoint: Path, folder: Path) -> None:
    """Write the folder anew from a checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in KEPT:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, temporary / name)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((temporary / "config.json").read_text())
    (temporary / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
