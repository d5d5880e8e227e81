"""The trajectory: what an episode leaves behind, as frozen values with checked invariants.

Owns the vocabulary (`Outcome`, `MaskReason`) and the invariants that hold from the rollout's ledger
to the trainer's step. Never touches protobuf (see `wire`), I/O or torch.

Invariants of a row of T tokens, checked by `Row.check`:
- `token_ids_T` int32 >= 0 and `logprobs_T` float32 finite, same length, T >= 1;
- mask spans are half-open, sorted, touch each other and cover [0, T);
- version spans are half-open, sorted, do not overlap and cover exactly the sampled tokens;
- a logprob is <= 0 where sampled and exactly 0 elsewhere;
- the first token is never sampled: it has no context to be scored in.
"""

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from practicum.errors import IntakeError

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Outcome(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    INFRA_FAILED = "infra_failed"
    TAMPERED = "tampered"


class MaskReason(StrEnum):
    """Why a token is, or is not, trained. Only `MODEL` is."""

    PROMPT = "prompt"
    TOOL = "tool"
    MODEL = "model"
    EXPIRED = "expired"
    INJECTED = "injected"


SAMPLED_REASONS = frozenset({MaskReason.MODEL, MaskReason.EXPIRED})


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpan:
    """Positions [start, end) share one reason."""

    start: int
    end: int
    reason: MaskReason


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled positions [start, end) come from one weight version on one engine."""

    start: int
    end: int
    weight_version: int
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence of T tokens."""

    token_ids_T: Ids
    logprobs_T: Floats
    mask_spans: tuple[MaskSpan, ...]
    version_spans: tuple[VersionSpan, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids_T.shape[0])

    def mask_T(self, reasons: frozenset[MaskReason] = frozenset({MaskReason.MODEL})) -> Bools:
        """True at every position whose reason is in `reasons`; by default the trained tokens."""
        mask_T = np.zeros(self.num_tokens, dtype=np.bool_)
        for span in self.mask_spans:
            if span.reason in reasons:
                mask_T[span.start : span.end] = True
        return mask_T

    def versions_T(self) -> NDArray[np.int32]:
        """The weight version of every sampled token; -1 elsewhere."""
        versions_T = np.full(self.num_tokens, -1, dtype=np.int32)
        for span in self.version_spans:
            versions_T[span.start : span.end] = span.weight_version
        return versions_T

    def num_by_reason(self) -> dict[MaskReason, int]:
        """Token counts by mask reason; every reason is present."""
        counts = dict.fromkeys(MaskReason, 0)
        for span in self.mask_spans:
            counts[span.reason] += span.end - span.start
        return counts

    def check(self) -> None:
        """Raise `IntakeError` with a counted reason where an invariant does not hold."""
        num_tokens = self.num_tokens
        if num_tokens == 0:
            raise IntakeError("empty_row", "a row has no token")
        if self.logprobs_T.shape != self.token_ids_T.shape:
            raise IntakeError(
                "length_mismatch",
                f"{num_tokens} token ids but {self.logprobs_T.shape[0]} logprobs",
            )
        if int(self.token_ids_T.min()) < 0:
            raise IntakeError("negative_id", "a token id is negative")
        self._check_mask_spans(num_tokens)
        self._check_version_spans()
        self._check_logprobs()

    def _check_mask_spans(self, num_tokens: int) -> None:
        position = 0
        for span in self.mask_spans:
            if span.start != position or span.end <= span.start:
                raise IntakeError(
                    "mask_spans",
                    f"mask span [{span.start}, {span.end}) does not continue at {position}",
                )
            position = span.end
        if position != num_tokens:
            raise IntakeError("mask_spans", f"mask spans cover {position} of {num_tokens} tokens")
        if self.mask_spans[0].reason in SAMPLED_REASONS:
            raise IntakeError("mask_spans", "the first token of a row cannot be sampled")

    def _check_version_spans(self) -> None:
        position = 0
        covered_T = np.zeros(self.num_tokens, dtype=np.bool_)
        for span in self.version_spans:
            if span.start < position or span.end <= span.start or span.end > self.num_tokens:
                raise IntakeError("version_spans", f"version span [{span.start}, {span.end}) is out of order")
            if span.weight_version < 0:
                raise IntakeError("version_spans", "a weight version is negative")
            covered_T[span.start : span.end] = True
            position = span.end
        if not np.array_equal(covered_T, self.mask_T(SAMPLED_REASONS)):
            raise IntakeError("version_spans", "version spans do not cover exactly the sampled tokens")

    def _check_logprobs(self) -> None:
        sampled_T = self.mask_T(SAMPLED_REASONS)
        if not np.isfinite(self.logprobs_T).all():
            raise IntakeError("logprobs", "a logprob is not finite")
        # Engines round: a certain token may come back as a tiny positive number.
        if bool((self.logprobs_T[sampled_T] > 1e-3).any()):
            raise IntakeError("logprobs", "a sampled token has a positive logprob")
        if bool((self.logprobs_T[~sampled_T] != 0).any()):
            raise IntakeError("logprobs", "a token that was not sampled has a logprob")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call the policy made and what came back, for people."""

    name: str
    arguments_json: str
    result: str
    is_error: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call and the tools that followed it, for people; never training data."""

    index: int
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    engine_request_id: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    generation_s: float = 0.0
    tools_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeComponent:
    """One named part of a reward."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The result of one hidden test."""

    __test__ = False  # not a test class, whatever its name says to pytest

    test_id: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What an episode was worth, with the reasons."""

    reward: float | None  # None = not graded, never 0
    components: tuple[GradeComponent, ...] = ()
    tests: tuple[TestResult, ...] = ()
    evidence: tuple[str, ...] = ()
    grader: str = ""
    grader_version: str = ""
    sandbox_backend: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the policy is sampled. Immutable, so that no request can change another's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What an episode leaves behind."""

    trajectory_id: str
    run_id: str
    task_id: str
    group_id: str
    group_index: int
    group_size: int
    episode_id: str
    attempt: int
    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    outcome: Outcome
    grade: Grade | None  # None = not graded yet
    sampling: SamplingParams
    template_fingerprint: str
    tokenizer_fingerprint: str
    created_at: datetime
    finished_at: datetime
    error: str = ""
    checksum: str = field(default="")

    @property
    def reward(self) -> float | None:
        """The reward; None where there is none, which is never 0."""
        return None if self.grade is None else self.grade.reward

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with the reason `model`, over all rows."""
        return sum(row.num_by_reason()[MaskReason.MODEL] for row in self.rows)

    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of any sampled token; None where none was sampled."""
        versions = [span.weight_version for row in self.rows for span in row.version_spans]
        return (min(versions), max(versions)) if versions else None

    def sealed(self) -> "Trajectory":
        """The same trajectory with the checksum of its rows."""
        return replace(self, checksum=rows_checksum(self.rows))

    def check(self) -> None:
        """Raise `IntakeError` where a row, the checksum or an id breaks an invariant."""
        for name in ("trajectory_id", "task_id", "episode_id"):
            if not getattr(self, name):
                raise IntakeError("missing_id", f"{name} is empty")
        for row in self.rows:
            row.check()
        if self.outcome is not Outcome.INFRA_FAILED and not self.rows:
            raise IntakeError("empty_trajectory", "no row, and the platform did not fail")
        if self.outcome is Outcome.INFRA_FAILED and self.reward is not None:
            raise IntakeError("graded_failure", "a platform failure must not carry a reward")
        if self.checksum != rows_checksum(self.rows):
            raise IntakeError("checksum", "the rows do not match their checksum")


def rows_checksum(rows: tuple[Row, ...]) -> str:
    """SHA-256 over every row's arrays and spans, hex."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.num_tokens.to_bytes(8, "little"))
        digest.update(row.token_ids_T.astype("<i4", copy=False).tobytes())
        digest.update(row.logprobs_T.astype("<f4", copy=False).tobytes())
        for mask in row.mask_spans:
            digest.update(f"m{mask.start}:{mask.end}:{mask.reason};".encode())
        for version in row.version_spans:
            digest.update(
                f"v{version.start}:{version.end}:{version.weight_version}:{version.engine_id};".encode()
            )
    return digest.hexdigest()
