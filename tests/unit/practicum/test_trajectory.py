"""The invariants of rows and trajectories, and their wire form."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import IntakeError
from practicum.trajectory import (
    Grade,
    GradeComponent,
    MaskReason,
    MaskSpan,
    Outcome,
    Row,
    SamplingParams,
    TestResult,
    ToolCall,
    Trajectory,
    Turn,
    VersionSpan,
)
from practicum.v1 import trajectory_pb2 as pb
from practicum.wire import row_from_pb, row_to_pb, trajectory_from_pb, trajectory_to_pb

WHEN = datetime(2026, 11, 29, 12, 0, 1, 500_000, tzinfo=UTC)


def make_row() -> Row:
    """prompt prompt | model model | tool | expired."""
    return Row(
        token_ids_T=np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
        logprobs_T=np.array([0, 0, -0.5, -0.25, 0, -1.0], dtype=np.float32),
        mask_spans=(
            MaskSpan(start=0, end=2, reason=MaskReason.PROMPT),
            MaskSpan(start=2, end=4, reason=MaskReason.MODEL),
            MaskSpan(start=4, end=5, reason=MaskReason.TOOL),
            MaskSpan(start=5, end=6, reason=MaskReason.EXPIRED),
        ),
        version_spans=(
            VersionSpan(start=2, end=3, weight_version=3, engine_id="e0"),
            VersionSpan(start=3, end=4, weight_version=4, engine_id="e1"),
            VersionSpan(start=5, end=6, weight_version=1, engine_id="e0"),
        ),
    )


def make_trajectory() -> Trajectory:
    return Trajectory(
        trajectory_id="ep-1",
        run_id="run",
        task_id="task",
        group_id="group",
        group_index=3,
        group_size=8,
        episode_id="ep",
        attempt=1,
        rows=(make_row(),),
        turns=(
            Turn(
                index=0,
                text="é \ufffd",
                tool_calls=(
                    ToolCall(name="bash", arguments_json="{}", result="ok", is_error=True, seconds=0.5),
                ),
                engine_request_id="rid",
                finish_reason="stop",
                num_prompt_tokens=2,
                num_sampled_tokens=2,
                generation_s=0.1,
                tools_s=0.2,
                waiting_s=0.3,
            ),
        ),
        outcome=Outcome.COMPLETED,
        grade=Grade(
            reward=None,
            components=(GradeComponent(name="tests", value=0.5, weight=1.0),),
            tests=(TestResult(test_id="t::a", status="passed", seconds=0.1),),
            evidence=("calc.py:3",),
            grader="tests",
            grader_version="1",
            sandbox_backend="bubblewrap",
            seconds=0.25,
        ),
        sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=5, max_new_tokens=7),
        template_fingerprint="tf",
        tokenizer_fingerprint="kf",
        created_at=WHEN,
        finished_at=WHEN,
        error="",
    ).sealed()


def test_row_when_whole_passes_and_counts_by_reason() -> None:
    row = make_row()
    row.check()
    assert row.mask_T().tolist() == [False, False, True, True, False, False]
    assert row.versions_T().tolist() == [-1, -1, 3, 4, -1, 1]
    counts = row.num_by_reason()
    assert (counts[MaskReason.MODEL], counts[MaskReason.EXPIRED], counts[MaskReason.INJECTED]) == (2, 1, 0)


def test_trajectory_when_asked_gives_version_range_and_trained_tokens() -> None:
    trajectory = make_trajectory()
    trajectory.check()
    assert trajectory.version_range() == (1, 4)
    assert trajectory.num_trained_tokens == 2


def with_spans(*spans: tuple[int, int, MaskReason]) -> Row:
    made = tuple(MaskSpan(start=start, end=end, reason=reason) for start, end, reason in spans)
    return replace(make_row(), mask_spans=made)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (replace(make_row(), logprobs_T=np.zeros(5, dtype=np.float32)), "length_mismatch"),
        (replace(make_row(), token_ids_T=np.array([1, 2, -3, 4, 5, 6], dtype=np.int32)), "negative_id"),
        (with_spans((0, 2, MaskReason.PROMPT), (3, 6, MaskReason.MODEL)), "mask_spans"),
        (with_spans((0, 3, MaskReason.PROMPT), (2, 6, MaskReason.MODEL)), "mask_spans"),
        (with_spans((0, 2, MaskReason.PROMPT)), "mask_spans"),
        (with_spans((0, 6, MaskReason.MODEL)), "mask_spans"),
        (with_spans(), "mask_spans"),
        (with_spans((0, 6, MaskReason.PROMPT)), "version_spans"),
        (replace(make_row(), version_spans=()), "version_spans"),
        (replace(make_row(), version_spans=make_row().version_spans[::-1]), "version_spans"),
        (replace(make_row(), logprobs_T=np.full(6, np.nan, dtype=np.float32)), "logprobs"),
        (
            replace(make_row(), logprobs_T=np.array([0, -1, -1, -1, 0, -1], dtype=np.float32)),
            "logprobs",
        ),
        (replace(make_row(), logprobs_T=np.array([0, 0, 0.5, -1, 0, -1], dtype=np.float32)), "logprobs"),
    ],
)
def test_row_when_an_invariant_breaks_names_it(row: Row, reason: str) -> None:
    with pytest.raises(IntakeError) as caught:
        row.check()
    assert caught.value.reason == reason


def test_trajectory_when_rows_change_after_sealing_fails_its_checksum() -> None:
    row = replace(make_row(), token_ids_T=np.array([1, 2, 3, 4, 5, 7], dtype=np.int32))
    with pytest.raises(IntakeError, match="checksum"):
        replace(make_trajectory(), rows=(row,)).check()


def test_trajectory_when_the_platform_failed_must_not_carry_a_reward() -> None:
    failed = replace(make_trajectory(), outcome=Outcome.INFRA_FAILED, grade=Grade(reward=0.0))
    with pytest.raises(IntakeError) as caught:
        failed.check()
    assert caught.value.reason == "graded_failure"
    replace(failed, grade=None, rows=()).sealed().check()


def test_wire_when_round_tripped_gives_an_equal_trajectory() -> None:
    trajectory = make_trajectory()
    data = trajectory_to_pb(trajectory).SerializeToString()
    back = trajectory_from_pb(pb.Trajectory.FromString(data))
    back.check()
    assert back.grade == trajectory.grade
    assert back.grade is not None
    assert back.grade.reward is None
    assert replace(back, rows=()) == replace(trajectory, rows=())
    assert back.rows[0].token_ids_T.tolist() == [1, 2, 3, 4, 5, 6]


def test_wire_when_the_reward_is_zero_stays_zero_and_not_absent() -> None:
    graded = replace(make_trajectory(), grade=Grade(reward=0.0))
    back = trajectory_from_pb(pb.Trajectory.FromString(trajectory_to_pb(graded).SerializeToString()))
    assert back.reward == 0.0


def test_wire_when_a_value_is_from_the_future_is_an_intake_error() -> None:
    message = trajectory_to_pb(make_trajectory())
    message.outcome = 99  # type: ignore[assignment]
    with pytest.raises(IntakeError):
        trajectory_from_pb(message)
    row = row_to_pb(make_row())
    row.mask_spans[0].reason = 77  # type: ignore[assignment]
    with pytest.raises(IntakeError):
        row_from_pb(row)
    row.token_ids = b"abc"
    with pytest.raises(IntakeError, match="token_ids"):
        row_from_pb(row)


@given(st.binary(max_size=200))
def test_wire_when_given_any_bytes_gives_a_row_or_an_intake_error(data: bytes) -> None:
    try:
        row_from_pb(pb.Row(token_ids=data, logprobs=data)).check()
    except IntakeError:
        pass
    else:
        pytest.fail("a row without mask spans passed")
