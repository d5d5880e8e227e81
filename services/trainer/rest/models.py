"""What callers send and get. Every field is described here, and nowhere else."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from practicum.rest.models import ApiModel
from services.trainer.algorithms.advantage import AdvantageKind
from services.trainer.algorithms.objective import Aggregation, KlEstimator, OffPolicy, OldPolicy
from services.trainer.megatron.optimizer import Schedule
from services.trainer.progress import Phase
from services.trainer.spec import Precision, RunState, Stage

# What a run holds must fit its messages and the model: counts are int32 there and seeds int64.
MAX_TOKENS = 2**24
MAX_STEPS = 10_000_000
MAX_SEED = 2**62
# Far above any value that trains, far below where float32 overflows.
MAX_FACTOR = 1e9


def _storable(text: str) -> str:
    if "\x00" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("holds U+0000 or half of a surrogate pair, which no database takes")
    return text


Text = Annotated[str, AfterValidator(_storable)]


class _Finite(ApiModel):
    """A body whose numbers are all finite: JSON as Python reads it knows NaN and Infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ModelRequest(ApiModel):
    """The weights a run starts from."""

    path: Text = Field(
        min_length=1,
        max_length=4096,
        description="A Hugging Face folder on the trainer's disk: config.json, tokenizer.json, weights.",
        examples=["/models/tiny"],
    )


class RolloutRequest(_Finite):
    """How the episodes of an `rl` run are sampled."""

    suite: Text = Field(
        min_length=1,
        max_length=400,
        description="The suite whose train split is sampled: its id, its name, or name@version.",
        examples=["first-bugs"],
    )
    group_size: int = Field(default=8, ge=2, le=1024, description="Episodes a group; they share a baseline.")
    groups_per_step: int = Field(default=8, ge=1, le=4096, description="Complete groups a step takes.")
    max_turns: int = Field(default=6, ge=1, le=1000, description="Turns an episode may take.")
    max_tokens: int = Field(
        default=512, ge=16, le=MAX_TOKENS, description="Tokens an episode may hold, prompts included."
    )
    temperature: float = Field(
        default=1.0,
        ge=0.01,
        le=10,
        description="Sampling temperature; the trainer's logits are divided by it too.",
    )
    top_p: float = Field(default=1.0, description="Must be 1: the trainer does not correct for a nucleus.")
    top_k: int = Field(default=-1, description="Must be -1: the trainer does not correct for a cut.")
    max_new_tokens: int = Field(default=96, ge=1, le=MAX_TOKENS, description="Tokens a turn may sample.")
    max_staleness: int = Field(
        default=2,
        ge=0,
        le=1000,
        description="Versions a trained token may lag behind; older ones are context only.",
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the task order.")


class AlgorithmRequest(_Finite):
    """What a step of an `rl` run optimises."""

    advantage: AdvantageKind = Field(
        default=AdvantageKind.GROUP_STD, description="Baseline and scale in a group."
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(
        default=0.28, gt=0, le=MAX_FACTOR, description="The ratio is clipped above 1 + clip_high."
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        le=MAX_FACTOR,
        description="Bounds the loss of negative advantages at this ratio; null is off.",
    )
    aggregation: Aggregation = Field(
        default=Aggregation.TOKEN_MEAN, description="How the losses of tokens become one number."
    )
    off_policy: OffPolicy = Field(
        default=OffPolicy.NONE,
        description="What is done about tokens that another policy sampled; "
        "truncate needs old_policy recomputed.",
    )
    off_policy_cap: float = Field(
        default=2.0, ge=1, le=MAX_FACTOR, description="Largest importance weight, or the kept range."
    )
    old_policy: OldPolicy = Field(
        default=OldPolicy.ROLLOUT, description="Whose logprobs the ratio is taken against."
    )
    kl_coef: float = Field(
        default=0.0, ge=0, le=MAX_FACTOR, description="Weight of the divergence from the base model."
    )
    kl_estimator: KlEstimator = Field(default=KlEstimator.K3, description="How that divergence is estimated.")


class OptimizerRequest(_Finite):
    """AdamW and its schedule over the run's steps."""

    lr: float = Field(default=1e-4, gt=0, lt=1, description="Highest learning rate.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay of the two moments, each in [0, 1)."
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="Added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, le=1000, description="Decoupled weight decay.")
    clip_grad: float = Field(
        default=1.0, ge=0, le=MAX_FACTOR, description="Global norm the gradient is scaled down to; 0 is off."
    )
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS, description="Steps of linear warm-up.")
    schedule: Schedule = Field(default=Schedule.CONSTANT, description="How the rate moves after the warm-up.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Of lr, where linear and cosine end.")


_RL_EXAMPLE: dict[str, Any] = {
    "name": "first-bugs-rl",
    "stage": "rl",
    "model": {"path": "/models/tiny"},
    "num_steps": 40,
    "rollout": {"suite": "first-bugs", "group_size": 8, "groups_per_step": 8, "max_staleness": 2},
    "algorithm": {"advantage": "group_std", "clip_low": 0.2, "clip_high": 0.28},
    "optimizer": {"lr": 0.0001},
}
_SFT_EXAMPLE: dict[str, Any] = {
    "name": "first-bugs-sft",
    "stage": "sft",
    "model": {"path": "/models/tiny-base"},
    "num_steps": 60,
    "trajectories_per_step": 64,
    "optimizer": {"lr": 0.001, "warmup_steps": 5, "schedule": "cosine"},
}


class RunRequest(ApiModel):
    """A run to make."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [_RL_EXAMPLE, _SFT_EXAMPLE]})

    name: Text = Field(min_length=1, max_length=200, description="For people.", examples=["first-bugs-rl"])
    stage: Stage = Field(description="rl trains on graded episodes, sft on demonstrations.")
    model: ModelRequest = Field(description="The weights it starts from.")
    num_steps: int = Field(ge=1, le=MAX_STEPS, description="Steps it takes.")
    rollout: RolloutRequest | None = Field(
        default=None, description="How episodes are sampled: needed by rl, refused with sft."
    )
    trajectories_per_step: int = Field(
        default=64, ge=1, le=65_536, description="Demonstrations a step takes; sft only."
    )
    algorithm: AlgorithmRequest = Field(default=AlgorithmRequest(), description="The loss; rl only.")
    optimizer: OptimizerRequest = Field(default=OptimizerRequest(), description="The optimizer.")
    microbatch_tokens: int = Field(
        default=8192,
        ge=16,
        le=MAX_TOKENS,
        description="Tokens that go through the model at once; also the longest row.",
    )
    precision: Precision = Field(default=Precision.FP32, description="What the model computes in.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the trainer.")
    start_paused: bool = Field(
        default=False,
        description="True makes the run ready and publishes its base model, then holds it until :resume.",
    )


class StalenessBody(ApiModel):
    """Versions between the trainer and the sampled tokens of a step, before expiry."""

    min: int = Field(description="Of the newest token.")
    mean: float | None = Field(description="Over all sampled tokens.")
    max: int = Field(description="Of the oldest token.")


class StepBody(ApiModel):
    """A committed step. A figure that was not finite is null."""

    step: int = Field(description="From 1.")
    weight_version: int = Field(description="The version it made.")
    committed_at: datetime = Field(description="When it became durable.")
    updated: bool = Field(description="False where no optimizer step was taken; skipped_reason says why.")
    skipped_reason: str = Field(description="no_trained_tokens or non_finite_gradient; empty where updated.")
    loss: float | None = Field(description="The loss before the update.")
    grad_norm: float | None = Field(description="Global gradient norm before clipping.")
    lr: float | None = Field(description="Learning rate of the step.")
    reward_mean: float | None = Field(description="Over graded trajectories; null where none was graded.")
    reward_std: float | None = Field(description="Population deviation of the same.")
    groups: int = Field(description="Groups consumed.")
    zero_variance_groups: int = Field(description="Groups whose rewards were all equal; they train nothing.")
    trajectories: int = Field(description="Trajectories with a part in the statistics.")
    infra_failed: int = Field(
        description="Trajectories that only filled their place: the platform failed them, or their grading."
    )
    cancelled: int = Field(
        default=0, description="Trajectories that only filled their place: their episode was cancelled."
    )
    quarantined: int = Field(
        default=0, description="Trajectories that only filled their place: they were set aside."
    )
    mean_turns: float | None = Field(description="Turns a trajectory.")
    mean_sampled_tokens: float | None = Field(description="Tokens the policy wrote, a trajectory.")
    tokens_trained: int = Field(description="Tokens in the loss.")
    tokens_rejected: int = Field(description="Tokens that the off-policy correction took out.")
    tokens_total: int = Field(description="Tokens of the rows that were trained, context included.")
    tokens_computed: int = Field(description="Tokens that went through the model; shared prompts count once.")
    tokens_by_reason: dict[str, int] = Field(
        description="Tokens of all trajectories by mask reason, after expiry."
    )
    microbatches: int = Field(description="Passes through the model.")
    staleness: StalenessBody | None = Field(description="Null where nothing was sampled.")
    ratio_mean: float | None = Field(description="Mean ratio of trainer to old policy.")
    clip_fraction_low: float | None = Field(description="Share of trained tokens clipped from below.")
    clip_fraction_high: float | None = Field(description="Share of trained tokens clipped from above.")
    mismatch_kl: float | None = Field(
        description="Estimate of KL(rollout || trainer) over trained tokens that exactly these weights "
        "sampled: engine and trainer compute differently. Null where there is no such token."
    )
    logprob_mismatch_max: float | None = Field(
        description="Largest |trainer - rollout| logprob over the same tokens; null likewise."
    )
    drift_kl: float | None = Field(
        default=None,
        description="Estimate of KL(rollout || trainer) over all trained tokens: what the policy moved since "
        "it sampled them comes on top.",
    )
    logprob_drift_max: float | None = Field(
        default=None, description="Largest |trainer - rollout| logprob over all trained tokens."
    )
    reference_kl: float | None = Field(description="Estimate of KL(policy || base); 0 without that term.")
    entropy: float | None = Field(description="Mean entropy at trained tokens, in nats.")
    seconds: float | None = Field(description="Seconds of compute.")
    wait_s: float | None = Field(description="Seconds spent waiting for groups.")
    commit_s: float | None = Field(description="Seconds to write the checkpoint.")
    publish_s: float | None = Field(description="Seconds to publish; null where not published, or overtaken.")
    publish_logprob_diff_max: float | None = Field(
        description="Largest difference on the probes, over engines."
    )


class ActivityBody(ApiModel):
    """What an active run is doing."""

    phase: Phase = Field(description="What it does.")
    seconds: float = Field(description="For how long.")
    groups_complete: int = Field(description="Groups that are ready for the next step.")
    groups_partial: int = Field(description="Groups that wait for an episode.")
    groups_needed: int = Field(description="Groups the next step takes.")
    problem: str = Field(description="What it waits out; empty for nothing.")


class RefusedBody(ApiModel):
    """Arrivals that were refused without being wrong."""

    duplicate: int = Field(description="The same attempt of an episode again.")
    superseded: int = Field(description="An attempt that came too late: another one is held or trained.")


class RunSummary(ApiModel):
    """A run as it stands, without its steps."""

    run_id: str = Field(description="The run.", examples=["run_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])
    name: str = Field(description="For people.")
    stage: Stage = Field(description="rl or sft.")
    state: RunState = Field(description="Where it stands.")
    error: str = Field(description="Why it failed; empty otherwise.")
    num_steps: int = Field(description="Steps it takes.")
    weight_version: int = Field(
        description="Last committed version, which is the number of steps taken; 0 is the base."
    )
    published_version: int | None = Field(
        description="Version that every engine served last; null for none yet."
    )
    publish_error: str = Field(description="Why the last publish failed; empty where it did not.")
    publish_pending: bool = Field(
        description="True while published_version may still reach weight_version. False where it has, or "
        "where the run is over: the two never change again, and where they differ publish_error says why."
    )
    groups_consumed: int = Field(description="Groups that steps and discarded batches took.")
    batches_discarded: int = Field(description="Batches without one usable trajectory.")
    quarantined: int = Field(description="Trajectories that were set aside.")
    refused: RefusedBody = Field(description="Arrivals that were not needed.")
    activity: ActivityBody | None = Field(description="What it is doing; null where it holds no trainer.")
    created_at: datetime = Field(description="When it was made.")
    updated_at: datetime = Field(description="When it last changed.")


class RunBody(RunSummary):
    """A run with its steps."""

    request: RunRequest = Field(description="The run as it was asked for, defaults filled in.")
    steps: list[StepBody] = Field(
        description="Committed steps, oldest first; at most the newest `last_steps`."
    )


class CheckpointBody(ApiModel):
    """A committed checkpoint."""

    checkpoint_id: str = Field(
        description="The checkpoint.", examples=["ckpt_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"]
    )
    run_id: str = Field(description="The run it belongs to.")
    weight_version: int = Field(description="Its version; 0 is the base.")
    path: str = Field(description="The Hugging Face folder.")
    manifest_sha256: str = Field(description="SHA-256 of its manifest.json, hex.")
    size_bytes: int = Field(description="Bytes of all its files.")
    created_at: datetime = Field(description="When it was committed.")
    retired_at: datetime | None = Field(description="When its folder was removed; null while it is on disk.")


class QuarantineBody(ApiModel):
    """A trajectory that was set aside and never trained."""

    quarantine_id: str = Field(description="The entry.")
    trajectory_id: str = Field(description="The trajectory; empty where it could not be read.")
    episode_id: str = Field(description="The episode; empty where it could not be read.")
    group_id: str = Field(description="The group; empty where it could not be read.")
    reason: str = Field(description="A stable word.", examples=["vocabulary"])
    message: str = Field(description="What was wrong.")
    created_at: datetime = Field(description="When it was set aside.")
