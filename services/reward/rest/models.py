"""Bodies of the reward service's REST API."""

from datetime import datetime

from pydantic import ConfigDict, Field, JsonValue

from practicum.rest.models import ApiModel
from practicum.trajectory import Grade, Outcome
from services.reward.store.grades import StoredGrade

_PATH_EXAMPLE: dict[str, JsonValue] = {"calc.py": "def add(a, b):\n    return a + b\n"}
_HIDDEN_EXAMPLE: dict[str, JsonValue] = {
    "test_hidden.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
}


class ComponentBody(ApiModel):
    """One named part of a reward."""

    name: str = Field(description="What was measured.", examples=["tests"])
    value: float = Field(description="Its value.")
    weight: float = Field(description="Its weight in the reward.")


class TestBody(ApiModel):
    """The result of one hidden test."""

    __test__ = False  # not a test class, whatever its name says to pytest

    test_id: str = Field(description="The test.", examples=["test_hidden.py::test_add"])
    status: str = Field(description="passed, failed, error, skipped or absent.")
    message: str = Field(description="A short message for people.")
    seconds: float = Field(description="Wall time.")


class GradeBody(ApiModel):
    """What an episode was worth, with the reasons."""

    reward: float | None = Field(description="null means not graded; it is never to be read as 0.")
    outcome: Outcome = Field(description="The outcome after grading.")
    components: list[ComponentBody] = Field(description="The parts of the reward.")
    tests: list[TestBody] = Field(description="Results by test.")
    evidence: list[str] = Field(description="Findings a person can follow up.")
    grader: str = Field(description="The grader.")
    grader_version: str = Field(description="Its version.")
    sandbox_backend: str = Field(description="The backend that ran it.")
    seconds: float = Field(description="Wall time of grading.")


class StoredGradeBody(GradeBody):
    """A stored grade."""

    trajectory_id: str = Field(description="The trajectory.")
    run_id: str = Field(description="Its run; empty for an evaluation.")
    task_id: str = Field(description="Its task.")
    created_at: datetime = Field(description="When it was graded.")


class FilesBody(ApiModel):
    """Text files by path."""

    files: dict[str, str] = Field(description="Text by relative path.", examples=[_PATH_EXAMPLE])


class GraderBody(ApiModel):
    """How a workspace is graded."""

    kind: str = Field(default="tests", description="The grader.")
    files: dict[str, str] = Field(
        description="Hidden files, added after the changes.",
        examples=[_HIDDEN_EXAMPLE],
    )
    editable: list[str] = Field(
        min_length=1, description="Globs of paths whose changes count.", examples=[["calc.py"]]
    )
    timeout_s: float = Field(default=30.0, gt=0, le=900, description="Wall time of the tests.")


class GradeRequestBody(ApiModel):
    """Grade a workspace now, without an episode. The answer is not stored."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "workspace": {"files": {"calc.py": "def add(a, b):\n    return a - b\n"}},
                    "changed": _PATH_EXAMPLE,
                    "grader": {"kind": "tests", "files": _HIDDEN_EXAMPLE, "editable": ["calc.py"]},
                }
            ]
        },
    )

    workspace: FilesBody = Field(
        description="The pristine workspace.",
        examples=[{"files": {"calc.py": "def add(a, b):\n    return a - b\n"}}],
    )
    changed: dict[str, str] = Field(
        default={}, description="Files that were changed or added, whole.", examples=[_PATH_EXAMPLE]
    )
    removed: list[str] = Field(default=[], description="Paths that were removed.", examples=[[]])
    grader: GraderBody = Field(description="How the workspace is graded.")


class CapabilitiesBody(ApiModel):
    """What the sandbox enforces, and what the boot-time self-attack found."""

    capabilities: dict[str, str] = Field(description="Protection by subject.")
    attacks: dict[str, str] = Field(
        description="What each attack of the self-check at boot met.", examples=[{"network": "held"}]
    )
    open_sessions: int = Field(description="Sessions of episodes now.")
    max_sessions: int = Field(description="Sessions that may be open at once.")


def grade_fields(grade: Grade, outcome: Outcome) -> dict[str, object]:
    """The fields of `GradeBody`."""
    return {
        "reward": grade.reward,
        "outcome": outcome,
        "components": [
            ComponentBody(name=part.name, value=part.value, weight=part.weight) for part in grade.components
        ],
        "tests": [
            TestBody(test_id=test.test_id, status=test.status, message=test.message, seconds=test.seconds)
            for test in grade.tests
        ],
        "evidence": list(grade.evidence),
        "grader": grade.grader,
        "grader_version": grade.grader_version,
        "sandbox_backend": grade.sandbox_backend,
        "seconds": grade.seconds,
    }


def stored_grade_body(stored: StoredGrade) -> StoredGradeBody:
    """A stored grade as its body."""
    return StoredGradeBody.model_validate(
        {
            "trajectory_id": stored.trajectory_id,
            "run_id": stored.run_id,
            "task_id": stored.task_id,
            "created_at": stored.created_at,
            **grade_fields(stored.grade, stored.outcome),
        }
    )
