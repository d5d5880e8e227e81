"""What every sandbox backend promises (see services/reward/sandbox/base.py)."""

import asyncio
import socket
import time

import pytest

from practicum.errors import SandboxError
from services.reward.sandbox.base import Changes, FileRefused, Sandbox
from tests.fixtures.reward import BROKEN, FIXED, LIMITS, TESTS, files

WORKSPACE = files({"calc.py": BROKEN, "test_calc.py": TESTS})


async def test_files_are_laid_out_read_written_and_edited(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    await session.lay_out(WORKSPACE, pristine=True)
    assert session.session_id == "s"
    assert await session.list_files() == ("calc.py", "test_calc.py")
    assert await session.read_file("calc.py") == BROKEN
    assert await session.read_file("/work/calc.py") == BROKEN
    await session.write_file("pkg/new.py", b"x = 1\n")
    await session.edit_file("calc.py", b"a-b", b"a+b")
    assert await session.read_file("calc.py") == FIXED
    with pytest.raises(FileRefused, match="old text not found in calc.py"):
        await session.edit_file("calc.py", b"a-b", b"a+b")
    await session.write_file("calc.py", b"one one\n")
    with pytest.raises(FileRefused, match=r"old text occurs 2 times in calc.py"):
        await session.edit_file("calc.py", b"one", b"two")
    with pytest.raises(FileRefused, match=r"no such file: none.py"):
        await session.read_file("none.py")
    await session.close()


async def test_snapshot_tells_changed_removed_and_refused(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    await session.lay_out(files({"a": "1", "b": "2", "keep": "3"}), pristine=True)
    await session.lay_out(files({"later": "4"}), pristine=False)
    assert [file.path for file in (await session.snapshot()).changed] == ["later"]
    command = "rm later b; echo x > a; chmod +x keep; ln -s /etc/passwd l; mkfifo p; mkdir -p __pycache__; touch __pycache__/x.pyc"  # noqa: E501
    await session.run(["sh", "-c", command], wall_s=5)
    changes = await session.snapshot()
    await session.close()
    assert {(file.path, file.content, file.executable) for file in changes.changed} == {
        ("a", b"x\n", False),
        ("keep", b"3", True),
    }
    assert changes.removed == ("b",)
    assert sorted(changes.refused) == ["__pycache__/x.pyc: bytecode", "l: a link", "p: no regular file"]


async def test_session_when_memory_is_short_is_the_first_to_be_ended(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    ran = await session.run(["cat", "/proc/1/oom_score_adj", "/proc/self/oom_score_adj"], wall_s=5)
    await session.close()
    assert ran.output.split() == ["1000", "1000"]


async def test_commands_have_output_status_and_a_private_environment(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    ran = await session.run(["bash", "-c", "pwd; echo err >&2; exit 3"], wall_s=5)
    assert (ran.output, ran.exit_status, ran.limit_hit) == ("/work\nerr\n", 3, "")
    broken = await session.run(["sh", "-c", "printf 'a\\377b'"], wall_s=5)
    assert broken.output == "a\\xffb"
    late = await session.run(["sleep", "30"], wall_s=0.3)
    assert (late.limit_hit, late.exit_status) == ("wall", None)
    missing = await session.run(["no-such-command"], wall_s=5)
    assert missing.exit_status != 0
    await session.close()


async def test_tests_run_with_records_by_id(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    assert (await session.run_tests(wall_s=5)).num_files == 0
    await session.lay_out(WORKSPACE, pristine=True)
    run = await session.run_tests(wall_s=5)
    assert run.collected == ("test_calc.py::test_a", "test_calc.py::test_b")
    assert [(record.test_id, record.status, record.message) for record in run.records] == [
        ("test_calc.py::test_a", "failed", "assert -1 == 5"),
        ("test_calc.py::test_b", "failed", "assert 0 == 2"),
    ]
    assert run.ended is False
    await session.edit_file("calc.py", b"-", b"+")
    again = await session.run_tests(wall_s=5)
    assert [record.status for record in again.records] == ["passed", "passed"]
    assert again.ended is True
    await session.close()


async def test_tests_see_fixtures_parameters_classes_and_unittest(sandbox: Sandbox) -> None:
    text = (
        "import unittest, warnings, pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_n(n, tmp_path, capsys, monkeypatch, caplog):\n"
        "    print(n); assert capsys.readouterr().out == f'{n}\\n'\n"
        "class TestX:\n    def test_in(self):\n        with pytest.warns(UserWarning): warnings.warn('w')\n"
        "class Old(unittest.TestCase):\n    def test_old(self): self.assertEqual(1, 1)\n"
        "@pytest.mark.xfail\ndef test_x(): assert 0\n"
        "def test_skip(): pytest.skip('later')\n"
    )
    session = await sandbox.open("s", LIMITS)
    await session.lay_out(files({"test_x.py": text}), pristine=True)
    run = await session.run_tests(wall_s=10)
    await session.close()
    statuses = {record.test_id.removeprefix("test_x.py::"): record.status for record in run.records}
    assert statuses == {
        "test_n[1]": "passed",
        "test_n[2]": "passed",
        "TestX::test_in": "passed",
        "Old::test_old": "passed",
        "test_x": "skipped",
        "test_skip": "skipped",
    }


async def test_runs_leave_nothing_behind_in_the_interpreter(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    await session.lay_out(
        files({"test_x.py": "import json\ndef test_x():\n    json.dumps = None\n"}), pristine=True
    )
    await session.run_tests(wall_s=5)
    assert (await session.run_python("import json; print(json.dumps([1]))", wall_s=5)).output == "[1]\n"
    await session.close()


async def test_linked_sessions_judge_code_in_another_sandbox(sandbox: Sandbox) -> None:
    tests_end, code_end = socket.socketpair()
    with tests_end, code_end:
        judge = await sandbox.open("judge", LIMITS, link=tests_end)
        subject = await sandbox.open("subject", LIMITS, link=code_end)
    await judge.lay_out(files({"test_calc.py": TESTS}), pristine=False)
    await subject.lay_out(
        files({"calc.py": "def add(a, b):\n    return a + b if a == 2 else None\n"}), pristine=False
    )
    async with asyncio.TaskGroup() as both:
        served = both.create_task(subject.serve_candidate(wall_s=10))
        judged = both.create_task(judge.judge(["test_calc.py"], functions={"calc": ["add"]}, wall_s=5))
    await judge.close()
    await subject.close()
    run = judged.result()
    assert {record.test_id: record.status for record in run.records} == {
        "test_calc.py::test_a": "passed",
        "test_calc.py::test_b": "failed",
    }
    assert served.result().exit_status == 0


async def test_a_closed_session_refuses_and_closing_twice_is_no_error(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    await session.close()
    await session.close()
    with pytest.raises(SandboxError):
        await session.read_file("x")
    other = await sandbox.open("t", LIMITS)
    assert await other.snapshot() == Changes()
    await other.close()


async def test_sessions_run_at_the_same_time(sandbox: Sandbox) -> None:
    sessions = [await sandbox.open(f"s{number}", LIMITS) for number in range(8)]
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(session.run(["sleep", "0.5"], wall_s=5))
    assert time.monotonic() - started_s < 2.5
    for session in sessions:
        await session.close()
