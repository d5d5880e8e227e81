"""pytest, started once in the fork server, run in a fork of it.

Parsing options, importing plugins and collecting fixtures take longer than a small test file; all of that
is done before the fork. The configuration is ours (`-c /dev/null`, fixed root, no plugin from the
workspace or the environment); only the test files differ from run to run. Reports are one short record a
test: no traceback is rendered.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.config import Config, _prepareconfig
from _pytest.main import Session
from _pytest.reports import CollectReport, TestReport

from .files import WORK

Record = dict[str, Any]
MESSAGE_CHARS = 300

# What no run needs; each costs time at the start or in every test.
_NEVER = (
    "cacheprovider",
    "doctest",
    "faulthandler",
    "junitxml",
    "legacypath",
    "pastebin",
    "setuponly",
    "setupplan",
    "stepwise",
    "terminal",
    "threadexception",
    "unraisableexception",
)

# What tests without built-in fixtures do not need either.
_NOT_WHEN_LEAN = (
    "capture",
    "debugging",
    "logging",
    "monkeypatch",
    "recwarn",
    "tmpdir",
    "unittest",
    "warnings",
)


class Recorder:
    """Turns pytest's reports into records; `emit` is set in the fork."""

    def __init__(self) -> None:
        self.emit: Callable[[Record], None] = lambda record: None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> TestReport:
        """A report whose text is one line; pytest's own would render a traceback nobody reads."""
        outcome: Any = "passed"
        message = None
        if call.excinfo is not None:
            outcome = "skipped" if isinstance(call.excinfo.value, pytest.skip.Exception) else "failed"
            message = explain(call.excinfo.value)
        when: Any = call.when
        timing = (call.duration, call.start, call.stop)
        return TestReport(item.nodeid, item.location, {}, outcome, message, when, (), *timing)

    def pytest_collectreport(self, report: CollectReport) -> None:
        """A file that could not be collected, or that skipped itself, is a record of its own."""
        if report.passed:
            return
        lines = str(report.longrepr).splitlines() or [""]
        causes = [line[1:].strip() for line in lines if line.startswith("E ")]
        message = (causes or lines)[-1][:MESSAGE_CHARS]
        self._record(report.nodeid, "skipped" if report.skipped else "error", message, 0.0)

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """One record per test: of the call, or of the set-up or tear-down that kept it from passing."""
        message = str(report.longrepr or "")
        if report.when == "call":
            expected_failure = hasattr(report, "wasxfail")
            status = "skipped" if expected_failure else report.outcome
            self._record(report.nodeid, status, message, report.duration)
        elif report.failed:
            self._record(report.nodeid, "error", message, report.duration)
        elif report.skipped:
            self._record(report.nodeid, "skipped", message, report.duration)

    def _record(self, test_id: str, status: str, message: str, seconds: float) -> None:
        self.emit({"id": test_id, "status": status, "message": message, "seconds": round(seconds, 4)})


def explain(error: BaseException) -> str:
    """One line about a failure: `assert 3 == 0`, or `ValueError: no such day`."""
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 — the policy's exception may have any __str__
        text = f"its text cannot be shown ({type(broken).__name__})"
    first = text.split("\n", 1)[0][:MESSAGE_CHARS]
    if isinstance(error, AssertionError | pytest.fail.Exception):
        return first or _last_line(error) or type(error).__name__
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[0].line or "")[:MESSAGE_CHARS] if frames else ""


class WarmPytest:
    """A started pytest session that has collected nothing yet; good for one run.

    A lean one has no built-in fixtures but `request`, and is faster.
    """

    def __init__(self, *, lean: bool = False) -> None:
        self._recorder = Recorder()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.dont_write_bytecode = True
        without = [*_NEVER, *_NOT_WHEN_LEAN] if lean else [*_NEVER]
        options = ["-c", os.devnull, f"--rootdir={WORK}", *(f"-pno:{name}" for name in without), WORK]
        if not lean:
            options.insert(0, "-s")  # an option of the capture plugin
        os.chdir(WORK)
        self._config: Config = _prepareconfig(options, [self._recorder])
        self._config._do_configure()
        self._session = Session.from_config(self._config)
        self._config.hook.pytest_sessionstart(session=self._session)

    def end(self) -> None:
        """Takes pytest's import hook out again."""
        self._config._ensure_unconfigure()

    def run(self, paths: Sequence[str], emit: Callable[[Record], None], *, rewrite: bool = True) -> bool:
        """Runs the test files (relative to the workspace) in this process; True where all passed.

        Emits a record per test, `{"collected": [ids]}` before the first, and `{"end": passed}` last.
        Rewriting assertions gives messages with values and costs more than a small test; without it a
        message shows the line of the assertion.
        """
        self._recorder.emit = emit
        if not rewrite:
            sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, AssertionRewritingHook)]
        os.chdir(WORK)
        sys.path.insert(0, WORK)
        session, hook = self._session, self._config.hook
        self._config.args = [f"{WORK}/{path}" for path in paths]
        try:
            hook.pytest_collection(session=session)
            emit({"collected": [item.nodeid for item in session.items]})
            hook.pytest_runtestloop(session=session)
        except (session.Failed, session.Interrupted, pytest.UsageError):
            pass  # broken collection: its records have been emitted, and the tests stay without one
        passed = session.testsfailed == 0 and session.testscollected > 0
        emit({"end": passed})
        return passed


def warm_up() -> None:
    """Runs a small test file once, so that forks find modules imported and caches filled."""
    test_file = Path(WORK, "test_warm_up.py")
    test_file.write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_numbers(n):\n"
        "    assert [n] == [1]\n\n\n"
        "def test_raises():\n    with pytest.raises(ValueError):\n        int('x')\n"
    )
    path_before = list(sys.path)
    for lean in (False, True):
        first = WarmPytest(lean=lean)
        first.run([test_file.name], lambda record: None)
        first.end()
        sys.path[:] = path_before
        sys.modules.pop(test_file.stem, None)
    sys.path_importer_cache.pop(WORK, None)
    test_file.unlink()
