"""One masked GRPO step: Megatron on packed rows against plain transformers + AdamW on padded ones.

Both sides are measured in the same process, in turns, on the same rows, weights and threads; each figure is
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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Medians over the rounds of one workload."""

    ours_s: float
    plain_s: float
    ratio: float  # plain / ours within a round: what slows the machine for a while slows both
    cpu_ratio: float  # the same in CPU seconds, which other processes do not enter


def measure(ours: Callable[[], object], plain: Callable[[], object], rounds: int) -> Sides:
    """Run both sides in turns; the first round warms up."""
    timings: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for round_index in range(rounds + 1):
        timing = (timed(ours), timed(plain))
        if round_index > 0:
            timings.append(timing)
    return Sides(
        ours_s=statistics.median(ours_wall for (ours_wall, _), _ in timings),
        plain_s=statistics.median(plain_wall for _, (plain_wall, _) in timings),
        ratio=statistics.median(plain_wall / ours_wall for (ours_wall, _), (plain_wall, _) in timings),
        cpu_ratio=statistics.median(plain_cpu / ours_cpu for (_, ours_cpu), (_, plain_cpu) in timings),
    )


def timed(side: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    side()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


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
        print(
            f"{'workload':<30} {'tokens':>7} {'ours s':>8} {'plain s':>8} {'ratio':>6} "
            f"{'cpu':>6} {'tokens/s':>9}"
        )
        for title, stem, bar in WORKLOADS:
            rows = make_rows(stem)
            num_tokens = sum(row.ids_T.size for row in rows)
            sides = measure(
                partial(ours.train, rows, PolicyObjective()), partial(plain.step, rows), options.rounds
            )
            tokens_per_s = num_tokens / sides.ours_s
            print(
                f"{title:<30} {num_tokens:>7} {sides.ours_s:>8.2f} {sides.plain_s:>8.2f} {sides.ratio:>6.2f} "
                f"{sides.cpu_ratio:>6.2f} {tokens_per_s:>9.0f}"
            )
            figures[f"{stem}_step_s"] = round(sides.ours_s, 3)
            figures[f"{stem}_plain_step_s"] = round(sides.plain_s, 3)
            figures[f"{stem}_tokens_per_s"] = round(tokens_per_s)
            figures[f"{stem}_ratio"] = round(sides.ratio, 3)
            figures[f"{stem}_cpu_ratio"] = round(sides.cpu_ratio, 3)
            if bar is not None:
                value = figures[f"{stem}_ratio"]
                bars.append(
                    {"figure": f"{stem}_ratio", "op": ">=", "bar": bar, "value": value, "ok": value >= bar}
                )
        ours.close()
    print(json.dumps({"name": "trainstep", "figures": figures, "bars": bars}))


if __name__ == "__main__":
    main()
