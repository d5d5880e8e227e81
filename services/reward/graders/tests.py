"""The `tests` grader: reward 1 if and only if every hidden test passes in a clean room, else 0.

A test counts as passed only with a record of its own that says so. No record, a skip, an expected failure, a
broken import, a limit or a runner that never got to its end all count as failed. What the platform broke is
`GraderError`, never 0.
"""

import ast
import time
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.errors import GraderError, SandboxError
from practicum.trajectory import Grade, GradeComponent, TestResult
from services.reward.graders.base import Task, Verdict
from services.reward.integrity.clean_room import ONE_PROCESS, CleanRoom, CleanRun, runnable_paths
from services.reward.integrity.paths import apply_changes
from services.reward.integrity.separation import Separation, decide
from services.reward.sandbox.base import Changes, File, FileRefused

NAME = "tests"
VERSION = "1"
MAX_EVIDENCE = 50
_ATTEMPTS = 3  # sandboxes that break are made anew this often


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsGrader:
    """See `base.Grader`."""

    __test__ = False  # not a test class, whatever its name says to pytest

    clean_room: CleanRoom

    async def grade(self, grading_id: str, task: Task, changes: Changes) -> Verdict:
        """See `base.Grader`."""
        started_s = time.monotonic()
        grader = task.grader
        if not runnable_paths(grader.files):
            raise GraderError("the grader has no test file (`test_*.py` or `*_test.py`)")
        applied = apply_changes(task.workspace, changes, grader.editable)
        separation = decide(task.workspace, grader.files, grader.editable)
        run = await self._run(grading_id, task, applied.files, separation)
        tests = results(grader.files, run)
        passed = bool(tests) and all(test.status == "passed" for test in tests) and ended_well(run)
        reward = 1.0 if passed and not applied.tampered else 0.0
        evidence = [*applied.evidence, *_findings(run, separation.reason)][:MAX_EVIDENCE]
        grade = Grade(
            reward=reward,
            components=(GradeComponent(name=NAME, value=reward, weight=1.0),),
            tests=tests,
            evidence=tuple(evidence),
            grader=NAME,
            grader_version=VERSION,
            sandbox_backend=self.clean_room.sandbox.name,
            seconds=time.monotonic() - started_s,
        )
        return Verdict(grade=grade, tampered=applied.tampered)

    async def _run(
        self, grading_id: str, task: Task, candidate: Sequence[File], separation: Separation
    ) -> CleanRun:
        grader = task.grader
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self.clean_room.run(
                    f"{grading_id}/{attempt}",
                    candidate,
                    grader.files,
                    separation,
                    grader.editable,
                    task.limits,
                    wall_s=grader.timeout_s,
                )
            except (SandboxError, FileRefused) as error:
                if attempt == _ATTEMPTS:
                    raise GraderError(f"no clean room after {attempt} attempts: {error}") from error
        raise AssertionError("unreachable")


def results(files: Sequence[File], run: CleanRun) -> tuple[TestResult, ...]:
    """One result per required test: the tests collected, and every test function the files define.

    A record with another id (a file that could not be collected) is kept too, so that it counts.
    """
    records = {}
    for record in run.tests.records:
        # twice the same id: the worse one counts
        if record.test_id not in records or record.status != "passed":
            records[record.test_id] = record
    required = list(dict.fromkeys([*run.tests.collected, *records]))
    for defined in defined_tests(files):
        if not any(test_id == defined or test_id.startswith(defined + "[") for test_id in required):
            required.append(defined)
    found = []
    for test_id in required:
        known = records.get(test_id)
        if known is None:
            found.append(TestResult(test_id=test_id, status="absent", message="no result"))
        else:
            found.append(
                TestResult(test_id=test_id, status=known.status, message=known.message, seconds=known.seconds)
            )
    return tuple(found)


def defined_tests(files: Sequence[File]) -> list[str]:
    """Ids of the test functions that stand in the test files, without running them."""
    found = []
    for path in runnable_paths(files):
        content = next(file.content for file in files if file.path == path)
        try:
            body = ast.parse(content).body
        except (SyntaxError, ValueError) as error:
            raise GraderError(f"the hidden test file {path} cannot be parsed: {error}") from error
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                found.append(f"{path}::{node.name}")
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                found += [
                    f"{path}::{node.name}::{inner.name}"
                    for inner in node.body
                    if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test")
                ]
    return found


def ended_well(run: CleanRun) -> bool:
    """Whether the runner's own verdict, its exit status and its limits all agree with a pass."""
    ran = run.tests.ran
    return run.tests.ended is True and ran.exit_status == 0 and not ran.limit_hit


def _findings(run: CleanRun, one_process_reason: str) -> list[str]:
    found = []
    ran = run.tests.ran
    if ran.limit_hit:
        found.append(f"the tests hit the limit `{ran.limit_hit}` after {ran.seconds:.2f} s")
    if run.tests.ended is None and not ran.limit_hit:
        found.append(f"the test process ended early (exit status {ran.exit_status})")
    if run.candidate is not None and run.candidate.limit_hit:
        found.append(f"the code under test hit the limit `{run.candidate.limit_hit}`")
    if run.mode == ONE_PROCESS:
        reason = run.tests.unsupported or one_process_reason or "the tests pass more than plain data"
        found.append(f"tests and code shared one process: {reason}")
    return found
