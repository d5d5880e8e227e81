"""Between the REST bodies and what the trainer holds inside."""

from dataclasses import asdict
from pathlib import Path

from practicum.errors import InvalidInput
from services.trainer.algorithms.objective import OffPolicy, OldPolicy
from services.trainer.megatron.shape import read_shape
from services.trainer.progress import ProgressBoard
from services.trainer.rest.models import (
    ActivityBody,
    CheckpointBody,
    QuarantineBody,
    RefusedBody,
    RunBody,
    RunRequest,
    RunSummary,
    StepBody,
)
from services.trainer.spec import (
    TERMINAL_STATES,
    AlgorithmOptions,
    OptimizerOptions,
    RolloutOptions,
    RunSpec,
    Stage,
)
from services.trainer.store.records import CheckpointRecord, QuarantineRecord, RunRecord, StepRecord


def spec_of(request: RunRequest) -> RunSpec:
    """The run a caller asks for; `InvalidInput` names the first field that contradicts another."""
    _check_stage(request)
    _check_numbers(request)
    _check_model(request.model.path)
    return RunSpec(
        name=request.name,
        stage=request.stage,
        model_path=str(Path(request.model.path).absolute()),
        num_steps=request.num_steps,
        rollout=None if request.rollout is None else RolloutOptions(**request.rollout.model_dump()),
        trajectories_per_step=request.trajectories_per_step,
        algorithm=AlgorithmOptions(**request.algorithm.model_dump()),
        optimizer=OptimizerOptions(**request.optimizer.model_dump()),
        microbatch_tokens=request.microbatch_tokens,
        precision=request.precision,
        seed=request.seed,
        start_paused=request.start_paused,
    )


def _check_stage(request: RunRequest) -> None:
    given = request.model_fields_set
    if request.stage is Stage.RL:
        if request.rollout is None:
            raise InvalidInput("rollout", "an rl run samples episodes; say from which suite and how")
        if "trajectories_per_step" in given:
            raise InvalidInput(
                "trajectories_per_step", "is for sft; an rl step takes rollout.groups_per_step groups"
            )
        return
    if request.rollout is not None:
        raise InvalidInput("rollout", "an sft run trains on demonstrations; leave it out")
    if "algorithm" in given:
        raise InvalidInput("algorithm", "an sft run has no advantage and no clipping; leave it out")


def _check_numbers(request: RunRequest) -> None:
    rollout, optimizer = request.rollout, request.optimizer
    if rollout is not None:
        if rollout.top_p != 1.0:
            raise InvalidInput("rollout.top_p", "must be 1: the trainer does not correct for a nucleus")
        if rollout.top_k != -1:
            raise InvalidInput("rollout.top_k", "must be -1: the trainer does not correct for a cut")
        if rollout.max_new_tokens > rollout.max_tokens:
            raise InvalidInput("rollout.max_new_tokens", "is more than rollout.max_tokens")
        if rollout.max_tokens > request.microbatch_tokens:
            raise InvalidInput("microbatch_tokens", "must hold an episode of rollout.max_tokens")
    algorithm = request.algorithm
    if algorithm.off_policy is OffPolicy.TRUNCATE and algorithm.old_policy is OldPolicy.ROLLOUT:
        raise InvalidInput(
            "algorithm.off_policy",
            "truncate needs algorithm.old_policy recomputed: against rollout the ratio corrects already",
        )
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise InvalidInput("optimizer.betas", "each must be at least 0 and below 1")
    if optimizer.warmup_steps > request.num_steps:
        raise InvalidInput("optimizer.warmup_steps", "is more than num_steps")


def _check_model(path: str) -> None:
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise InvalidInput("model.path", f"{path} is no folder on the trainer's disk")
        for name in ("config.json", "tokenizer.json"):
            if not (folder / name).is_file():
                raise InvalidInput("model.path", f"{path} holds no {name}; give a Hugging Face folder")
        if not any(folder.glob("*.safetensors")):
            raise InvalidInput("model.path", f"{path} holds no *.safetensors")
    except OSError as error:
        raise InvalidInput("model.path", f"{path} cannot be read: {error}") from error
    try:
        read_shape(folder)
    except InvalidInput as error:
        if error.field == "model.path":
            raise
        raise InvalidInput("model.path", f"config.json cannot be trained: {error}") from error


def run_summary(run: RunRecord, *, quarantined: int, progress: ProgressBoard) -> RunSummary:
    """A run without its steps."""
    activity = None if run.state in TERMINAL_STATES else progress.activity(run.run_id)
    return RunSummary(
        run_id=run.run_id,
        name=run.spec.name,
        stage=run.spec.stage,
        state=run.state,
        error=run.error,
        num_steps=run.spec.num_steps,
        weight_version=max(run.weight_version, 0),
        published_version=run.published_version,
        publish_error=run.publish_error,
        publish_pending=run.state not in TERMINAL_STATES and run.published_version != run.weight_version,
        groups_consumed=run.groups_consumed,
        batches_discarded=run.batches_discarded,
        quarantined=quarantined,
        refused=RefusedBody(duplicate=run.duplicates_refused, superseded=run.superseded_refused),
        activity=None
        if activity is None
        else ActivityBody(
            phase=activity[0].phase,
            seconds=round(activity[1], 3),
            groups_complete=activity[0].groups_complete,
            groups_partial=activity[0].groups_partial,
            groups_needed=activity[0].groups_needed,
            problem=activity[0].problem,
        ),
        created_at=run.created_at,
        updated_at=run.updated_at,
    )


def run_body(
    run: RunRecord, steps: list[StepRecord], *, quarantined: int, progress: ProgressBoard
) -> RunBody:
    """A run with its steps."""
    summary = run_summary(run, quarantined=quarantined, progress=progress)
    return RunBody(
        **summary.model_dump(),
        request=request_of(run.spec),
        steps=[step_body(step) for step in steps],
    )


def request_of(spec: RunSpec) -> RunRequest:
    """The request behind a spec, defaults filled in."""
    options = asdict(spec)
    options["model"] = {"path": options.pop("model_path")}
    return RunRequest.model_validate(options)


def step_body(step: StepRecord) -> StepBody:
    """A committed step."""
    publish = step.publish or {}
    served = bool(publish) and not publish["error"]
    return StepBody(
        step=step.step,
        weight_version=step.step,
        committed_at=step.committed_at,
        publish_s=publish["seconds"] if served else None,
        publish_logprob_diff_max=publish["logprob_diff_max"] if publish else None,
        **step.metrics,
    )


def checkpoint_body(checkpoint: CheckpointRecord) -> CheckpointBody:
    """A committed checkpoint."""
    return CheckpointBody(**asdict(checkpoint))


def quarantine_body(record: QuarantineRecord) -> QuarantineBody:
    """A trajectory that was set aside."""
    fields = asdict(record)
    del fields["run_id"], fields["event_id"]
    return QuarantineBody(**fields)
