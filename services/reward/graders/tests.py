"""The `tests` grader: reward 1 if and only if every hidden test passes in a clean room, else 0.

A test counts as passed only with a record of its own that says so. No record, a skip, an expected failure, a
broken import, a limit or a runner that never got to its end all count as failed. What the platform broke is
`GraderError`, and hidden tests that cannot run at all are `InvalidInput`; neither is ever 0.
"""

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.clock import Clock
from practicum.errors import GraderError, InvalidInput, SandboxError
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Grade, GradeComponent, TestResult
from services.reward.graders.base import GraderSpec, Task, Verdict
from services.reward.integrity.clean_room import ONE_PROCESS, CleanRoom, CleanRun, runnable_paths
from services.reward.integrity.paths import apply_changes
from services.reward.integrity.separation import Separation, decide
from services.reward.sandbox.base import Changes, File, FileRefused

_log = get_logger(__name__)

NAME = "tests"
VERSION = "1"
MAX_EVIDENCE = 50
_ATTEMPTS = 3  # sandboxes that break are made anew this often
_FIRST_WAIT_S = 0.5  # before the second attempt, doubled before each further one


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsGrader:
    """See `base.Grader`."""

    __test__ = False  # not a test class, whatever its name says to pytest

    clean_room: CleanRoom
    clock: Clock

    def check(self, spec: GraderSpec) -> None:
        """See `base.Grader`."""
        if not spec.files:
            raise InvalidInput("grader.files", "is empty; a tests grader needs hidden tests")
        runnable = set(runnable_paths(spec.files))
        if not runnable:
            names = ", ".join(file.path for file in spec.files[:3])
            raise InvalidInput(
                "grader.files", f"{names}: no test file; name one `test_*.py` or `*_test.py`, or add one"
            )
        for file in spec.files:
            if file.path in runnable:
                _check_syntax(file)

    async def grade(self, grading_id: str, task: Task, changes: Changes) -> Verdict:
        """See `base.Grader`."""
        started_s = self.clock.monotonic()
        grader = task.grader
        self.check(grader)
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
            seconds=self.clock.monotonic() - started_s,
        )
        return Verdict(grade=grade, tampered=applied.tampered)

    async def _run(
        self, grading_id: str, task: Task, candidate: Sequence[File], separation: Separation
    ) -> CleanRun:
        grader = task.grader
        wait_s = _FIRST_WAIT_S
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
                _log.warning("grading.attempt_failed", grading_id=grading_id, error=str(error))
            # a backend that has just died is on its way back: attempts in a row would all meet its absence
            await self.clock.sleep(wait_s)
            wait_s *= 2
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
    """Ids of the test functions that stand in the (checked) test files, without running them."""
    found = []
    for path in runnable_paths(files):
        content = next(file.content for file in files if file.path == path)
        for node in ast.parse(content).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                found.append(f"{path}::{node.name}")
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                found += [
                    f"{path}::{node.name}::{inner.name}"
                    for inner in node.body
                    if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test")
                ]
    return found


def _check_syntax(file: File) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            # more than parsing: also what only the compiler sees, like a `return` outside a function
            compile(file.content, file.path, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}" if error.lineno else "the file"
        raise InvalidInput(
            "grader.files", f"{file.path}: correct its syntax; {where} is no Python ({error.msg})"
        ) from error
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise InvalidInput("grader.files", f"{file.path}: Python cannot compile it ({reason})") from error


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
