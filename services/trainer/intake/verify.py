"""What a trajectory must satisfy before it may enter a step.

Owns the checks that need the run (address, vocabulary, length, sampling, reward); the invariants of
the rows themselves are `practicum.trajectory`'s. Pure: no I/O, no state.

Two questions are asked apart. `check_address` asks whether the trajectory belongs to this run and
names its place in a group; where it does not, nothing can be said about any group. `check_content`
asks whether it may be trained; where not, its place in the group still counts as filled, or the
group would wait for ever.
"""

import math
from dataclasses import dataclass

from practicum.errors import IntakeError
from practicum.trajectory import Outcome, Row, Trajectory

# The reward of these never enters a group's statistics: the policy did not cause the end.
UNGRADED_OUTCOMES = frozenset({Outcome.INFRA_FAILED, Outcome.CANCELLED})

# What the tables hold of each.
_ID_LENGTHS = {"trajectory_id": 160, "episode_id": 128, "group_id": 128, "task_id": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What a run asks of its trajectories."""

    run_id: str
    group_size: int
    vocab_size: int
    max_row_tokens: int  # the longest row the backend packs
    temperature: float | None  # None = demonstrations, which were not sampled
    reward_low: float
    reward_high: float


def check_address(trajectory: Trajectory, expected: Expectations) -> None:
    """Raise `IntakeError` where the trajectory has no place in a group of this run."""
    if trajectory.run_id != expected.run_id:
        raise IntakeError("wrong_run", f"belongs to run {trajectory.run_id or 'none'}")
    for name, longest in _ID_LENGTHS.items():
        value = getattr(trajectory, name)
        if not value:
            raise IntakeError("missing_id", f"{name} is empty")
        if len(value) > longest or not (value.isascii() and value.isprintable()):
            raise IntakeError("bad_id", f"{name} is not printable ASCII of at most {longest} characters")
    if trajectory.attempt < 1:
        raise IntakeError("attempt", f"attempt {trajectory.attempt} is below 1")
    if trajectory.group_size != expected.group_size:
        raise IntakeError(
            "group_size", f"a group of {trajectory.group_size}, but the run's have {expected.group_size}"
        )


def check_content(trajectory: Trajectory, expected: Expectations, *, weight_version: int) -> None:
    """Raise `IntakeError` where the trajectory must not be trained.

    `weight_version` is the newest committed version: nothing can have been sampled by a later one.
    A trajectory whose outcome is ungraded passes as it is; it is never trained.
    """
    if trajectory.outcome is Outcome.CANCELLED and not trajectory.rows:
        return  # cancelled before the first turn
    trajectory.check()
    for row in trajectory.rows:
        _check_row(row, expected, weight_version)
    if trajectory.outcome in UNGRADED_OUTCOMES:
        return
    if trajectory.num_trained_tokens == 0:
        raise IntakeError("nothing_sampled", "no token was written by the policy")
    if expected.temperature is None:
        return
    _check_sampling(trajectory, expected.temperature)
    _check_reward(trajectory.reward, expected)


def _check_row(row: Row, expected: Expectations, weight_version: int) -> None:
    highest_id = int(row.token_ids_T.max())
    if highest_id >= expected.vocab_size:
        raise IntakeError("vocabulary", f"token id {highest_id} is outside [0, {expected.vocab_size})")
    if row.num_tokens > expected.max_row_tokens:
        raise IntakeError("too_long", f"a row of {row.num_tokens} tokens passes {expected.max_row_tokens}")
    for span in row.version_spans:
        if span.weight_version > weight_version:
            raise IntakeError(
                "future_version",
                f"sampled by version {span.weight_version}, but {weight_version} is the newest",
            )


def _check_sampling(trajectory: Trajectory, temperature: float) -> None:
    sampling = trajectory.sampling
    if not math.isclose(sampling.temperature, temperature, rel_tol=1e-6):
        raise IntakeError(
            "sampling", f"sampled at temperature {sampling.temperature}, the run trains at {temperature}"
        )
    if sampling.top_p != 1.0 or sampling.top_k != -1:
        raise IntakeError(
            "sampling", "sampled with top_p or top_k, which the trainer's logprobs do not account for"
        )


def _check_reward(reward: float | None, expected: Expectations) -> None:
    if reward is None:
        raise IntakeError("not_graded", "no reward, and the platform did not fail")
    if not math.isfinite(reward):
        raise IntakeError("reward", f"the reward {reward} is not finite")
    if not expected.reward_low <= reward <= expected.reward_high:
        raise IntakeError(
            "reward", f"the reward {reward} is outside [{expected.reward_low}, {expected.reward_high}]"
        )
