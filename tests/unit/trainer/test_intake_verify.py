"""What a trajectory must satisfy before it may be trained."""

from dataclasses import replace

import pytest

from practicum.errors import IntakeError
from practicum.trajectory import Grade, Outcome, SamplingParams, Trajectory
from services.trainer.intake.verify import Expectations, check_address, check_content
from tests.fixtures.trainer import VOCAB_SIZE, failed, row, trajectory

EXPECTED = Expectations(
    run_id="run_1",
    group_size=2,
    vocab_size=VOCAB_SIZE,
    max_row_tokens=32,
    temperature=1.0,
    reward_low=0.0,
    reward_high=1.0,
)


def complaint(member: Trajectory, expected: Expectations = EXPECTED, *, weight_version: int = 5) -> str:
    """The counted word, or nothing."""
    try:
        check_address(member, expected)
        check_content(member, expected, weight_version=weight_version)
    except IntakeError as error:
        return error.reason
    return ""


def test_checks_when_all_holds_pass() -> None:
    assert complaint(trajectory()) == ""
    assert complaint(failed()) == ""


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (trajectory(run_id="run_2"), "wrong_run"),
        (replace(trajectory(), group_id=""), "missing_id"),
        (replace(trajectory(), episode_id="e" * 129), "bad_id"),
        (replace(trajectory(), task_id="nul\x00"), "bad_id"),
        (replace(trajectory(), attempt=0), "attempt"),
        (trajectory(group_size=3), "group_size"),
        (replace(trajectory(), checksum="0" * 64), "checksum"),
        (trajectory(rows=(row(versions=(0, 6, 0, 0)),)), "future_version"),
        (trajectory(temperature=0.7), "sampling"),
        (replace(trajectory(), sampling=SamplingParams(top_p=0.9)), "sampling"),
        (replace(trajectory(), sampling=SamplingParams(top_k=50)), "sampling"),
        (trajectory(reward=None), "not_graded"),
        (replace(trajectory(), grade=Grade(reward=None)), "not_graded"),
        (trajectory(reward=float("nan")), "reward"),
        (trajectory(reward=float("inf")), "reward"),
        (trajectory(reward=1.5), "reward"),
        (replace(failed(), grade=Grade(reward=0.0)), "graded_failure"),
        (trajectory(rows=(row(logprob=0.5),)), "logprobs"),
        (trajectory(rows=()), "empty_trajectory"),
        (trajectory(rows=(row(versions=(0,) * 30),)), "too_long"),
    ],
)
def test_checks_when_something_is_wrong_say_which(member: Trajectory, reason: str) -> None:
    assert complaint(member) == reason


def test_check_content_when_an_id_is_outside_the_vocabulary_refuses() -> None:
    assert complaint(trajectory(), replace(EXPECTED, vocab_size=10)) == "vocabulary"


def test_check_content_when_demonstrations_are_expected_needs_no_reward() -> None:
    expected = replace(EXPECTED, temperature=None, group_size=1)
    assert complaint(trajectory(reward=None, group_size=1, temperature=0.3), expected) == ""


def test_check_content_when_the_outcome_is_ungraded_asks_for_no_reward() -> None:
    assert complaint(trajectory(reward=None, outcome=Outcome.CANCELLED)) == ""
    assert complaint(trajectory(reward=None, outcome=Outcome.CANCELLED, rows=())) == ""
