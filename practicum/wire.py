"""Dataclass <-> protobuf: the only converters of the trajectory.

Arrays travel as little-endian bytes and are read with `numpy.frombuffer`, so the hot path holds no
list of Python ints. Closed sets are mapped by name; a value this version does not know raises
`IntakeError`, since guessing one would train on it.
"""

from datetime import UTC, datetime

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

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

_REASON_TO_PB = {
    MaskReason.PROMPT: pb.MASK_REASON_PROMPT,
    MaskReason.TOOL: pb.MASK_REASON_TOOL,
    MaskReason.MODEL: pb.MASK_REASON_MODEL,
    MaskReason.EXPIRED: pb.MASK_REASON_EXPIRED,
    MaskReason.INJECTED: pb.MASK_REASON_INJECTED,
}
_REASON_FROM_PB: dict[int, MaskReason] = {int(number): reason for reason, number in _REASON_TO_PB.items()}
_OUTCOME_TO_PB = {
    Outcome.COMPLETED: pb.OUTCOME_COMPLETED,
    Outcome.TRUNCATED: pb.OUTCOME_TRUNCATED,
    Outcome.TIMED_OUT: pb.OUTCOME_TIMED_OUT,
    Outcome.CANCELLED: pb.OUTCOME_CANCELLED,
    Outcome.INFRA_FAILED: pb.OUTCOME_INFRA_FAILED,
    Outcome.TAMPERED: pb.OUTCOME_TAMPERED,
}
_OUTCOME_FROM_PB: dict[int, Outcome] = {int(number): outcome for outcome, number in _OUTCOME_TO_PB.items()}


def outcome_to_pb(outcome: Outcome) -> pb.Outcome:
    """The protobuf number of an outcome."""
    return _OUTCOME_TO_PB[outcome]


def outcome_from_pb(number: int) -> Outcome:
    """The outcome of a protobuf number; `IntakeError` for one this version does not know."""
    outcome = _OUTCOME_FROM_PB.get(number)
    if outcome is None:
        raise IntakeError("unknown_outcome", f"outcome {number} is not known to this version")
    return outcome


def timestamp_to_pb(moment: datetime) -> Timestamp:
    """An aware datetime as a protobuf timestamp."""
    stamp = Timestamp()
    stamp.FromDatetime(moment.astimezone(UTC))
    return stamp


def row_to_pb(row: Row) -> pb.Row:
    """A row as its message."""
    return pb.Row(
        token_ids=row.token_ids_T.astype("<i4", copy=False).tobytes(),
        logprobs=row.logprobs_T.astype("<f4", copy=False).tobytes(),
        mask_spans=[
            pb.MaskSpan(start=span.start, end=span.end, reason=_REASON_TO_PB[span.reason])
            for span in row.mask_spans
        ],
        version_spans=[
            pb.VersionSpan(
                start=span.start,
                end=span.end,
                weight_version=span.weight_version,
                engine_id=span.engine_id,
            )
            for span in row.version_spans
        ],
    )


def row_from_pb(message: pb.Row) -> Row:
    """A message as a row; the invariants are `Row.check`'s business."""
    for name in ("token_ids", "logprobs"):
        if len(getattr(message, name)) % 4:
            raise IntakeError("length_mismatch", f"{name} is no whole number of 4-byte values")
    spans = []
    for span in message.mask_spans:
        reason = _REASON_FROM_PB.get(span.reason)
        if reason is None:
            raise IntakeError("mask_spans", f"mask reason {span.reason} is not known")
        spans.append(MaskSpan(start=span.start, end=span.end, reason=reason))
    return Row(
        token_ids_T=np.frombuffer(message.token_ids, dtype="<i4"),
        logprobs_T=np.frombuffer(message.logprobs, dtype="<f4"),
        mask_spans=tuple(spans),
        version_spans=tuple(
            VersionSpan(
                start=span.start,
                end=span.end,
                weight_version=span.weight_version,
                engine_id=span.engine_id,
            )
            for span in message.version_spans
        ),
    )


def _turn_to_pb(turn: Turn) -> pb.Turn:
    return pb.Turn(
        index=turn.index,
        text=turn.text,
        tool_calls=[
            pb.ToolCall(
                name=call.name,
                arguments_json=call.arguments_json,
                result=call.result,
                is_error=call.is_error,
                seconds=call.seconds,
            )
            for call in turn.tool_calls
        ],
        engine_request_id=turn.engine_request_id,
        finish_reason=turn.finish_reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_sampled_tokens=turn.num_sampled_tokens,
        generation_s=turn.generation_s,
        tools_s=turn.tools_s,
        waiting_s=turn.waiting_s,
    )


def _turn_from_pb(message: pb.Turn) -> Turn:
    return Turn(
        index=message.index,
        text=message.text,
        tool_calls=tuple(
            ToolCall(
                name=call.name,
                arguments_json=call.arguments_json,
                result=call.result,
                is_error=call.is_error,
                seconds=call.seconds,
            )
            for call in message.tool_calls
        ),
        engine_request_id=message.engine_request_id,
        finish_reason=message.finish_reason,
        num_prompt_tokens=message.num_prompt_tokens,
        num_sampled_tokens=message.num_sampled_tokens,
        generation_s=message.generation_s,
        tools_s=message.tools_s,
        waiting_s=message.waiting_s,
    )


def grade_to_pb(grade: Grade) -> pb.Grade:
    """A grade as its message; an absent reward stays absent."""
    message = pb.Grade(
        components=[
            pb.GradeComponent(name=part.name, value=part.value, weight=part.weight)
            for part in grade.components
        ],
        tests=[
            pb.TestResult(
                test_id=test.test_id,
                status=test.status,
                message=test.message,
                seconds=test.seconds,
            )
            for test in grade.tests
        ],
        evidence=grade.evidence,
        grader=grade.grader,
        grader_version=grade.grader_version,
        sandbox_backend=grade.sandbox_backend,
        seconds=grade.seconds,
    )
    if grade.reward is not None:
        message.reward = grade.reward
    return message


def grade_from_pb(message: pb.Grade) -> Grade:
    """A message as a grade; an absent reward becomes None."""
    return Grade(
        reward=message.reward if message.HasField("reward") else None,
        components=tuple(
            GradeComponent(name=part.name, value=part.value, weight=part.weight)
            for part in message.components
        ),
        tests=tuple(
            TestResult(
                test_id=test.test_id,
                status=test.status,
                message=test.message,
                seconds=test.seconds,
            )
            for test in message.tests
        ),
        evidence=tuple(message.evidence),
        grader=message.grader,
        grader_version=message.grader_version,
        sandbox_backend=message.sandbox_backend,
        seconds=message.seconds,
    )


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    """Sampling parameters as their message."""
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """A message as sampling parameters."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        max_new_tokens=message.max_new_tokens,
    )


def trajectory_to_pb(trajectory: Trajectory) -> pb.Trajectory:
    """A trajectory as its message."""
    return pb.Trajectory(
        trajectory_id=trajectory.trajectory_id,
        run_id=trajectory.run_id,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        group_index=trajectory.group_index,
        group_size=trajectory.group_size,
        episode_id=trajectory.episode_id,
        attempt=trajectory.attempt,
        rows=[row_to_pb(row) for row in trajectory.rows],
        turns=[_turn_to_pb(turn) for turn in trajectory.turns],
        outcome=outcome_to_pb(trajectory.outcome),
        grade=None if trajectory.grade is None else grade_to_pb(trajectory.grade),
        error=trajectory.error,
        template_fingerprint=trajectory.template_fingerprint,
        tokenizer_fingerprint=trajectory.tokenizer_fingerprint,
        sampling=sampling_to_pb(trajectory.sampling),
        created_at=timestamp_to_pb(trajectory.created_at),
        finished_at=timestamp_to_pb(trajectory.finished_at),
        checksum=trajectory.checksum,
    )


def trajectory_from_pb(message: pb.Trajectory) -> Trajectory:
    """A message as a trajectory; raises `IntakeError` for values this version does not know."""
    return Trajectory(
        trajectory_id=message.trajectory_id,
        run_id=message.run_id,
        task_id=message.task_id,
        group_id=message.group_id,
        group_index=message.group_index,
        group_size=message.group_size,
        episode_id=message.episode_id,
        attempt=message.attempt,
        rows=tuple(row_from_pb(row) for row in message.rows),
        turns=tuple(_turn_from_pb(turn) for turn in message.turns),
        outcome=outcome_from_pb(message.outcome),
        grade=grade_from_pb(message.grade) if message.HasField("grade") else None,
        error=message.error,
        template_fingerprint=message.template_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        sampling=sampling_from_pb(message.sampling),
        created_at=message.created_at.ToDatetime(tzinfo=UTC),
        finished_at=message.finished_at.ToDatetime(tzinfo=UTC),
        checksum=message.checksum,
    )
