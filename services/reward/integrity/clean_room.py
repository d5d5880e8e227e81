"""Runs hidden tests on a candidate workspace in clean sandboxes.

Apart (the rule): one sandbox holds the tests and no code of the policy, another the candidate workspace and
no test; they are joined by a socket on which plain data crosses. In one process (where the tests need it):
one sandbox with both. Every sandbox is fresh and is gone when the run ends.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.errors import SandboxError
from practicum.telemetry.logs import get_logger
from services.reward.integrity.paths import is_editable
from services.reward.integrity.separation import Separation
from services.reward.sandbox.base import File, Ran, Sandbox, Session, TestRun
from services.reward.sandbox.limits import SandboxLimits

APART = "apart"
ONE_PROCESS = "one_process"
_END_S = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRun:
    """The tests' run, how it was made, and how the process under test ended (None in one process)."""

    tests: TestRun
    candidate: Ran | None
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRoom:
    """Makes clean runs in a backend, so many at a time."""

    sandbox: Sandbox
    slots: asyncio.Semaphore

    async def run(
        self,
        run_id: str,
        candidate: Sequence[File],
        tests: Sequence[File],
        separation: Separation,
        editable: Sequence[str],
        limits: SandboxLimits,
        *,
        wall_s: float,
    ) -> CleanRun:
        """Runs the test files among `tests`. Raises `SandboxError` where the platform fails."""
        hidden = {file.path for file in tests}
        under_test = [file for file in candidate if file.path not in hidden]
        async with self.slots:
            if separation.functions:
                rest = [file for file in under_test if not _is_proxied(file, editable)]
                run = await self._apart(
                    run_id, under_test, [*rest, *tests], tests, separation, limits, wall_s
                )
                if not run.tests.unsupported:
                    return run
            return await self._one_process(run_id, [*under_test, *tests], tests, limits, wall_s)

    async def _apart(
        self,
        run_id: str,
        candidate: Sequence[File],
        with_tests: Sequence[File],
        tests: Sequence[File],
        separation: Separation,
        limits: SandboxLimits,
        wall_s: float,
    ) -> CleanRun:
        tests_end, candidate_end = socket.socketpair()
        with tests_end, candidate_end:
            judge = await self.sandbox.open(f"{run_id}/tests", limits, link=tests_end)
            try:
                subject = await self.sandbox.open(f"{run_id}/candidate", limits, link=candidate_end)
            except BaseException:
                await _close(judge)
                raise
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(judge.lay_out(with_tests, pristine=False))
                both.create_task(subject.lay_out(candidate, pristine=False))
            async with asyncio.TaskGroup() as both:
                serving = both.create_task(subject.serve_candidate(wall_s=wall_s + _END_S))
                run = await judge.judge(runnable_paths(tests), functions=separation.functions, wall_s=wall_s)
                # it ends with the link, unless it hangs: then it is of no more interest
                await asyncio.wait({serving}, timeout=_END_S / 4)
                serving.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            async with asyncio.TaskGroup() as both:
                both.create_task(_close(judge))
                both.create_task(_close(subject))
        served = None if serving.cancelled() else serving.result()
        return CleanRun(tests=run, candidate=served, mode=APART)

    async def _one_process(
        self, run_id: str, files: Sequence[File], tests: Sequence[File], limits: SandboxLimits, wall_s: float
    ) -> CleanRun:
        session = await self.sandbox.open(f"{run_id}/both", limits)
        try:
            await session.lay_out(files, pristine=False)
            run = await session.judge(runnable_paths(tests), functions={}, wall_s=wall_s)
        finally:
            await _close(session)
        return CleanRun(tests=run, candidate=None, mode=ONE_PROCESS)


async def _close(session: Session) -> None:
    """Ends a session whose work is done; that it does not end well takes nothing from the verdict."""
    try:
        await session.close()
    except SandboxError as error:
        _log.error("clean_room.close_failed", session_id=session.session_id, error=str(error))


def runnable_paths(files: Sequence[File]) -> list[str]:
    """The files that pytest collects: `test_*.py` and `*_test.py`."""
    names = [(file.path, file.path.split("/")[-1]) for file in files]
    return [
        path
        for path, name in names
        if (name.startswith("test_") and name.endswith(".py")) or name.endswith("_test.py")
    ]


def _is_proxied(file: File, editable: Sequence[str]) -> bool:
    return file.path.endswith(".py") and is_editable(file.path, editable)
