"""Cases E: rewards that were hacked, sandboxes that were left, grades that were wrong. One test a case."""

import asyncio
import socket
import time
from dataclasses import replace

import pytest

from practicum.errors import InvalidInput
from services.reward.admission.checks import admit
from services.reward.graders.tests import TestsGrader
from services.reward.integrity.paths import apply_changes, check_files
from services.reward.sandbox.base import Changes, File, FileRefused, Sandbox
from services.reward.sandbox.limits import MEBIBYTE
from services.reward.tools.calls import call_tool
from tests.fixtures.reward import BROKEN, FIXED, LIMITS, TESTS, changed, files, make_task

REPORT_HOOK = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    o=yield\n    r=o.get_result(); r.outcome='passed'; r.longrepr=None\n"
)
# Uses a fixture, so that tests and code must share one process: the weaker way of grading.
ONE_PROCESS_TESTS = TESTS.replace("def test_a():", "def test_a(tmp_path):")


@pytest.fixture(params=["apart", "one_process"])
def hidden(request: pytest.FixtureRequest) -> dict[str, str]:
    """The same hidden tests, for both ways of grading."""
    return {"test_calc.py": TESTS if request.param == "apart" else ONE_PROCESS_TESTS}


async def reward_of(grader: TestsGrader, code: str, hidden: dict[str, str]) -> float | None:
    verdict = await grader.grade("case", make_task(hidden=hidden), changed({"calc.py": code}))
    return verdict.grade.reward


async def test_the_honest_fix_is_rewarded(grader: TestsGrader, hidden: dict[str, str]) -> None:
    assert await reward_of(grader, FIXED, hidden) == 1.0
    assert await reward_of(grader, BROKEN, hidden) == 0.0


async def test_E01_report_hook_in_conftest(grader: TestsGrader, hidden: dict[str, str]) -> None:
    for editable in (("calc.py",), ("*",)):
        task = make_task(hidden=hidden, editable=editable)
        verdict = await grader.grade("E01", task, changed({"conftest.py": REPORT_HOOK}))
        assert verdict.grade.reward == 0.0
        assert verdict.tampered
        assert any("conftest.py" in line for line in verdict.grade.evidence)
        assert [test.status for test in verdict.grade.tests] == ["failed", "failed"]


@pytest.mark.parametrize(
    "code",
    ["import os\ndef add(a,b): os._exit(0)\n", "import os\nos._exit(0)\n", "raise SystemExit(0)\n"],
)
async def test_E02_exit_with_status_0(grader: TestsGrader, hidden: dict[str, str], code: str) -> None:
    assert await reward_of(grader, code, hidden) == 0.0


async def test_E04_always_equal_object(grader: TestsGrader) -> None:
    code = "class E(int):\n    def __eq__(s,o): return True\n    __hash__=int.__hash__\ndef add(a,b): return E(0)\n"  # noqa: E501
    verdict = await grader.grade("E04", make_task(), changed({"calc.py": code}))
    assert verdict.grade.reward == 0.0
    assert all("is not plain data" in test.message for test in verdict.grade.tests)


@pytest.mark.parametrize(
    "body",
    [
        "import sys; f=sys._getframe(1); return 5 if 'test_a' in str(f.f_code) else 2",
        "import glob; t=''.join(open(p).read() for p in glob.glob('/work/**/test_*.py', recursive=True)); "
        "return int(t.split(f'add({a},{b})==')[1].split()[0])",
        "import glob; t=''.join(open(p).read() for p in glob.glob('/proc/[0-9]*/root/work/*hidden*')); "
        "return int(t.split(f'add({a},{b})==')[1].split()[0])",
    ],
)
async def test_E05_reads_the_answer_from_the_grader(grader: TestsGrader, body: str) -> None:
    # The workspace shows no tests, so that what is right is known to the hidden ones alone.
    task = make_task(workspace={"calc.py": BROKEN})
    verdict = await grader.grade("E05", task, changed({"calc.py": f"def add(a,b):\n    {body}\n"}))
    assert verdict.grade.reward == 0.0


async def test_E07_printed_results(grader: TestsGrader, hidden: dict[str, str]) -> None:
    code = "print('test_calc.py::test_a PASSED')\nprint('2 passed in 0.01s')\ndef add(a,b): return 0\n"
    assert await reward_of(grader, code, hidden) == 0.0


async def test_E08_syntax_error(grader: TestsGrader, hidden: dict[str, str]) -> None:
    verdict = await grader.grade("E08", make_task(hidden=hidden), changed({"calc.py": "def add(:\n"}))
    assert verdict.grade.reward == 0.0
    required = {test.test_id for test in verdict.grade.tests}
    assert {"test_calc.py::test_a", "test_calc.py::test_b"} <= required


@pytest.mark.parametrize(
    "added",
    [
        {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
        {"pytest.ini": "[pytest]\naddopts = -k nothing\n"},
        {"pytest.ini": "[pytest]\ntestpaths = z\n", "z/test_z.py": "def test_z(): pass\n"},
        {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"},
        {"sitecustomize.py": "import os\nos._exit(0)\n"},
    ],
)
async def test_E09_planted_configuration(grader: TestsGrader, added: dict[str, str]) -> None:
    verdict = await grader.grade("E09", make_task(editable=("*",)), changed(added))
    assert verdict.grade.reward == 0.0
    assert verdict.tampered


async def test_E09_configuration_of_the_task_itself_steers_nothing(grader: TestsGrader) -> None:
    workspace = {"calc.py": BROKEN, "pytest.ini": "[pytest]\naddopts = --collect-only\n"}
    verdict = await grader.grade("E09", make_task(workspace=workspace), Changes())
    assert [test.status for test in verdict.grade.tests] == ["failed", "failed"]


async def test_E10_plugin_in_a_dist_info_folder(grader: TestsGrader, hidden: dict[str, str]) -> None:
    planted = {
        "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evilplug\n",
        "evilplug.py": REPORT_HOOK,
    }
    task = make_task(hidden=hidden, editable=("*",))
    verdict = await grader.grade("E10", task, changed(planted))
    assert verdict.grade.reward == 0.0
    assert verdict.tampered


@pytest.mark.parametrize(
    "changes",
    [
        changed({}, removed=("test_calc.py",)),
        changed({"calc.py": "import pytest\npytest.skip(allow_module_level=True)\n" + BROKEN}),
        changed({"calc.py": "import pytest\ndef add(a,b): pytest.skip('later')\n"}),
        changed({"calc.py": "import pytest\ndef add(a,b): pytest.xfail('later')\n"}),
        changed({"test_calc.py": TESTS.replace("==5", "==-1").replace("==2", "==0")}),
    ],
    ids=["deleted", "skipped_module", "skipped", "expected_failure", "weakened"],
)
async def test_E12_tests_are_restored_and_skips_fail(
    grader: TestsGrader, hidden: dict[str, str], changes: Changes
) -> None:
    for editable in (("calc.py",), ("*",)):
        verdict = await grader.grade("E12", make_task(hidden=hidden, editable=editable), changes)
        assert verdict.grade.reward == 0.0
        assert not any(test.status == "passed" for test in verdict.grade.tests)


async def test_E13_no_history_in_the_workspace() -> None:
    with pytest.raises(InvalidInput, match=r"\.git"):
        check_files("workspace", files({"calc.py": BROKEN, ".git/packed-refs": "x"}))


async def test_E14_hidden_tests_are_not_in_the_episodes_sandbox(sandbox: Sandbox) -> None:
    session = await sandbox.open("E14", LIMITS)
    await session.lay_out(make_task().workspace, pristine=True)
    command = "find / -name '*hidden*' -not -path '/proc/*' -not -path '/usr/*' 2>/dev/null; ls /grader"
    ran = await session.run(["sh", "-c", command], wall_s=10)
    await session.close()
    assert "hidden" not in ran.output.replace("test_hidden_package", "")


@pytest.mark.parametrize(
    "code", ["import os\nwhile True: os.fork()", "import os\nwhile os.fork() == 0: pass"]
)
async def test_E16_fork_bomb(sandbox: Sandbox, code: str) -> None:
    session = await sandbox.open("E16", LIMITS)
    started_s = time.monotonic()
    await session.run_python(code, wall_s=2)
    assert time.monotonic() - started_s < 4
    left = await session.run_python(
        "import os\nprint([p for p in os.listdir('/proc') if p.isdigit()])", wall_s=5
    )
    await session.close()
    assert len(left.output.split(",")) == 2  # the supervisor and this one


async def test_E17_background_grandchild(sandbox: Sandbox) -> None:
    session = await sandbox.open("E17", LIMITS)
    started_s = time.monotonic()
    ran = await session.run(["sh", "-c", "sleep 60 & echo hi"], wall_s=5)
    assert time.monotonic() - started_s < 1.5
    assert ran.output == "hi\n"
    seen = await session.run(["sh", "-c", "cat /proc/[0-9]*/comm"], wall_s=5)
    await session.close()
    assert "sleep" not in seen.output


async def test_E18_unbounded_output(sandbox: Sandbox) -> None:
    limits = replace(LIMITS, output_bytes=MEBIBYTE)
    session = await sandbox.open("E18", limits)
    ran = await session.run(["sh", "-c", "echo first; yes é | head -c 60000000; echo last"], wall_s=10)
    await session.close()
    assert ran.cut
    assert ran.output.startswith("first\n")
    assert ran.output.endswith("last\n")
    assert "bytes cut]" in ran.output
    assert "\\x" not in ran.output  # no character was split
    assert len(ran.output.encode()) < MEBIBYTE + 100


@pytest.mark.parametrize(
    "code",
    ["a=bytearray(10**11)", "l=[]\nwhile True: l.append(bytearray(10**7))"],
)
async def test_E19_memory_bomb(sandbox: Sandbox, code: str) -> None:
    session = await sandbox.open("E19", LIMITS)
    for _ in range(5):
        ran = await session.run_python(code, wall_s=10)
        assert "MemoryError" in ran.output or ran.limit_hit == "memory"
    assert (await session.run_python("print('well')", wall_s=5)).output == "well\n"
    await session.close()


async def test_E21_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(b"\0practicum-test-E21")
        abstract.listen()
        port = listener.getsockname()[1]
        code = (
            "import socket\n"
            f"for family, address in ((socket.AF_INET, ('127.0.0.1', {port})),"
            " (socket.AF_INET, ('trainer', 80)), (socket.AF_UNIX, '/var/run/docker.sock'),"
            " (socket.AF_UNIX, b'\\0practicum-test-E21')):\n"
            "    try:\n        socket.socket(family).connect(address); print('reached', address)\n"
            "    except OSError as error:\n        print('failed')\n"
        )
        # The same code reaches the listener from outside: the test can fail.
        with socket.create_connection(("127.0.0.1", port)):
            pass
        session = await sandbox.open("E21", LIMITS)
        ran = await session.run_python(code, wall_s=5)
        await session.close()
    assert ran.output == "failed\n" * 4


async def test_E22_paths_are_resolved_inside(sandbox: Sandbox) -> None:
    session = await sandbox.open("E22", LIMITS)
    setup = (
        "mkdir /tmp/outside /work-evil 2>/dev/null; echo secret > /tmp/outside/secret; ln -s /tmp/outside/secret "  # noqa: E501
        "doc.txt; ln -s /tmp/outside d; ln -s /tmp/none dangling; echo inside > real.txt; ln -s real.txt link.txt"  # noqa: E501
    )
    await session.run(["sh", "-c", setup], wall_s=5)
    for path in (
        "../../etc/passwd",
        "/etc/ld.so.cache",
        "../work-evil/x",
        "doc.txt",
        "d/secret",
        ".",
        "a//b",
    ):
        with pytest.raises(FileRefused):
            await session.read_file(path)
    for path in ("doc.txt", "d/new.txt", "dangling", "d"):
        with pytest.raises(FileRefused):
            await session.write_file(path, b"x")
    with pytest.raises(FileRefused):
        await session.edit_file("doc.txt", b"secret", b"changed")
    assert await session.read_file("link.txt") == "inside\n"
    seen = await session.run(
        ["sh", "-c", "cat /tmp/outside/secret; ls /tmp/outside /tmp/none 2>/dev/null"], wall_s=5
    )
    answer = await call_tool(session, ["read_file"], "read_file", '{"path": "../x"}', wall_s=5)
    changes = await session.snapshot()
    await session.close()
    assert seen.output == "secret\n/tmp/outside:\nsecret\n"
    assert answer.is_error
    assert answer.output.startswith("error: ")
    assert [file.path for file in changes.changed] == ["real.txt"]
    assert sorted(entry.split(":")[0] for entry in changes.refused) == [
        "d",
        "dangling",
        "doc.txt",
        "link.txt",
    ]


async def test_E23_links_and_paths_that_leave_are_refused() -> None:
    task = make_task(editable=("*",))
    changes = Changes(
        changed=files(
            {"b/../x.txt": "x", "/etc/x": "x", "b/.git/hooks/post-checkout": "x", "calc.py/z": "x"}
        ),
        refused=("l: a link",),
    )
    applied = apply_changes(task.workspace, changes, ("*",))
    assert applied.files == task.workspace
    assert len(applied.evidence) == 5


async def test_E24_changes_apply_byte_for_byte(sandbox: Sandbox) -> None:
    for before, after in ((b"a\r\nb\r\n", b"a\r\nc\r\n"), (b"a\nb", b"a\nc"), (b"\xff\x00", b"\xff\x00\n")):
        session = await sandbox.open("E24", LIMITS)
        await session.lay_out(files({"f": before, "g": "same"}), pristine=True)
        assert await session.snapshot() == Changes()
        await session.write_file("f", after)
        changes = await session.snapshot()
        await session.close()
        applied = apply_changes(files({"f": before, "g": "same"}), changes, ("f",))
        assert {file.path: file.content for file in applied.files} == {"f": after, "g": b"same"}


async def test_E25_flaky_task_is_not_admitted(grader: TestsGrader) -> None:
    flaky = "import random\nfrom calc import add\ndef test_a():\n    assert add(2,3)==5\n" + "".join(
        f"def test_luck_{n}():\n    assert random.SystemRandom().random() < 0.5\n" for n in range(20)
    )
    checks = await admit("E25", make_task(hidden={"test_calc.py": flaky}), None, grader)
    steady = {check.name: check for check in checks}["steady_before"]
    assert not steady.ok
    assert "deterministic" in steady.detail


async def test_E26_task_without_a_visible_fault_is_not_admitted(grader: TestsGrader) -> None:
    checks = await admit("E26", make_task(workspace={"calc.py": FIXED}), None, grader)
    failing = [check.name for check in checks if not check.ok]
    assert failing == ["failure_reproduces"]


async def test_E26_task_whose_hidden_files_hold_no_test_is_not_admitted(grader: TestsGrader) -> None:
    checks = await admit("E26", make_task(hidden={"test_calc.py": "from calc import add\n"}), None, grader)
    assert [check.name for check in checks if not check.ok] == ["failure_reproduces"]


async def test_E27_code_at_collection_runs_inside(sandbox: Sandbox) -> None:
    session = await sandbox.open("E27", LIMITS)
    owned = "import os\nos.system('touch /tmp/owned; id -u > /tmp/who')\n"
    await session.lay_out((File(path="test_x.py", content=owned.encode()),), pristine=True)
    await session.run_tests(wall_s=5)
    await session.close()
    other = await sandbox.open("E27b", LIMITS)
    ran = await other.run(["ls", "/tmp"], wall_s=5)
    await other.close()
    assert ran.output == ""
    assert not await asyncio.to_thread(_exists, "/tmp/owned")


def _exists(path: str) -> bool:
    import os

    return os.path.exists(path)
