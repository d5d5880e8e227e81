"""Tool calls: arguments, wording, and what the policy is told."""

import json

import pytest

from services.reward.sandbox.base import Ran, Sandbox, TestRecord, TestRun
from services.reward.sandbox.inside.processes import HeadAndTail
from services.reward.tools.calls import (
    BadCall,
    ToolResult,
    bash_answer,
    call_tool,
    parse_call,
    run_tests_answer,
)
from services.reward.tools.schemas import TOOLS, ToolName
from tests.fixtures.reward import BROKEN, LIMITS, TESTS, files

ALL = [tool.name.value for tool in TOOLS]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rm", "{}", "no tool rm"),
        ("bash", "{}", "bash needs the text argument command"),
        ("bash", '{"command": 3}', "bash needs the text argument command"),
        ("read_file", '{"path": "x", "line": "1"}', "read_file has no argument line"),
        ("read_file", "{", "no JSON object"),
        ("read_file", "[]", "no JSON object"),
        ("read_file", "[" * 100_000, "no JSON object"),
        ("write_file", '{"path": "x", "content": "\\ud800"}', "half a character"),
        ("read_file", '{"path": "' + "x" * 1_000_001 + '"}', "too long"),
    ],
)
def test_bad_calls_say_what_to_write(name: str, arguments: str, message: str) -> None:
    with pytest.raises(BadCall, match=message):
        parse_call(ALL, name, arguments)


def test_a_tool_that_the_task_does_not_allow_is_unknown() -> None:
    with pytest.raises(BadCall, match="no tool bash; there are finish, read_file"):
        parse_call(["read_file", "finish"], "bash", '{"command": "ls"}')


def test_empty_arguments_are_an_empty_object() -> None:
    assert parse_call(ALL, "finish", "") == (ToolName.FINISH, {})


def ran(**changes: object) -> Ran:
    values = {"exit_status": 0, "limit_hit": "", "seconds": 0.1, "output": "", "cut": False}
    return Ran(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (ran(output="hi\n"), ToolResult(output="hi")),
        (ran(output="no\n", exit_status=2), ToolResult(output="no\n[exit status 2]", is_error=True)),
        (
            ran(exit_status=None, limit_hit="wall"),
            ToolResult(output="[ended after 5 s]", is_error=True, limit_hit="wall"),
        ),
        (ran(exit_status=None), ToolResult(output="[ended by a signal]", is_error=True)),
        (
            ran(exit_status=1, output="MemoryError"),
            ToolResult(
                output="MemoryError\n[limit: memory]\n[exit status 1]", is_error=True, limit_hit="memory"
            ),
        ),
    ],
)
def test_bash_answers(result: Ran, answer: ToolResult) -> None:
    assert bash_answer(result, 5) == answer


def record(name: str, status: str, message: str = "") -> TestRecord:
    return TestRecord(test_id=f"test_calc.py::{name}", status=status, message=message, seconds=0.0)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([record("test_a", "passed"), record("test_b", "passed")], "2 passed"),
        (
            [record("test_clamp_low", "failed", "assert 3 == 0"), record("test_b", "passed")],
            "1 failed, 1 passed\ntest_clamp_low: assert 3 == 0",
        ),
        ([record("test_a", "error", "SyntaxError")], "1 error\ntest_a: SyntaxError"),
        ([], "no tests"),
    ],
)
def test_test_answers(records: list[TestRecord], text: str) -> None:
    run = TestRun(ran=ran(), num_files=1, collected=(), records=tuple(records), ended=False)
    assert run_tests_answer(run, 5).output == text


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            TestRun(ran=ran(limit_hit="wall"), num_files=1, collected=(), records=(), ended=None),
            "longer than 5 s",
        ),
        (
            TestRun(ran=ran(limit_hit="memory"), num_files=1, collected=(), records=(), ended=None),
            "limit memory",
        ),
        (TestRun(ran=ran(), num_files=0, collected=(), records=(), ended=None), "no test files"),
        (TestRun(ran=ran(), num_files=1, collected=(), records=(), ended=None), "ended early"),
    ],
)
def test_tests_that_did_not_end_are_errors(run: TestRun, text: str) -> None:
    answer = run_tests_answer(run, 5)
    assert answer.is_error
    assert text in answer.output


async def test_the_demos_episode(sandbox: Sandbox) -> None:
    session = await sandbox.open("s", LIMITS)
    await session.lay_out(files({"calc.py": BROKEN, "test_calc.py": TESTS}), pristine=True)

    async def call(name: str, **arguments: str) -> ToolResult:
        return await call_tool(session, ALL, name, json.dumps(arguments), wall_s=5)

    assert (await call("list_files")).output == "calc.py\ntest_calc.py"
    assert (await call("read_file", path="calc.py")).output == BROKEN
    assert (await call("run_tests")).output == "2 failed\ntest_a: assert -1 == 5\ntest_b: assert 0 == 2"
    wrong = await call("edit_file", path="calc.py", old="a*b", new="a+b")
    assert (wrong.output, wrong.is_error) == ("error: old text not found in calc.py", True)
    assert (await call("edit_file", path="calc.py", old="a-b", new="a+b")).output == "edited calc.py"
    assert (await call("run_tests")).output == "2 passed"
    assert (await call("write_file", path="notes.txt", content="é")).output == "wrote notes.txt"
    assert (await call("bash", command="cat notes.txt")).output == "é"
    finish = await call("finish")
    assert (finish.output, finish.ends_episode) == ("done", True)
    await call("write_file", path="calc.py", content="def add(:\n")
    broken = await call("run_tests")
    assert broken.output.startswith("1 error\ntest_calc.py: ")
    assert "SyntaxError" in broken.output
    await session.close()


def test_output_keeps_head_and_tail_and_splits_no_character() -> None:
    kept = HeadAndTail(20)
    for _ in range(1000):
        kept.add("é".encode())
    text = kept.text()
    assert text == "ééééé\n[1980 bytes cut]\nééééé"
    odd = HeadAndTail(21)
    odd.add(("x" + "é" * 1000).encode())
    assert "\\x" not in odd.text()


def test_short_output_is_kept_whole_and_invalid_bytes_are_shown() -> None:
    kept = HeadAndTail(20)
    kept.add(b"ok \xff\xc3")
    assert kept.text() == "ok \\xff\\xc3"
