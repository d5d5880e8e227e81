"""SIGTERM to each service in the middle of a run, with every process real: nothing is lost or done twice."""

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from structlog.testing import capture_logs

from practicum.cli.client import connect_platform
from practicum.cli.demo import DemoContext, start_run, submit_suite
from practicum.cli.main import TINY_FOLDER
from practicum.cli.recipe import TINY
from practicum.cli.stack import StackOptions, read_stack, running_stack

pytestmark = pytest.mark.timeout(900)

DRAIN_S = 2.0
RECIPE = replace(TINY, num_train=32, num_heldout=4, num_steps=24, group_size=8, groups_per_step=4)
WAIT_S = 300.0
READ_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How a service ended after its signal."""

    status: int
    seconds: float


def query(folder: Path, name: str, sql: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder}/{name}.sqlite?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


async def until(holds: Callable[[], Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (value := holds()):  # noqa: ASYNC110 — what another process wrote gives no event
            await asyncio.sleep(READ_S)
    return value


def committed(folder: Path) -> int:
    return int(query(folder, "trainer", "SELECT COUNT(*) FROM trainer_steps")[0][0])


def running_episodes(folder: Path) -> int:
    return int(
        query(folder, "rollout", "SELECT COUNT(*) FROM rollout_episodes WHERE state = 'running'")[0][0]
    )


async def terminate(folder: Path, name: str, logs: list[Any]) -> Stopped:
    """SIGTERM a service of the stack, whose supervisor starts it again; back once it is ready."""
    stack = read_stack(folder)
    assert stack is not None
    num_before = len(logs)
    started_s = time.monotonic()
    os.kill(stack.pids[name], signal.SIGTERM)

    def ends() -> list[int]:
        return [
            entry["status"]
            for entry in logs[num_before:]
            if entry["event"] == "stack.process_ended" and entry["process"] == name
        ]

    (status,) = await until(ends)
    seconds = time.monotonic() - started_s
    await until(lambda: (now := read_stack(folder)) and now.pids.get(name) not in (None, stack.pids[name]))
    return Stopped(status=status, seconds=seconds)


async def test_services_when_terminated_in_turn_hand_work_back_and_the_ledger_balances(
    tmp_path: Path,
) -> None:
    stopped: dict[str, Stopped] = {}
    with capture_logs() as logs:
        options = StackOptions(data_dir=tmp_path, model=TINY_FOLDER, drain_timeout_s=DRAIN_S)
        async with running_stack(options) as stack, connect_platform(stack) as client:
            context = DemoContext(
                client=client, progress=Progress(disable=True), recipe=RECIPE, reward_url=stack.reward_url
            )
            run_id = await start_run(context, TINY_FOLDER, await submit_suite(context))
            await client.trainer("POST", f"/v1/runs/{run_id}:resume")
            for number, name in enumerate(("rollout", "reward", "trainer"), start=1):
                await until(lambda number=number: committed(tmp_path) >= 2 * number - 1)  # type: ignore[misc]
                await until(
                    lambda: running_episodes(tmp_path) >= 4 or committed(tmp_path) == RECIPE.num_steps
                )
                assert committed(tmp_path) < RECIPE.num_steps, f"the run ended before {name} could be stopped"
                stopped[name] = await terminate(tmp_path, name, logs)
            await until(lambda: committed(tmp_path) == RECIPE.num_steps)
            await until(
                lambda: query(tmp_path, "trainer", "SELECT state FROM trainer_runs") == [("completed",)]
            )
    print("seconds to end:", json.dumps({name: round(end.seconds, 2) for name, end in stopped.items()}))
    assert {name: end.status for name, end in stopped.items()} == dict.fromkeys(stopped, 0)
    assert all(end.seconds < DRAIN_S + 15 for end in stopped.values())
    assert_balanced(tmp_path)


def assert_balanced(folder: Path) -> None:
    """Every episode was trained once, dropped with a reason, or is owed to steps that were not taken."""
    consumed = query(folder, "trainer", "SELECT episode_id, group_id, trained, step FROM trainer_consumed")
    episodes = {
        row[0]: row[1:]
        for row in query(
            folder,
            "rollout",
            "SELECT episode_id, group_id, state, outcome, error FROM rollout_episodes WHERE run_id != ''",
        )
    }
    size = RECIPE.num_steps * RECIPE.groups_per_step * RECIPE.group_size
    assert len(consumed) == len({row[0] for row in consumed}) == size
    groups_taken = {row[1] for row in consumed}
    assert len(groups_taken) == RECIPE.num_steps * RECIPE.groups_per_step
    by_step = {step: sum(row[3] == step for row in consumed) for *_, step in consumed}
    assert by_step == dict.fromkeys(range(1, RECIPE.num_steps + 1), size // RECIPE.num_steps)
    for episode_id, group_id, trained, _ in consumed:
        stored_group, state, outcome, error = episodes[episode_id]
        assert stored_group == group_id
        assert state == "graded" if trained else (outcome in ("infra_failed", "cancelled") and error)
    for episode_id, (group_id, state, *_) in episodes.items():
        if group_id not in groups_taken:  # owed: started ahead of the last step, and ended with the run
            assert state in ("graded", "cancelled", "infra_failed"), (episode_id, state)
    quarantined = query(folder, "trainer", "SELECT reason FROM trainer_quarantine")
    assert quarantined == []
