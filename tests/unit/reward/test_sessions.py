"""Episodes' sessions: idempotent, bounded, ended in time."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry

from practicum.errors import Conflict, InvalidInput, NotFound, Overloaded
from services.reward.metrics import RewardMetrics
from services.reward.sandbox.base import Sandbox
from services.reward.sessions.registry import OpenSpec, SessionRegistry
from tests.fixtures.reward import LIMITS, files

SPEC = OpenSpec(
    task_id="t", files=files({"a": "0"}), tools=("bash", "write_file", "read_file"), limits=LIMITS
)


class HeldClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
async def sessions(sandbox: Sandbox, clock: HeldClock) -> AsyncIterator[SessionRegistry]:
    gauge = RewardMetrics(CollectorRegistry()).open_sessions
    made = SessionRegistry(sandbox, clock, max_sessions=2, idle_timeout_s=30, gauge=gauge)
    yield made
    await made.close_all()


async def bash(sessions: SessionRegistry, session_id: str, call_id: str, command: str) -> str:
    return (await sessions.call(session_id, call_id, "bash", f'{{"command": "{command}"}}')).output


async def test_opening_twice_gives_the_same_session(sessions: SessionRegistry) -> None:
    await asyncio.gather(sessions.open("s", SPEC), sessions.open("s", SPEC))
    await bash(sessions, "s", "1", "echo x > a")
    await sessions.open("s", SPEC)
    assert await bash(sessions, "s", "2", "cat a") == "x"
    assert sessions.num_open == 1
    with pytest.raises(Conflict):
        await sessions.open("s", replace(SPEC, task_id="other"))


async def test_a_repeated_call_is_answered_and_not_run_again(sessions: SessionRegistry) -> None:
    await sessions.open("s", SPEC)
    both = await asyncio.gather(*(bash(sessions, "s", "1", "echo x >> a; cat a") for _ in range(2)))
    assert both == ["0x", "0x"]
    assert await bash(sessions, "s", "2", "cat a") == "0x"


async def test_the_bound_is_an_overload_and_frees_up(sessions: SessionRegistry) -> None:
    await sessions.open("1", SPEC)
    await sessions.open("2", SPEC)
    with pytest.raises(Overloaded):
        await sessions.open("3", SPEC)
    await sessions.close("1")
    await sessions.close("1")
    await sessions.open("3", SPEC)


async def test_a_session_that_cannot_be_laid_out_leaves_no_slot(sessions: SessionRegistry) -> None:
    spec = replace(SPEC, files=files({"a": b"x" * (LIMITS.file_size_bytes + 1)}))
    for number in range(4):
        with pytest.raises(InvalidInput, match="above the limit"):
            await sessions.open(str(number), spec)
    assert sessions.num_open == 0


async def test_unknown_and_closed_sessions_are_not_found(sessions: SessionRegistry) -> None:
    with pytest.raises(NotFound):
        await bash(sessions, "s", "1", "true")
    await sessions.open("s", SPEC)
    await sessions.close("s")
    with pytest.raises(NotFound):
        await sessions.snapshot("s")


async def test_idle_and_old_sessions_are_ended(sessions: SessionRegistry, clock: HeldClock) -> None:
    await sessions.open("idle", SPEC)
    await sessions.open("busy", SPEC)
    clock.seconds = 20
    await bash(sessions, "busy", "1", "true")
    clock.seconds = 40
    assert list(sessions.overdue()) == [("idle", "idle")]
    clock.seconds = LIMITS.session_wall_s + 1
    assert dict(sessions.overdue())["busy"] == "wall"
    stop = asyncio.Event()
    reaping = asyncio.create_task(sessions.reap(stop, every_s=0.01))
    async with asyncio.timeout(5):
        while sessions.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stop.set()
    await reaping


async def test_a_broken_sandbox_ends_its_session(sandbox: Sandbox, sessions: SessionRegistry) -> None:
    await sessions.open("s", SPEC)
    await sandbox.close()
    with pytest.raises(Exception, match="ended|broke off"):
        await bash(sessions, "s", "1", "true")
    with pytest.raises(NotFound):
        await bash(sessions, "s", "2", "true")


async def test_a_caller_that_gives_up_finds_its_call_again(sessions: SessionRegistry) -> None:
    await sessions.open("s", SPEC)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await bash(sessions, "s", "1", "sleep 1; echo x >> a; cat a")
    assert await bash(sessions, "s", "1", "sleep 1; echo x >> a; cat a") == "0x"
    assert await bash(sessions, "s", "2", "cat a") == "0x"


async def test_a_flood_of_files_is_no_failure_of_the_platform(sessions: SessionRegistry) -> None:
    await sessions.open("s", SPEC)
    flood = "echo y > a; mkdir many; cd many; seq 1 5000 | xargs touch; mkdir -p " + "d/" * 1200
    await bash(sessions, "s", "1", flood)
    changes = await sessions.snapshot("s")
    assert ("a", b"y\n") in [(file.path, file.content) for file in changes.changed]
    assert any("more than" in line or "cannot be listed" in line for line in changes.refused)
    assert (await sessions.call("s", "2", "read_file", '{"path": "a"}')).output == "y\n"


async def test_a_stop_waits_for_the_sessions_that_are_open(sessions: SessionRegistry) -> None:
    stop = asyncio.Event()
    await sessions.open("s", SPEC)
    reaping = asyncio.create_task(sessions.reap(stop))
    stop.set()
    assert await bash(sessions, "s", "1", "cat a") == "0"
    assert not reaping.done()
    await sessions.close("s")
    async with asyncio.timeout(10):
        await reaping
