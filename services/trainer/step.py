"""One training step, read from top to bottom: groups in, one optimizer step, metrics out.

Owns which tokens are trained and with which advantage; how the loss is computed is `algorithms`'
business and how it is run is the backend's. Blocking; no I/O, no clock, no state of its own.

What contributes nothing leaves the loss and its denominator together: trajectories without a reward,
groups whose rewards are all equal, tokens older than the staleness bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from practicum.trajectory import (
    SAMPLED_REASONS,
    MaskReason,
    MaskSpan,
    Outcome,
    Row,
    Trajectory,
    VersionSpan,
)
from services.trainer.algorithms.advantage import group_advantages
from services.trainer.algorithms.objective import Objective
from services.trainer.intake.groups import Arrival, Group
from services.trainer.megatron.packing import TrainRow
from services.trainer.megatron.result import StepResult
from services.trainer.spec import RunSpec, Stage


class Trains(Protocol):
    """The part of the backend that a step uses."""

    def train(
        self, rows: Sequence[TrainRow], objective: Objective, *, temperature: float = 1.0
    ) -> StepResult:
        """One optimizer step over all rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Versions between the trainer and the sampled tokens of a step, before expiry."""

    min: int
    mean: float
    max: int


class Idle(StrEnum):
    """Why a trajectory only filled its place."""

    INFRA_FAILED = "infra_failed"  # the platform failed the episode, or could not grade it
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"  # it breaks an invariant and was set aside


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step did: the backend's result, and what went in."""

    result: StepResult
    num_groups: int
    num_zero_variance_groups: int
    num_trajectories: int  # those with a part in the statistics
    # Those that only filled their place, by why.
    num_infra_failed: int
    num_cancelled: int
    num_quarantined: int
    reward_mean: float | None  # None = no trajectory had a reward
    reward_std: float | None
    mean_turns: float
    mean_sampled_tokens: float  # tokens the policy wrote, per trajectory
    tokens_by_reason: dict[str, int]
    staleness: Staleness | None  # None = nothing was sampled


def run_step(backend: Trains, groups: Sequence[Group], spec: RunSpec, *, weight_version: int) -> StepOutcome:
    """Train once on complete groups. `weight_version` is that of the weights in the backend."""
    trajectories = [trajectory for group in groups for trajectory in group.usable]
    advantages, num_zero_variance = _advantages(groups, spec)
    staleness = _staleness(trajectories, weight_version)
    current = [_expire(trajectory, spec, weight_version) for trajectory in trajectories]
    rows = [
        _train_row(row, trajectory, advantages[trajectory.trajectory_id], spec, weight_version)
        for trajectory in current
        if trajectory.trajectory_id in advantages
        for row in trajectory.rows
    ]
    result = backend.train(rows, spec.objective(), temperature=spec.temperature)
    idle = [_why_idle(arrival) for group in groups for arrival in group.arrivals if not arrival.usable]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return StepOutcome(
        result=result,
        num_groups=len(groups),
        num_zero_variance_groups=num_zero_variance,
        num_trajectories=len(trajectories),
        num_infra_failed=idle.count(Idle.INFRA_FAILED),
        num_cancelled=idle.count(Idle.CANCELLED),
        num_quarantined=idle.count(Idle.QUARANTINED),
        reward_mean=float(np.mean(rewards)) if rewards else None,
        reward_std=float(np.std(rewards)) if rewards else None,
        mean_turns=_mean([len(trajectory.turns) for trajectory in trajectories]),
        mean_sampled_tokens=_mean([_num_sampled(trajectory) for trajectory in trajectories]),
        tokens_by_reason=_tokens_by_reason(current),
        staleness=staleness,
    )


def _advantages(groups: Sequence[Group], spec: RunSpec) -> tuple[dict[str, float], int]:
    """Advantage by trajectory id, for those that have a part in the loss; zero-variance groups counted."""
    trajectories = [trajectory for group in groups for trajectory in group.usable]
    if spec.stage is Stage.SFT:
        return {trajectory.trajectory_id: 0.0 for trajectory in trajectories}, 0
    computed = group_advantages(
        [trajectory.reward for trajectory in trajectories],
        [trajectory.group_id for trajectory in trajectories],
        kind=spec.algorithm.advantage,
    )
    pairs = zip(trajectories, computed.advantages_N.tolist(), computed.valid_N.tolist(), strict=True)
    valid = {trajectory.trajectory_id: float(advantage) for trajectory, advantage, ok in pairs if ok}
    # A group that says nothing must not dilute the others, nor be pushed by a KL term alone.
    telling = {
        trajectory.group_id for trajectory in trajectories if valid.get(trajectory.trajectory_id, 0.0) != 0.0
    }
    used = {
        trajectory.trajectory_id: valid[trajectory.trajectory_id]
        for trajectory in trajectories
        if trajectory.group_id in telling and trajectory.trajectory_id in valid
    }
    graded = {trajectory.group_id for trajectory in trajectories if trajectory.trajectory_id in valid}
    return used, len(graded - telling)


def _expire(trajectory: Trajectory, spec: RunSpec, weight_version: int) -> Trajectory:
    """The trajectory with every token past the staleness bound masked as expired."""
    if spec.max_staleness is None:
        return trajectory
    oldest = weight_version - spec.max_staleness
    if not any(span.weight_version < oldest for row in trajectory.rows for span in row.version_spans):
        return trajectory
    return replace(trajectory, rows=tuple(expire_row(row, oldest) for row in trajectory.rows))


def expire_row(row: Row, oldest_version: int) -> Row:
    """The row with sampled tokens of versions below `oldest_version` masked as expired."""
    reasons_T: NDArray[np.object_] = np.empty(row.num_tokens, dtype=object)
    for span in row.mask_spans:
        reasons_T[span.start : span.end] = span.reason
    for version in row.version_spans:
        if version.weight_version < oldest_version:
            reasons_T[version.start : version.end] = MaskReason.EXPIRED
    return replace(row, mask_spans=_spans_of(reasons_T))


def _spans_of(reasons_T: NDArray[np.object_]) -> tuple[MaskSpan, ...]:
    spans = []
    start = 0
    for position in range(1, len(reasons_T) + 1):
        if position == len(reasons_T) or reasons_T[position] != reasons_T[start]:
            spans.append(MaskSpan(start=start, end=position, reason=reasons_T[start]))
            start = position
    return tuple(spans)


def _train_row(
    row: Row, trajectory: Trajectory, advantage: float, spec: RunSpec, weight_version: int
) -> TrainRow:
    same_weights_T: NDArray[np.bool_] | None = None
    if spec.stage is Stage.RL:  # nothing sampled a demonstration
        same_weights_T = np.zeros(row.num_tokens, dtype=np.bool_)
        for span in row.version_spans:
            same_weights_T[span.start : span.end] = span.weight_version == weight_version
    return TrainRow(
        trajectory_id=trajectory.trajectory_id,
        ids_T=row.token_ids_T,
        trained_T=row.mask_T(),
        rollout_logprobs_T=row.logprobs_T,
        advantage=advantage,
        same_weights_T=same_weights_T,
    )


def _why_idle(arrival: Arrival) -> Idle:
    if arrival.quarantined:
        return Idle.QUARANTINED
    return Idle.CANCELLED if arrival.trajectory.outcome is Outcome.CANCELLED else Idle.INFRA_FAILED


def _staleness(trajectories: Sequence[Trajectory], weight_version: int) -> Staleness | None:
    """Lag of every sampled token. A trajectory of many turns is judged token by token."""
    lags = [weight_version - span.weight_version for span in _version_spans(trajectories)]
    sizes = [span.end - span.start for span in _version_spans(trajectories)]
    if not lags:
        return None
    return Staleness(min=min(lags), mean=float(np.average(lags, weights=sizes)), max=max(lags))


def _version_spans(trajectories: Sequence[Trajectory]) -> list[VersionSpan]:
    return [span for trajectory in trajectories for row in trajectory.rows for span in row.version_spans]


def _num_sampled(trajectory: Trajectory) -> int:
    return sum(int(row.mask_T(SAMPLED_REASONS).sum()) for row in trajectory.rows)


def _tokens_by_reason(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    counts = dict.fromkeys((reason.value for reason in MaskReason), 0)
    for trajectory in trajectories:
        for row in trajectory.rows:
            for reason, num_tokens in row.num_by_reason().items():
                counts[reason.value] += num_tokens
    return counts


def _mean(values: Sequence[int]) -> float:
    return float(np.mean(values)) if values else 0.0
