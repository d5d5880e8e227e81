"""Outcomes and rewards: what is graded, what is 0, and what is never graded."""

import asyncio
import re
import socket
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.errors import InvalidInput, SandboxError
from practicum.trajectory import Outcome
from services.reward.admission.checks import admit
from services.reward.graders.tests import TestsGrader, results
from services.reward.grading import Grading
from services.reward.integrity.clean_room import CleanRoom, CleanRun
from services.reward.metrics import RewardMetrics
from services.reward.sandbox.base import Changes, Ran, Sandbox, Session, TestRecord, TestRun
from services.reward.sandbox.bubblewrap import BubblewrapSandbox
from services.reward.sandbox.limits import SandboxLimits
from tests.fixtures.reward import FIXED, TESTS, changed, files, make_task


class NoSandbox(BubblewrapSandbox):
    """A backend that cannot make a session."""

    num_asked = 0

    async def open(
        self, session_id: str, limits: SandboxLimits, *, link: socket.socket | None = None
    ) -> Session:
        self.num_asked += 1
        raise SandboxError("no room on this machine")


class PatientClock(SystemClock):
    """Moves on at once when told to sleep."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class AwayUntil(BubblewrapSandbox):
    """A backend that has died and takes a while to come back."""

    def __init__(self, sandbox: BubblewrapSandbox, clock: PatientClock, *, back_at_s: float) -> None:
        super().__init__()
        self._sandbox, self._clock, self._back_at_s = sandbox, clock, back_at_s

    async def open(self, session_id: str, limits: SandboxLimits, **options: Any) -> Session:
        if sum(self._clock.slept) < self._back_at_s:
            raise SandboxError("the sandbox's fork server ended")
        return await self._sandbox.open(session_id, limits, **options)


class StuckSession:
    """A session whose process is said not to have ended."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def close(self) -> None:
        await self._session.close()
        raise SandboxError("session process 1 did not end")


class StuckSandbox(BubblewrapSandbox):
    """A backend whose sessions do not close."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox = sandbox
        self.opened: list[str] = []

    async def open(self, session_id: str, limits: SandboxLimits, **options: Any) -> Session:
        self.opened.append(session_id)
        stuck: Any = StuckSession(await self._sandbox.open(session_id, limits, **options))
        made: Session = stuck
        return made


def grading_with(grader: TestsGrader, registry: CollectorRegistry | None = None) -> Grading:
    metrics = RewardMetrics(registry or CollectorRegistry())
    return Grading(graders={"tests": grader}, metrics=metrics, clock=SystemClock())


async def test_a_platform_failure_is_never_a_reward() -> None:
    sandbox, registry = NoSandbox(), CollectorRegistry()
    room = CleanRoom(sandbox=sandbox, slots=asyncio.Semaphore(8))
    grading = grading_with(TestsGrader(clean_room=room, clock=PatientClock()), registry)
    graded = await grading.grade("g", make_task(), changed({"calc.py": FIXED}), Outcome.COMPLETED)
    assert graded.grade.reward is None
    assert graded.outcome is Outcome.INFRA_FAILED
    assert sandbox.num_asked == 3
    assert registry.get_sample_value("practicum_reward_grades_total", {"outcome": "infra_failed"}) == 1


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (Outcome.COMPLETED, 1.0),
        (Outcome.TRUNCATED, 1.0),
        (Outcome.TIMED_OUT, 0.0),
        (Outcome.CANCELLED, None),
        (Outcome.INFRA_FAILED, None),
    ],
)
async def test_the_outcome_of_the_episode_decides_what_is_graded(
    grader: TestsGrader, outcome: Outcome, reward: float | None
) -> None:
    graded = await grading_with(grader).grade("g", make_task(), changed({"calc.py": FIXED}), outcome)
    assert (graded.grade.reward, graded.outcome) == (reward, outcome)


async def test_tampering_is_its_own_outcome(grader: TestsGrader) -> None:
    changes = changed({"calc.py": FIXED, "conftest.py": "x"})
    graded = await grading_with(grader).grade("g", make_task(), changes, Outcome.COMPLETED)
    assert (graded.grade.reward, graded.outcome) == (0.0, Outcome.TAMPERED)


@pytest.mark.parametrize(
    "code",
    ["def add(a,b):\n    while True: pass\n", "import time\ntime.sleep(60)\n"],
)
@pytest.mark.parametrize(
    "hidden", [TESTS, TESTS.replace("test_a()", "test_a(tmp_path)")], ids=["apart", "one_process"]
)
async def test_a_timeout_of_the_policy_is_0(grader: TestsGrader, code: str, hidden: str) -> None:
    task = make_task(hidden={"test_calc.py": hidden}, timeout_s=0.5)
    verdict = await grader.grade("g", task, changed({"calc.py": code}))
    assert verdict.grade.reward == 0.0
    assert any("limit `wall`" in line for line in verdict.grade.evidence)
    assert verdict.grade.seconds < 4


async def test_an_unknown_grader_is_bad_input(grader: TestsGrader) -> None:
    grading = Grading(graders={}, metrics=RewardMetrics(CollectorRegistry()), clock=SystemClock())
    with pytest.raises(InvalidInput, match=r"grader\.kind"):
        await grading.grade("g", make_task(), Changes(), Outcome.COMPLETED)


@pytest.mark.parametrize(
    ("hidden", "mending"),
    [
        ({"data.txt": "x"}, r"grader\.files: data\.txt: no test file; name one `test_\*\.py`"),
        ({"test_b.py": "x = 1\ndef test_a(:\n"}, r"grader\.files: test_b\.py: correct its syntax; line 2"),
        ({"test_b.py": "\nreturn 1\n"}, r"grader\.files: test_b\.py: correct its syntax; line 2"),
        ({"test_b.py": "x = '\0'\n"}, r"grader\.files: test_b\.py: .*null bytes"),
    ],
    ids=["no_test_file", "syntax", "compiler", "null_byte"],
)
@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.TIMED_OUT])
async def test_hidden_tests_that_cannot_run_are_bad_input_that_says_what_to_mend(
    grader: TestsGrader, hidden: dict[str, str], mending: str, outcome: Outcome
) -> None:
    with pytest.raises(InvalidInput, match=mending):
        await grading_with(grader).grade("g", make_task(hidden=hidden), Changes(), outcome)
    checks = await admit("a", make_task(hidden=hidden), None, grader)
    assert [(check.name, check.ok) for check in checks] == [("well_formed", False)]
    assert re.search(mending, checks[0].detail)


async def test_a_warning_about_hidden_tests_is_no_syntax_error(grader: TestsGrader) -> None:
    grader.check(make_task(hidden={"test_b.py": "def test_a():\n    assert '\\d' is not 1\n"}).grader)


async def test_attempts_wait_longer_each_time_for_a_backend_that_comes_back(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, BubblewrapSandbox)
    clock = PatientClock()
    away = AwayUntil(sandbox, clock, back_at_s=1.2)
    grader = TestsGrader(clean_room=CleanRoom(sandbox=away, slots=asyncio.Semaphore(8)), clock=clock)
    verdict = await grader.grade("g", make_task(), changed({"calc.py": FIXED}))
    assert verdict.grade.reward == 1.0
    assert clock.slept == [0.5, 1.0]


@pytest.mark.parametrize(
    "hidden", [TESTS, TESTS.replace("test_a()", "test_a(tmp_path)")], ids=["apart", "one_process"]
)
async def test_a_session_that_does_not_close_takes_no_verdict_away(sandbox: Sandbox, hidden: str) -> None:
    stuck = StuckSandbox(sandbox)
    grader = TestsGrader(clean_room=CleanRoom(sandbox=stuck, slots=asyncio.Semaphore(8)), clock=SystemClock())
    task = make_task(hidden={"test_calc.py": hidden})
    verdict = await grader.grade("g", task, changed({"calc.py": FIXED}))
    assert verdict.grade.reward == 1.0
    assert {attempt for _, attempt in (name.split("/")[:2] for name in stuck.opened)} == {"1"}


@pytest.mark.parametrize(
    ("code", "hidden", "reward"),
    [
        (
            "def f(x):\n    x.sort()\n",
            "from m import f\ndef test_a():\n    l = [2, 1]\n    f(l)\n    assert l == [1, 2]\n",
            1.0,
        ),
        (
            "def f(x):\n    return x\n",
            "from m import f\ndef test_a():\n    l = [1]\n    assert f(l) is l\n",
            1.0,
        ),
        (
            "class Odd(ValueError): pass\ndef f(x):\n    raise Odd('no')\n",
            "import pytest\nfrom m import f\ndef test_a():\n    with pytest.raises(ValueError, match='no'):\n        f(1)\n",  # noqa: E501
            1.0,
        ),
        (
            "def f(x):\n    yield from x\n",
            "from m import f\ndef test_a():\n    assert list(f((1, 2))) == [1, 2]\n",
            1.0,
        ),
        (
            "def f(x):\n    assert False\n",
            "import pytest\nfrom m import f\ndef test_a():\n    with pytest.raises(TypeError):\n        f(1)\n",  # noqa: E501
            0.0,
        ),
        (
            "import helper\ndef f(x):\n    return helper.one() + x\n",
            "from m import f\ndef test_a():\n    assert f(1) == 2\n",
            1.0,
        ),
        (
            "def f(x):\n    return x.upper()\n",
            "from m import f\nclass U:\n    def upper(self): return 'U'\nu = U()\ndef test_a():\n    assert f(u) == 'U'\n",  # noqa: E501
            1.0,
        ),
    ],
    ids=["mutates", "same_object", "exception", "generator", "assertion", "imports", "falls_back"],
)
async def test_code_in_another_process_behaves_as_in_one(
    grader: TestsGrader, code: str, hidden: str, reward: float
) -> None:
    workspace = {"m.py": "def f(x):\n    pass\n", "helper.py": "def one():\n    return 1\n"}
    task = make_task(workspace=workspace, hidden={"test_m.py": hidden}, editable=("m.py",))
    verdict = await grader.grade("g", task, changed({"m.py": code}))
    assert verdict.grade.reward == reward, verdict.grade


def clean_run(records: dict[str, str], collected: tuple[str, ...] = ()) -> CleanRun:
    made = tuple(
        TestRecord(test_id=test_id, status=status, message="", seconds=0.0)
        for test_id, status in records.items()
    )
    ran = Ran(exit_status=0, limit_hit="", seconds=0.1, output="", cut=False)
    run = TestRun(ran=ran, num_files=1, collected=collected, records=made, ended=True)
    return CleanRun(tests=run, candidate=None, mode="one_process")


def test_a_test_without_a_record_is_absent() -> None:
    found = results(files({"test_x.py": TESTS}), clean_run({"test_x.py::test_a": "passed"}))
    assert [(test.test_id, test.status) for test in found] == [
        ("test_x.py::test_a", "passed"),
        ("test_x.py::test_b", "absent"),
    ]


def test_parameters_stand_for_their_function() -> None:
    records = {"test_x.py::test_a[1]": "passed", "test_x.py::test_b": "passed"}
    found = results(files({"test_x.py": TESTS}), clean_run(records, tuple(records)))
    assert [test.status for test in found] == ["passed", "passed"]
