"""A run as the trainer carries it out: its stage, its state and every option, as frozen values.

Owns the vocabulary of runs and the translation of their options into what the algorithms and the
backend take. The REST edge validates what a caller sends; this module only ever holds a valid run.

A demonstration run (stage `sft`) is the same machine with groups of one episode and no reward, so
`group_size` and `groups_per_step` are defined for both stages.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from pydantic import TypeAdapter

from services.trainer.algorithms.advantage import AdvantageKind
from services.trainer.algorithms.objective import (
    Aggregation,
    KlEstimator,
    Objective,
    OffPolicy,
    OldPolicy,
    PolicyObjective,
    SftObjective,
)
from services.trainer.megatron.optimizer import OptimizerConfig, Schedule


class Stage(StrEnum):
    """What a run trains on."""

    RL = "rl"
    SFT = "sft"


class Precision(StrEnum):
    """What the model computes in; master weights are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"


class RunState(StrEnum):
    """Where a run stands. `completed`, `stopped` and `failed` never change again."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


TERMINAL_STATES = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How a run's episodes are sampled."""

    suite: str
    group_size: int = 8
    groups_per_step: int = 8
    max_turns: int = 6
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 96
    max_staleness: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmOptions:
    """What a step of stage `rl` optimises."""

    advantage: AdvantageKind = AdvantageKind.GROUP_STD
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None  # None = off
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    off_policy: OffPolicy = OffPolicy.NONE
    off_policy_cap: float = 2.0
    old_policy: OldPolicy = OldPolicy.ROLLOUT
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its schedule over the run's steps."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = Schedule.CONSTANT
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything that defines a run; it never changes after the run is made."""

    name: str
    stage: Stage
    model_path: str
    num_steps: int
    rollout: RolloutOptions | None  # None = trained on demonstrations
    trajectories_per_step: int = 64  # stage sft only
    algorithm: AlgorithmOptions = AlgorithmOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    microbatch_tokens: int = 8192
    precision: Precision = Precision.FP32
    seed: int = 0
    start_paused: bool = False  # True = made ready and published, but held before its first step

    @property
    def group_size(self) -> int:
        """Episodes a group."""
        return 1 if self.rollout is None else self.rollout.group_size

    @property
    def groups_per_step(self) -> int:
        """Complete groups a step takes."""
        return self.trajectories_per_step if self.rollout is None else self.rollout.groups_per_step

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.rollout is None else self.rollout.temperature

    @property
    def max_staleness(self) -> int | None:
        """Versions a trained token may lag behind; None = no bound, since nothing was sampled."""
        return None if self.rollout is None else self.rollout.max_staleness

    @property
    def keeps_reference(self) -> bool:
        """True where the loss needs the base weights beside the trained ones."""
        return self.stage is Stage.RL and self.algorithm.kl_coef > 0

    def objective(self) -> Objective:
        """The loss of this run's steps."""
        match self.stage:
            case Stage.SFT:
                return SftObjective()
            case Stage.RL:
                assert self.rollout is not None
                options = self.algorithm
                return PolicyObjective(
                    clip_low=options.clip_low,
                    clip_high=options.clip_high,
                    dual_clip=options.dual_clip,
                    aggregation=options.aggregation,
                    constant_tokens=(
                        self.rollout.max_tokens if options.aggregation is Aggregation.CONSTANT else None
                    ),
                    off_policy=options.off_policy,
                    off_policy_cap=options.off_policy_cap,
                    old_policy=options.old_policy,
                    kl_coef=options.kl_coef,
                    kl_estimator=options.kl_estimator,
                )
            case _:
                assert_never(self.stage)

    def optimizer_config(self) -> OptimizerConfig:
        """The optimizer as the backend takes it."""
        options = self.optimizer
        return OptimizerConfig(
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            warmup_steps=options.warmup_steps,
            schedule=options.schedule,
            min_lr_ratio=options.min_lr_ratio,
            num_steps=self.num_steps,
        )


_SPECS = TypeAdapter(RunSpec)


def spec_to_json(spec: RunSpec) -> str:
    """A spec as the text that the store keeps."""
    return _SPECS.dump_json(spec).decode()


def spec_from_json(text: str) -> RunSpec:
    """The spec behind `spec_to_json`'s text."""
    return _SPECS.validate_json(text)
