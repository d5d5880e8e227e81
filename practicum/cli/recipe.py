"""The demo's numbers in one place: what is asked of the services, and how much of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """One demo: a suite, a warm start and a run of reinforcement learning; it starts paused."""

    model: str = "tiny"
    seed: int = 7
    num_train: int = 240
    num_heldout: int = 100
    num_steps: int = 64
    group_size: int = 8
    groups_per_step: int = 8
    max_turns: int = 6
    max_tokens: int = 512
    max_new_tokens: int = 96
    temperature: float = 1.0
    max_staleness: int = 2
    optimizer: Json = field(
        default_factory=lambda: {"lr": 4e-4, "warmup_steps": 2, "schedule": "linear", "min_lr_ratio": 0.25}
    )
    algorithm: Json = field(default_factory=dict)
    microbatch_tokens: int = 16384
    num_demonstrated_tasks: int = 20000
    demonstrations_per_task: int = 2
    share_right: float = 0.34
    warm_start_lr: float = 1.5e-3
    sft_trajectories_per_step: int = 16

    def rl_run(self, model: Path, suite: str) -> Json:
        """The body of POST /v1/runs for reinforcement learning; it starts paused."""
        return {
            "name": f"demo-rl-{self.model}",
            "stage": "rl",
            "model": {"path": str(model.resolve())},
            "num_steps": self.num_steps,
            "start_paused": True,
            "rollout": {
                "suite": suite,
                "group_size": self.group_size,
                "groups_per_step": self.groups_per_step,
                "max_turns": self.max_turns,
                "max_tokens": self.max_tokens,
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.temperature,
                "max_staleness": self.max_staleness,
                "seed": self.seed,
            },
            "algorithm": self.algorithm,
            "optimizer": self.optimizer,
            "microbatch_tokens": self.microbatch_tokens,
            "seed": self.seed,
        }

    def sft_run(self, model: Path, num_demonstrations: int) -> Json:
        """The body of POST /v1/runs for the warm start."""
        return {
            "name": f"demo-sft-{self.model}",
            "stage": "sft",
            "model": {"path": str(model.resolve())},
            "num_steps": num_demonstrations // self.sft_trajectories_per_step,
            "rollout": None,
            "trajectories_per_step": self.sft_trajectories_per_step,
            "optimizer": {
                "lr": self.warm_start_lr,
                "warmup_steps": 30,
                "schedule": "cosine",
                "min_lr_ratio": 0.05,
                "weight_decay": 0.01,
            },
            "microbatch_tokens": self.microbatch_tokens,
            "seed": self.seed,
        }

    def evaluation(self, suite: str) -> Json:
        """The body of POST /v1/evaluations: the held-out split, sampled as in training."""
        return {
            "suite": suite,
            "split": "heldout",
            "num_tasks": self.num_heldout,
            "episodes_per_task": 1,
            "temperature": self.temperature,
            "max_turns": self.max_turns,
            "max_tokens": self.max_tokens,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }


TINY = DemoRecipe()
TINY_FULL = DemoRecipe(num_train=1200, num_heldout=200, num_steps=140)
SMOLLM2 = DemoRecipe(
    model="smollm2",
    num_train=4,
    num_heldout=4,
    num_steps=2,
    group_size=2,
    groups_per_step=2,
    max_turns=2,
    max_tokens=1024,
    max_new_tokens=48,
    optimizer={"lr": 1e-6},
    microbatch_tokens=2048,
)
