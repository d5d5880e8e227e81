"""Makes the `tiny` Hugging Face folder: a fresh Llama of about 3 million weights, tokenizer, chat template.

Owns the tokenizer and the template of the demo. Never trains weights: the warm start is the trainer's.
Invariants: the same seed gives the same folder; each marker of `MARKERS` and `TOOL_MARKERS` is one id; the
template is append-only, so that rendering messages[:k] is a prefix of rendering messages[:k + 1].

    python -m examples.first_bugs.make_tiny FOLDER [--seed N]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.first_bugs.copying import ROPE_THETA, plant_copying
from examples.first_bugs.demonstrations import demonstrations
from examples.first_bugs.suite import Draw, generate_suite

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MARKERS = (PAD, START, END)  # decoding may skip these
TOOL_MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)  # decoding keeps these: parsers read them
VOCABULARY = 1024
CORPUS_TASKS = 2000

# The JSON around a call is a few fixed pieces; each becomes one token. Spaces go with keywords and operators
# and never with a name or a number: a name is the same token wherever it stands, so that copying it into an
# edit is soon learnt. A number of up to three digits is one piece, for the same reason.
_PIECES = (
    r"\n?\{\"name\": \"|\", \"arguments\": \{|\"path\": \"|\", \"old\": \"|\", \"new\": \"|\"?\}\}\n?"
    r"| ?\b(?:def|return|if|else|for|in|not|and|or)\b ?|[A-Za-z_]+|[0-9]{1,3}"
    r"| ?[^\sA-Za-z_0-9\"]+ ?|\"|\n *|\s+"
)

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if system or tools %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- ('\\n' if system else '') + 'Tools:' }}
{%- for tool in tools %}{{- ' ' + (tool.function or tool).name }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the texts: each marker is one id; with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, special=True, normalized=False) for text in MARKERS]
    markers += [AddedToken(text, special=False, normalized=False) for text in TOOL_MARKERS]
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY,
        special_tokens=markers,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([marker for marker in markers if marker.special])
    tokenizer.add_tokens([marker for marker in markers if not marker.special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def corpus(seed: int) -> Iterator[str]:
    """Texts as the demo shows them: prompts, modules, test reports and calls."""
    suite = generate_suite(seed, CORPUS_TASKS, 0, Draw.DEMONSTRATION)
    for task, shown in zip(suite["tasks"], demonstrations(suite, seed), strict=True):
        yield "system\nTools: " + " ".join(task["tools"])
        yield "user\n" + task["instruction"]
        for path, text in task["workspace"]["files"].items():
            if not path.startswith("test_"):
                yield "tool\n" + text
        for call in shown.calls:
            yield f"assistant\n{json.dumps(call)}\n"
        yield f"tool\nedited {task['grader']['editable'][0]}"
        yield "tool\n1 failed, 1 passed\ntest_1: assert 3 == 0"
        yield "tool\n2 passed\ntest_2: TypeError: assert True is False"


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The fresh model, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(**_shape(tokenizer))
    model = LlamaForCausalLM(config)
    # what writes to the residual stream starts smaller, by the number of writers (GPT-2)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.mul_((2 * config.num_hidden_layers) ** -0.5)
    plant_copying(model, seed)
    return model


def _shape(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.07,  # 1 / sqrt(hidden_size): at 0.02 attention starts too flat to learn soon
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }


def make_tiny(folder: Path, seed: int) -> None:
    """Writes config, weights, tokenizer and template to the folder, which may exist."""
    tokenizer = make_tokenizer(corpus(seed))
    make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the tiny model's folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
