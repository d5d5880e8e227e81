"""One masked GRPO step: Megatron on packed rows against plain transformers + AdamW on padded ones.

Both sides are measured in the same process, in turns, on the same rows, weights and thread; each figure is
the median over the rounds. Prints a table, then one JSON line.

    python -m benchmarks.trainstep [--rounds 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from services.trainer.algorithms.objective import PolicyObjective
from services.trainer.megatron.backend import MegatronBackend
from services.trainer.megatron.optimizer import OptimizerConfig
from services.trainer.megatron.packing import TrainRow

MICROBATCH_TOKENS = 8192
VOCAB_SIZE = 1024
TRAINED_SHARE = 0.3

# Name of the workload, the figure's stem, and the bar on the ratio of tokens/s (None = no bar).
WORKLOADS: tuple[tuple[str, str, float | None], ...] = (
    ("64 rows of 250 tokens", "equal", 0.95),
    ("64 rows of 60 to 600 tokens", "mixed", 2.0),
    ("8 groups of 8, shared prompt", "groups", None),
)


def make_rows(kind: str, seed: int = 0) -> list[TrainRow]:
    """64 rows of random tokens whose lengths and prefixes are those of the workload."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB_SIZE, 130) for _ in range(8)]
    rows: list[TrainRow] = []
    for index in range(64):
        match kind:
            case "equal":
                length, prompt = 250, prompts[0][:0]
            case "mixed":
                length, prompt = int(np.clip(rng.lognormal(5.0, 0.7), 60, 600)), prompts[0][:0]
            case _:
                length, prompt = int(rng.integers(200, 300)), prompts[index // 8]
        own = rng.integers(0, VOCAB_SIZE, length - prompt.size)
        ids_T = np.concatenate([prompt, own]).astype(np.int32)
        trained_T = rng.random(length) < TRAINED_SHARE
        trained_T[: max(1, prompt.size)] = False
        trained_T[-1] = True
        logprobs_T = np.where(trained_T, -np.log(VOCAB_SIZE), 0).astype(np.float32)
        rows.append(
            TrainRow(
                trajectory_id=str(index),
                ids_T=ids_T,
                trained_T=trained_T,
                rollout_logprobs_T=logprobs_T,
                advantage=float(rng.normal()),
            )
        )
    return rows


class PlainTrainer:
    """The same step as people write it first: padded batches, all logits, AdamW."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, rows: Sequence[TrainRow]) -> float:
        """One optimizer step; returns the gradient norm."""
        num_trained = sum(int(row.trained_T.sum()) for row in rows)
        longest = max(row.ids_T.size for row in rows)
        rows_per_batch = max(1, MICROBATCH_TOKENS // longest)
        self.optimizer.zero_grad()
        for first in range(0, len(rows), rows_per_batch):
            self._backward(rows[first : first + rows_per_batch], num_trained)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)

    def _backward(self, rows: Sequence[TrainRow], num_trained: int) -> None:
        ids = _padded([row.ids_T.astype(np.int64) for row in rows])
        seen = _padded([np.ones(row.ids_T.size, dtype=np.int64) for row in rows])
        trained = _padded([row.trained_T for row in rows])
        rollout = _padded([row.rollout_logprobs_T for row in rows])
        advantages = torch.tensor([[row.advantage] for row in rows], dtype=torch.float32)
        logits = self.model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logprobs - rollout[:, 1:]).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        (loss * trained[:, 1:]).sum().div(num_trained).backward()  # type: ignore[no-untyped-call]


def _padded(arrays: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    tensors = [torch.from_numpy(array) for array in arrays]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def make_model(folder: Path) -> None:
    """A random model of the size of `tiny`, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def median_seconds(sides: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each side, run in turns so that both meet the same machine."""
    seconds: list[list[float]] = [[] for _ in sides]
    for round_index in range(rounds + 1):
        for side, own in zip(sides, seconds, strict=True):
            started_s = time.perf_counter()
            side()
            if round_index > 0:  # the first round warms up
                own.append(time.perf_counter() - started_s)
    return [statistics.median(own) for own in seconds]


def main() -> None:
    """Measure every workload and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    figures: dict[str, float] = {"threads": options.threads}
    bars: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        ours = MegatronBackend.load(folder, optimizer=OptimizerConfig(), microbatch_tokens=MICROBATCH_TOKENS)
        plain = PlainTrainer(folder)
        print(f"{ours.num_parameters / 1e6:.2f} M parameters, {options.threads} thread(s)")
        print(f"{'workload':<30} {'tokens':>7} {'ours s':>8} {'plain s':>8} {'ratio':>6} {'tokens/s':>9}")
        for title, stem, bar in WORKLOADS:
            rows = make_rows(stem)
            num_tokens = sum(row.ids_T.size for row in rows)
            ours_s, plain_s = median_seconds(
                [partial(ours.train, rows, PolicyObjective()), partial(plain.step, rows)], options.rounds
            )
            ratio = plain_s / ours_s
            print(
                f"{title:<30} {num_tokens:>7} {ours_s:>8.2f} {plain_s:>8.2f} {ratio:>6.2f} "
                f"{num_tokens / ours_s:>9.0f}"
            )
            figures[f"{stem}_step_s"] = round(ours_s, 3)
            figures[f"{stem}_plain_step_s"] = round(plain_s, 3)
            figures[f"{stem}_tokens_per_s"] = round(num_tokens / ours_s)
            figures[f"{stem}_ratio"] = round(ratio, 3)
            if bar is not None:
                value = figures[f"{stem}_ratio"]
                bars.append(
                    {"figure": f"{stem}_ratio", "op": ">=", "bar": bar, "value": value, "ok": value >= bar}
                )
        ours.close()
    print(json.dumps({"name": "trainstep", "figures": figures, "bars": bars}))


if __name__ == "__main__":
    main()
