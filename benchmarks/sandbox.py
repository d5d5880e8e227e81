"""What a sandbox costs: open + exec + close against the bare process, warm pytest against cold, grades/s.

The bare process and the sandboxed one take turns, so that both see the same machine. CPU time is that of the
service and of everything below its fork server. Prints a table, then one JSON line.

    python -m benchmarks.sandbox [--rounds 40]
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from practicum.clock import SystemClock
from services.reward.graders.base import GraderSpec, Task
from services.reward.graders.tests import TestsGrader
from services.reward.integrity.clean_room import CleanRoom
from services.reward.sandbox.base import Changes, File
from services.reward.sandbox.bubblewrap import BubblewrapSandbox
from services.reward.sandbox.limits import SandboxLimits

ADDED_BAR_MS = 15.0
EPISODE_CPU_BAR_MS = 60.0
CONCURRENCY = 8

BROKEN = b"def clamp(x):\n    return x + 1 if x < 2 else 0\n"
FIXED = b"def clamp(x):\n    return x + 1\n"
VISIBLE = b"""from calc import clamp


def test_1():
    assert clamp(1) == 2


def test_2():
    assert clamp(2) == 3
"""
HIDDEN = "from calc import clamp\n" + "".join(
    f"\n\ndef test_{n}():\n    assert clamp({n}) == {n + 1}\n" for n in range(6)
)
WORKSPACE = (File(path="calc.py", content=BROKEN), File(path="test_calc.py", content=VISIBLE))
LIMITS = SandboxLimits()
TASK = Task(
    task_id="bench",
    workspace=WORKSPACE,
    tools=(),
    grader=GraderSpec(
        kind="tests",
        files=(File(path="test_hidden.py", content=HIDDEN.encode()),),
        editable=("calc.py",),
        timeout_s=10,
    ),
    limits=LIMITS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one operation: wall ms at the median, CPU ms on average, and how many a second."""

    wall_ms: float
    cpu_ms: float
    per_s: float


def cpu_s(root: int) -> float:
    """CPU time of this process, and of a process with all its descendants, dead ones included."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + _tree_cpu_s(root)


def _tree_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = sum(int(field) for field in fields[11:15])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_tree_cpu_s(int(child)) for child in children)


async def measure(
    operation: Callable[[int], Awaitable[object]], rounds: int, *, root: int, concurrency: int = 1
) -> Cost:
    """Runs the operation `rounds` times, `concurrency` at a time."""
    walls_s: list[float] = []
    numbers = iter(range(rounds))

    async def take() -> None:
        for number in numbers:
            started_s = time.perf_counter()
            await operation(number)
            walls_s.append(time.perf_counter() - started_s)

    before_cpu_s, started_s = cpu_s(root), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(take())
    seconds = time.perf_counter() - started_s
    cpu_ms = (cpu_s(root) - before_cpu_s) / rounds * 1e3
    return Cost(wall_ms=statistics.median(walls_s) * 1e3, cpu_ms=cpu_ms, per_s=rounds / seconds)


async def bare_process() -> float:
    """Wall seconds of `true` as a plain process."""
    started_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    return time.perf_counter() - started_s


async def added_ms(sandbox: BubblewrapSandbox, rounds: int) -> tuple[float, float]:
    """Medians in ms: the bare process, and open + exec + close in a sandbox, taken in turn."""
    bare, sandboxed = [], []
    for number in range(rounds):
        bare.append(await bare_process())
        started_s = time.perf_counter()
        session = await sandbox.open(f"bench-{number}", LIMITS)
        await session.run(["true"], wall_s=5)
        await session.close()
        sandboxed.append(time.perf_counter() - started_s)
    return statistics.median(bare) * 1e3, statistics.median(sandboxed) * 1e3


async def cold_pytest_ms(rounds: int) -> float:
    """Wall ms of the same tests in a fresh interpreter with a fresh pytest."""
    walls_s = []
    with tempfile.TemporaryDirectory() as folder:
        _lay_out(folder)
        for _ in range(rounds):
            started_s = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_calc.py"),
                cwd=folder,
                stdout=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            )
            await process.wait()
            walls_s.append(time.perf_counter() - started_s)
    return statistics.median(walls_s) * 1e3


def _lay_out(folder: str) -> None:
    for file in WORKSPACE:
        Path(folder, file.path).write_bytes(file.content)


async def bench(rounds: int) -> tuple[dict[str, Cost], dict[str, float]]:
    """Every cost, and the figures that compare."""
    sandbox = BubblewrapSandbox()
    await sandbox.start()
    root = sandbox.root_pid()
    room = CleanRoom(sandbox=sandbox, slots=asyncio.Semaphore(8))
    grader = TestsGrader(clean_room=room, clock=SystemClock())
    fixed = Changes(changed=(File(path="calc.py", content=FIXED),))

    async def open_close(number: int) -> None:
        await (await sandbox.open(f"open-{number}", LIMITS)).close()

    async def grade(number: int) -> None:
        verdict = await grader.grade(f"grade-{number}", TASK, fixed)
        assert verdict.grade.reward == 1.0

    async def episode(number: int) -> None:
        session = await sandbox.open(f"episode-{number}", LIMITS)
        await session.lay_out(WORKSPACE, pristine=True)
        await session.read_file("calc.py")
        await session.edit_file("calc.py", b" if x < 2 else 0", b"")
        await session.run_tests(wall_s=5)
        changes = await session.snapshot()
        await session.close()
        verdict = await grader.grade(f"episode-{number}", TASK, changes)
        assert verdict.grade.reward == 1.0

    held = await sandbox.open("held", LIMITS)
    await held.lay_out(WORKSPACE, pristine=True)
    try:
        costs = {
            "open_close": await measure(open_close, rounds, root=root),
            "read_file": await measure(lambda _: held.read_file("calc.py"), rounds, root=root),
            "bash": await measure(lambda _: held.run(["bash", "-c", ":"], wall_s=5), rounds, root=root),
            "run_tests": await measure(lambda _: held.run_tests(wall_s=5), rounds, root=root),
            "grade": await measure(grade, rounds, root=root),
            "grade_8_at_once": await measure(grade, rounds * 2, root=root, concurrency=CONCURRENCY),
            "episode": await measure(episode, rounds, root=root),
            "episode_8_at_once": await measure(episode, rounds * 2, root=root, concurrency=CONCURRENCY),
        }
        bare_ms, sandboxed_ms = await added_ms(sandbox, rounds)
        figures = {
            "bare_process_ms": bare_ms,
            "open_exec_close_ms": sandboxed_ms,
            "added_ms": sandboxed_ms - bare_ms,
            "cold_pytest_ms": await cold_pytest_ms(max(3, rounds // 8)),
            "warm_pytest_ms": costs["run_tests"].wall_ms,
            "grades_per_s": costs["grade_8_at_once"].per_s,
            "episode_cpu_ms": costs["episode"].cpu_ms,
        }
    finally:
        await held.close()
        await sandbox.close()
    return costs, figures


def report(costs: dict[str, Cost], figures: dict[str, float]) -> None:
    """The table, then the JSON line."""
    table = Table("operation", "wall ms (median)", "CPU ms (mean)", "per s")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.wall_ms:.2f}", f"{cost.cpu_ms:.2f}", f"{cost.per_s:.1f}")
    console = Console()
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name}: {value:.2f}")
    all_figures = {
        **{f"{name}_cpu_ms": cost.cpu_ms for name, cost in costs.items()},
        **{f"{name}_wall_ms": cost.wall_ms for name, cost in costs.items()},
        **figures,
    }
    bars = [("added_ms", ADDED_BAR_MS), ("episode_cpu_ms", EPISODE_CPU_BAR_MS)]
    line = {
        "name": "sandbox",
        "figures": {name: round(value, 3) for name, value in all_figures.items()},
        "bars": [
            {
                "figure": name,
                "op": "<=",
                "bar": bar,
                "value": round(figures[name], 3),
                "ok": figures[name] <= bar,
            }
            for name, bar in bars
        ],
    }
    print(json.dumps(line))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    report(*asyncio.run(bench(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
