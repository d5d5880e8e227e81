"""Admits a task: its failure reproduces, its reference solution passes, its grader is steady.

Each check says what was seen and how to mend it. A platform failure raises; it is no verdict on the task.
"""

from dataclasses import dataclass

from practicum.errors import InvalidInput
from practicum.trajectory import Grade
from services.reward.graders.base import Grader, Task
from services.reward.integrity.paths import apply_changes, check_files
from services.reward.sandbox.base import Changes

REPETITIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One admission check."""

    name: str
    ok: bool
    detail: str


async def admit(admission_id: str, task: Task, reference: Changes | None, grader: Grader) -> list[Check]:
    """The checks in order; a task is admitted where all are ok. Raises `GraderError`."""
    well_formed = _well_formed(task, grader)
    if not well_formed.ok:
        return [well_formed]
    checks = [well_formed, _no_leak(task)]
    before = [
        (await grader.grade(f"{admission_id}/before/{number}", task, Changes())).grade
        for number in range(REPETITIONS)
    ]
    checks.append(_fails_before(before[0]))
    checks.append(_steady("steady_before", before))
    if reference is not None:
        checks.append(_reference_counts(task, reference))
        after = [
            (await grader.grade(f"{admission_id}/after/{number}", task, reference)).grade
            for number in range(REPETITIONS)
        ]
        checks.append(_passes_after(after[0]))
        checks.append(_steady("steady_after", after))
    return checks


def _well_formed(task: Task, grader: Grader) -> Check:
    try:
        check_files("workspace", task.workspace)
        check_files("grader", task.grader.files)
        grader.check(task.grader)
    except InvalidInput as error:
        return Check(name="well_formed", ok=False, detail=str(error))
    if not task.grader.editable:
        return Check(name="well_formed", ok=False, detail="grader.editable: no change could ever count")
    return Check(name="well_formed", ok=True, detail="files and paths are sound")


def _no_leak(task: Task) -> Check:
    given = {file.path: file.content for file in task.workspace}
    for file in task.grader.files:
        if file.content and file.content in given.values():
            return Check(
                name="no_leak", ok=False, detail=f"{file.path}: the hidden tests lie in the workspace as well"
            )
    return Check(name="no_leak", ok=True, detail="no hidden file lies in the workspace")


def _fails_before(grade: Grade) -> Check:
    if not grade.tests:
        return Check(
            name="failure_reproduces", ok=False, detail="the hidden files hold no test; name one `test_...`"
        )
    if grade.reward == 0.0:
        failing = [test.test_id for test in grade.tests if test.status != "passed"]
        return Check(name="failure_reproduces", ok=True, detail=f"fails before: {', '.join(failing[:3])}")
    return Check(
        name="failure_reproduces",
        ok=False,
        detail="the hidden tests pass without any change; the workspace has no fault that they see",
    )


def _reference_counts(task: Task, reference: Changes) -> Check:
    applied = apply_changes(task.workspace, reference, task.grader.editable)
    if applied.evidence:
        return Check(name="reference_applies", ok=False, detail="; ".join(applied.evidence[:3]))
    return Check(name="reference_applies", ok=True, detail="every change of the reference counts")


def _passes_after(grade: Grade) -> Check:
    if grade.reward == 1.0:
        return Check(name="reference_passes", ok=True, detail=f"passes {len(grade.tests)} tests")
    seen = [
        f"{test.test_id}: {test.status} {test.message}" for test in grade.tests if test.status != "passed"
    ]
    return Check(name="reference_passes", ok=False, detail="; ".join([*seen[:3], *grade.evidence[:2]]))


def _steady(name: str, grades: list[Grade]) -> Check:
    first, *others = [{test.test_id: test.status for test in grade.tests} for grade in grades]
    for other in others:
        different = sorted(
            test_id for test_id in first.keys() | other.keys() if first.get(test_id) != other.get(test_id)
        )
        if different:
            detail = f"{different[0]} gives another result when repeated; make it deterministic"
            return Check(name=name, ok=False, detail=detail)
    return Check(name=name, ok=True, detail=f"the same results in {len(grades)} runs")
