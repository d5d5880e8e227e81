"""The supervisor's parts: ports, processes, the lock and the private files of a local stack."""

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from practicum.cli.ports import free_ports
from practicum.cli.process import ManagedProcess, ProcessFailed, ProcessSpec
from practicum.cli.stack import Stack, StackOptions, _lock_folder

READY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
LEAVES_A_CHILD = (
    "import subprocess, sys, pathlib, time;"
    "child = subprocess.Popen(['sleep', '60']);"
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(60)"
)


def make_process(folder: Path, code: str, *, start_timeout_s: float = 20.0) -> ManagedProcess:
    marker = folder / "ready"

    async def is_ready() -> bool:
        return marker.exists() and (code is READY or bool(marker.read_text()))

    spec = ProcessSpec(
        name="child",
        command=[sys.executable, "-c", code, str(marker)],
        environment=dict(os.environ),
        is_ready=is_ready,
        start_timeout_s=start_timeout_s,
    )
    return ManagedProcess(spec, folder / "child.log")


def test_free_ports_when_many_are_asked_for_are_all_different() -> None:
    assert len(set(free_ports(50))) == 50


async def test_process_when_it_ends_first_shows_its_last_lines(tmp_path: Path) -> None:
    process = make_process(tmp_path, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ProcessFailed, match="(?s)child ended with status 3.*no such model"):
        await process.start()


async def test_process_when_it_is_never_ready_is_ended(tmp_path: Path) -> None:
    process = make_process(tmp_path, "import time; time.sleep(60)", start_timeout_s=1.0)
    with pytest.raises(ProcessFailed, match="was not ready after 1 s"):
        await process.start()
    assert process.pid is None


async def test_process_when_stopped_takes_its_children_along(tmp_path: Path) -> None:
    process = make_process(tmp_path, LEAVES_A_CHILD)
    await process.start()
    grandchild = psutil.Process(int((tmp_path / "ready").read_text()))
    await process.stop()
    await process.stop()
    _, alive = psutil.wait_procs([grandchild], timeout=10)
    assert alive == []


async def test_process_when_killed_is_seen_to_end(tmp_path: Path) -> None:
    process = make_process(tmp_path, READY)
    await process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        assert await process.wait() == -signal.SIGKILL
    await process.stop()


async def test_stack_when_its_engine_cannot_start_ends_the_rest_and_unlocks(tmp_path: Path) -> None:
    options = StackOptions(data_dir=tmp_path / "data", model=tmp_path / "no-such-model")
    for _ in range(2):  # the second start shows that the first let go of the folder
        with pytest.raises(ProcessFailed, match="engine ended with status"):
            await Stack(options).start()
    config = tmp_path / "data" / "redis" / "redis.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert "requirepass" in config.read_text()


async def test_stack_when_another_holds_the_folder_refuses(tmp_path: Path) -> None:
    lock = _lock_folder(tmp_path)
    with pytest.raises(ProcessFailed, match="already runs"):
        await Stack(StackOptions(data_dir=tmp_path, model=tmp_path)).start()
    lock.close()
