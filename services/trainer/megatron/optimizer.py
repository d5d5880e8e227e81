"""Megatron's optimizer and the learning-rate schedule.

The schedule is a pure function of the steps taken, so a resumed run needs no state of its own for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, assert_never

import torch

from services.trainer.megatron import cpu


class Schedule(StrEnum):
    """How the learning rate moves after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay and a schedule over `num_steps`.

    Raises `ValueError` for a value outside its range.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # not applied to biases and norms
    clip_grad: float = 1.0  # global norm; 0 = no clipping
    warmup_steps: int = 0
    schedule: Schedule = Schedule.CONSTANT
    min_lr_ratio: float = 0.0  # of lr, where linear and cosine end
    num_steps: int = 1  # where the schedule ends

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"optimizer.lr must be a finite number >= 0, not {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be in [0, 1), not {self.betas}")
        for name in ("eps", "weight_decay", "clip_grad"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"optimizer.{name} must be a finite number >= 0, not {value}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps must be >= 0, not {self.warmup_steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optimizer.min_lr_ratio must be in [0, 1], not {self.min_lr_ratio}")
        if self.num_steps < 1:
            raise ValueError(f"optimizer.num_steps must be >= 1, not {self.num_steps}")


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """The rate of the step that follows `step` finished ones.

    The warm-up rises linearly and reaches `lr` at its last step; the first step never has rate 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, config.num_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.lr * config.min_lr_ratio
    match config.schedule:
        case Schedule.CONSTANT:
            return config.lr
        case Schedule.LINEAR:
            return config.lr + (floor - config.lr) * progress
        case Schedule.COSINE:
            return floor + (config.lr - floor) * (1 + math.cos(math.pi * progress)) / 2
    assert_never(config.schedule)


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module, *, bf16: bool) -> Any:
    """Megatron's optimizer over a model wrapped in its DDP; with `bf16` it keeps fp32 master weights."""
    with cpu.quiet_import():
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer

    megatron_config = MegatronConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=False,
    )
    with cpu.gpu_type_names():
        chained = get_megatron_optimizer(megatron_config, [model])
    # Dense models have one optimizer; the chain exists for experts.
    (optimizer,) = chained.chained_optimizers
    return optimizer


@torch.no_grad()
def apply_gradients(optimizer: Any, *, learning_rate: float, clip_grad: float) -> tuple[float, bool]:
    """Clip and step. Returns the gradient's norm and whether the weights moved.

    A norm that is not finite moves nothing: clipping by it would write NaN into every weight.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    with cpu.gpu_type_names():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm, False
        if clip_grad > 0:
            optimizer.clip_grad_norm(clip_grad)
        optimizer.step_with_ready_grads()
    return norm, True


def master_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors the optimizer updates, by the model's parameter names."""
    return {name: getattr(param, "main_param", param) for name, param in model.named_parameters()}
