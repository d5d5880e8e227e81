"""One child process of the local stack: started, watched until it is healthy, ended for sure.

A child gets a session of its own, so that Ctrl-C reaches the supervisor alone and the order of
stopping is ours; and the kernel ends it should the supervisor be killed. Its output goes to a log
file, whose last lines are shown when it fails.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import PracticumError

STOP_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 15
_LAUNCHER = str(Path(__file__).with_name("launch.py"))


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """`command` in a form that the kernel ends when this process dies, however it dies."""
    return [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *command]


class ProcessFailed(PracticumError):
    """A process of the stack ended or never became healthy; the message holds its last log lines."""

    code = "process_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start and how to know that it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    start_timeout_s: float = 120.0


class ManagedProcess:
    """A running child; `stop` ends it and everything in its session."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start and wait until ready; `ProcessFailed` where it ends first or takes too long."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *ends_with_parent(self.spec.command),
                env=dict(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                while not await self.spec.is_ready():
                    if self._process.returncode is not None:
                        raise ProcessFailed(self._failure(f"ended with status {self._process.returncode}"))
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            await self.stop()
            raise ProcessFailed(
                self._failure(f"was not ready after {self.spec.start_timeout_s:.0f} s")
            ) from error

    async def wait(self) -> int:
        """Wait until the child ends; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the child to end, then end its whole session; stopping twice is no error."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
        # The session's id is the child's pid: whatever it left behind ends here.
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _failure(self, what: str) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"{self.spec.name} {what}; last lines of {self.log_path}:\n" + "\n".join(lines)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
