"""The sandbox protocol: what every backend gives, and the values that pass through it.

A backend makes sessions. A session holds one workspace, has no network and no way to the host, and ends
with everything that runs in it. Platform failures are `SandboxError`; what the policy got wrong is
`FileRefused` or data in the result. Paths are resolved inside the sandbox, never by the service.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.errors import PracticumError
from services.reward.sandbox.limits import SandboxLimits


class FileRefused(PracticumError):
    """A file operation was refused inside the sandbox; the message is for the policy."""

    code = "file_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a workspace."""

    path: str  # relative, forward slashes
    content: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs from the pristine workspace."""

    changed: tuple[File, ...] = ()
    removed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # paths that are no plain files, with the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command, or a run of tests, ended."""

    exit_status: int | None  # None = ended by a signal
    limit_hit: str  # wall, cpu, memory, processes, file_size; empty for none
    seconds: float
    output: str  # head and tail; the middle may be cut
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRecord:
    """What the test runner said about one test, or about a file it could not collect."""

    __test__ = False  # not a test class, whatever its name says to pytest

    test_id: str
    status: str  # passed, failed, error or skipped
    message: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """A run of test files."""

    __test__ = False  # not a test class, whatever its name says to pytest

    ran: Ran
    num_files: int
    collected: tuple[str, ...]
    records: tuple[TestRecord, ...]
    ended: bool | None  # the runner's own verdict, said last; None = it never got there
    unsupported: str = ""  # why the tests cannot run apart from the code under test


class Session(Protocol):
    """One sandbox with a workspace. Calls run one at a time."""

    @property
    def session_id(self) -> str:
        """The caller's id."""
        ...

    async def lay_out(self, files: Sequence[File], *, pristine: bool) -> None:
        """Writes files of the task; pristine ones are the base of `snapshot`."""
        ...

    async def read_file(self, path: str) -> str:
        """The text of a file. Raises `FileRefused`."""
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Creates or replaces a file. Raises `FileRefused`."""
        ...

    async def edit_file(self, path: str, old: bytes, new: bytes) -> None:
        """Replaces the only occurrence of `old`. Raises `FileRefused`."""
        ...

    async def list_files(self) -> tuple[str, ...]:
        """Paths, sorted; a long list is cut. Raises `FileRefused`."""
        ...

    async def run(self, argv: Sequence[str], *, wall_s: float) -> Ran:
        """Runs a command in the workspace; whatever it leaves running is ended."""
        ...

    async def run_python(self, code: str, *, wall_s: float) -> Ran:
        """Runs code in a warm interpreter; the same limits as a command."""
        ...

    async def run_tests(self, *, wall_s: float) -> TestRun:
        """Runs the workspace's own test files."""
        ...

    async def judge(
        self, paths: Sequence[str], *, functions: Mapping[str, Sequence[str]], wall_s: float
    ) -> TestRun:
        """Runs the named test files. Modules in `functions` are called across the session's link."""
        ...

    async def serve_candidate(self, *, wall_s: float) -> Ran:
        """Answers calls on the session's link from the workspace's modules until the other end closes."""
        ...

    async def snapshot(self) -> Changes:
        """What changed against the pristine files."""
        ...

    async def close(self) -> None:
        """Ends everything; when it returns, no process and no file of the session is left."""
        ...


class Sandbox(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """The word that grades and logs carry."""
        ...

    async def start(self) -> None:
        """Makes the backend ready. Raises `SandboxError` with what to change on this machine."""
        ...

    async def open(
        self, session_id: str, limits: SandboxLimits, *, link: socket.socket | None = None
    ) -> Session:
        """A fresh, empty session. `link` joins it with another one; the caller closes its own copy."""
        ...

    def capabilities(self) -> Mapping[str, str]:
        """What the backend enforces and how, for operators."""
        ...

    async def close(self) -> None:
        """Ends every session."""
        ...
