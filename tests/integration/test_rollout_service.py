"""The rollout service as a whole, over real SQL and gRPC, with a scripted engine and reward service."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from practicum.clock import SystemClock
from practicum.errors import Conflict, Overloaded, QueueError, QueueFull, SandboxError
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import GRADING, trajectories
from practicum.trajectory import MaskReason, Outcome, Trajectory
from practicum.v1 import rollout_pb2, trajectory_pb2
from practicum.wire import trajectory_from_pb
from services.rollout.episode.policy import DEMONSTRATION_ENGINE
from services.rollout.scheduler.runs import PublishedCheckpoint, RunState
from tests.fixtures.rollout import (
    Rollout,
    ScriptedReward,
    ScriptedTrainer,
    make_run,
    rollout_service,
    suite_body,
    until,
)


async def follow(rollout: Rollout, **changes: Any) -> None:
    """A suite, and a run whose weights are served."""
    await rollout.post("/v1/suites", suite_body(), expect=201)
    rollout.trainer.runs["run_1"] = make_run(**changes)
    await rollout.publish("run_1", 0)


async def sent_to_trainer(rollout: Rollout, number: int, run_id: str = "run_1") -> list[Trajectory]:
    """The next trajectories on the run's stream."""
    found: list[Trajectory] = []
    stream = trajectories(run_id)
    async with asyncio.timeout(20):
        while len(found) < number:
            entries = await rollout.queue.read(stream, "trainer", "test", max_entries=64, wait_s=0.2)
            found += [trajectory_from_pb(entry.unpack(trajectory_pb2.Trajectory)) for entry in entries]
            await rollout.queue.ack(stream, "trainer", [entry.entry_id for entry in entries])
    return found


async def test_run_when_groups_are_graded_goes_on_to_the_staleness_bound(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        await follow(rollout)
        # (0 consumed / 2 + staleness 1 + 1) * 2 groups of 2 episodes
        requests = await rollout.graded(8, lambda request: 1.0)
        await asyncio.sleep(0.2)
        assert len(rollout.engines[0].requests) == 8 * 3
        assert sorted({request.trajectory.group_index for request in requests}) == [0, 1, 2, 3]

        rollout.trainer.runs["run_1"] = make_run(groups_consumed=2, weight_version=1)
        await asyncio.sleep(0.2)
        assert len(rollout.engines[0].requests) == 8 * 3, "version 1 is not served yet"
        rollout.engines[0].logprob["/models/v1"] = -1.5
        await rollout.publish("run_1", 1, "/models/v1")
        requests = await rollout.graded(4, lambda request: 0.0)
        assert {request.trajectory.group_index for request in requests} == {4, 5}

        trajectory = trajectory_from_pb(requests[0].trajectory)
        trajectory.check()
        assert trajectory.version_range() == (1, 1)
        row = trajectory.rows[0]
        num_sampled = sum(turn.num_sampled_tokens for turn in trajectory.turns)
        assert row.num_by_reason()[MaskReason.MODEL] == num_sampled
        assert set(row.logprobs_T[row.mask_T()]) == {-1.5}
        assert requests[0].diff.removed == ["gone.py"]
        assert requests[0].task.grader.kind == "tests"
        shown = await rollout.get(f"/v1/episodes/{trajectory.episode_id}")
        assert shown["rows"][0]["token_ids"] == row.token_ids_T.tolist()
        assert shown["rows"][0]["weight_versions"][0]["weight_version"] == 1
        assert not rollout.reward.open_sessions


async def test_run_when_it_stops_has_its_episodes_cancelled(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        rollout.trainer.runs["run_1"] = make_run(state=RunState.STOPPED)
        await until(lambda: rollout.engines[0].num_running == 0)
        page = await rollout.get("/v1/episodes?run_id=run_1&state=cancelled")
        assert len(page["items"]) == 8
        await until(lambda: not rollout.reward.open_sessions)
        assert (await rollout.queue.depth(GRADING, "reward")).undelivered == 0


async def test_run_when_it_pauses_finishes_what_it_began_and_goes_on_after(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        rollout.trainer.runs["run_1"] = make_run(state=RunState.PAUSED)
        await asyncio.sleep(0.15)
        rollout.engines[0].hold.set()
        await rollout.graded(8, lambda request: 1.0)
        rollout.trainer.runs["run_1"] = make_run(groups_consumed=2)
        await rollout.publish("run_1", 1)
        requests = await rollout.graded(4, lambda request: 1.0)
        assert {request.trajectory.group_index for request in requests} == {4, 5}


async def test_run_when_it_pauses_shortly_plays_no_episode_twice(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        rollout.trainer.runs["run_1"] = make_run(state=RunState.PAUSED)
        await until(lambda: not rollout.service.follower.follows("run_1"))
        rollout.trainer.runs["run_1"] = make_run()
        await until(lambda: rollout.service.follower.follows("run_1"))
        await asyncio.sleep(0.2)
        assert rollout.engines[0].num_running == 8
        rollout.engines[0].hold.set()
        requests = await rollout.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {1}
        assert len({request.trajectory.episode_id for request in requests}) == 8
        assert len(rollout.engines[0].requests) == 8 * 3


async def test_run_when_another_takes_the_engines_from_its_pause_plays_its_episodes_again_after(
    tmp_path: Path,
) -> None:
    async with rollout_service(tmp_path) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        rollout.trainer.runs["run_1"] = make_run(state=RunState.PAUSED)
        await until(lambda: not rollout.service.follower.follows("run_1"))
        await rollout.publish("run_2", 0)
        await until(lambda: rollout.engines[0].num_running == 0)
        rollout.engines[0].hold.set()
        assert len((await rollout.get("/v1/episodes?run_id=run_1&state=running"))["items"]) == 8
        rollout.trainer.runs["run_1"] = make_run()
        await rollout.publish("run_1", 0)
        requests = await rollout.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {2}


class MovableClock(SystemClock):
    """The system's clock, which a test can put forward."""

    ahead_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def execute(database: Path, statement: str) -> list[Any]:
    """Read or change the service's database behind its back."""
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        return connection.execute(statement).fetchall()


async def test_episodes_when_their_end_was_lost_are_played_again(tmp_path: Path) -> None:
    clock = MovableClock()
    async with rollout_service(tmp_path, clock=clock) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        # Not a fault that passes, which is waited for: no attempt's end can be stored.
        refuse = (
            "CREATE TRIGGER lost BEFORE INSERT ON rollout_trajectories BEGIN SELECT RAISE(ABORT, ''); END"
        )
        await asyncio.to_thread(execute, tmp_path / "rollout.sqlite", refuse)
        rollout.engines[0].hold.set()

        async def all_lost() -> bool:
            return 'errors_total{worker="episode"} 8.0' in (await rollout.rest.get("/metrics")).text

        await until(all_lost)
        await asyncio.to_thread(execute, tmp_path / "rollout.sqlite", "DROP TRIGGER lost")
        await asyncio.sleep(0.3)
        assert len(rollout.engines[0].requests) == 8 * 3
        clock.ahead_s = 61
        requests = await rollout.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {2}


async def test_run_when_the_service_restarts_plays_its_open_episodes_again_as_the_next_attempt(
    tmp_path: Path,
) -> None:
    queue, trainer = MemoryQueue(claim_after_s=1e9), ScriptedTrainer()
    async with rollout_service(tmp_path, queue=queue, trainer=trainer) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        open_ids = {item["episode_id"] for item in (await rollout.get("/v1/episodes?run_id=run_1"))["items"]}
        engine = rollout.engines[0]
    engine.hold.set()
    engine.requests.clear()
    async with rollout_service(tmp_path, queue=queue, trainer=trainer, engines=[engine]) as rollout:
        assert rollout.pool.serving is not None
        assert rollout.pool.serving.run_id == "run_1", "the weights on the engine were recognised"
        requests = await rollout.graded(8, lambda request: 1.0)
        played = [request.trajectory for request in requests]
        assert {trajectory.episode_id for trajectory in played} == open_ids
        assert {trajectory.attempt for trajectory in played} == {2}
        assert len(engine.requests) == 24, "no group was begun twice"


async def test_run_when_the_service_drains_ends_its_episodes_and_begins_none(tmp_path: Path) -> None:
    async with rollout_service(tmp_path, drain_s=15) as rollout:
        engine = rollout.engines[0]
        engine.hold.clear()
        await follow(rollout)
        await until(lambda: engine.num_running == 8)
        rollout.trainer.runs["run_1"] = make_run(groups_consumed=4, weight_version=2)
        rollout.stop.set()
        engine.hold.set()
    assert not rollout.reward.open_sessions
    rows = execute(tmp_path / "rollout.sqlite", "SELECT state, attempt, is_owed FROM rollout_episodes")
    assert rows == [("grading", 1, 0)] * 8


async def test_run_when_the_drain_is_over_gives_its_episodes_back(tmp_path: Path) -> None:
    reward = ScriptedReward()
    async with rollout_service(tmp_path, reward=reward, drain_s=0.1) as rollout:
        engine = rollout.engines[0]
        engine.hold.clear()
        await follow(rollout)
        await until(lambda: engine.num_running == 8)
        rollout.stop.set()
    assert sorted(engine.aborted) == sorted(request["rid"] for request in engine.requests[-8:])
    assert len(reward.opened) == 8
    assert not reward.open_sessions
    rows = execute(tmp_path / "rollout.sqlite", "SELECT state, attempt FROM rollout_episodes")
    assert rows == [("running", 1)] * 8
    engine.hold.set()
    async with rollout_service(tmp_path, trainer=rollout.trainer, engines=rollout.engines) as again:
        requests = await again.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {2}


async def test_episode_when_it_waits_for_its_next_attempt_does_not_hold_up_the_drain(tmp_path: Path) -> None:
    reward = ScriptedReward()
    reward.open_error = lambda session_id: SandboxError("no sandbox today")
    async with rollout_service(tmp_path, reward=reward, drain_s=15) as rollout:
        await follow(rollout)

        async def all_wait() -> bool:
            return "practicum_rollout_retries_total 8.0" in (await rollout.rest.get("/metrics")).text

        await until(all_wait)
        rollout.stop.set()
    rows = execute(tmp_path / "rollout.sqlite", "SELECT state, attempt FROM rollout_episodes")
    assert rows == [("running", 1)] * 8, "the next attempt was not begun"


async def test_evaluation_when_the_service_drains_goes_on_at_the_next_start(tmp_path: Path) -> None:
    body = {"suite": "bugs@1", "split": "train", "num_tasks": 2, "episodes_per_task": 12}
    async with rollout_service(tmp_path, drain_s=15) as rollout:
        engine = rollout.engines[0]
        engine.hold.clear()
        await rollout.post("/v1/suites", suite_body(), expect=201)
        await rollout.publish("run_1", 0)
        made = await rollout.post("/v1/evaluations", body, expect=202)
        await until(lambda: engine.num_running == 16)
        rollout.stop.set()
        engine.hold.set()
    states = "SELECT state, COUNT(*) FROM rollout_episodes GROUP BY state ORDER BY state"
    assert execute(tmp_path / "rollout.sqlite", states) == [("grading", 16), ("running", 8)]
    async with rollout_service(
        tmp_path, trainer=rollout.trainer, engines=rollout.engines, queue=rollout.queue
    ) as again:
        await again.graded(24, lambda request: 1.0)

        async def is_done() -> bool:
            shown = await again.get(f"/v1/evaluations/{made['evaluation_id']}")
            return bool(shown["state"] == "completed")

        await until(is_done)


async def test_run_when_the_engines_serve_something_else_gets_its_weights_back(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.checkpoints["run_1"] = PublishedCheckpoint(
        run_id="run_1", weight_version=4, path="/models/v4", manifest_sha256=""
    )
    async with rollout_service(tmp_path, trainer=trainer, heal_after_s=0.1) as rollout:
        rollout.engines[0].logprob["/models/v4"] = -1.0
        await rollout.post("/v1/suites", suite_body(), expect=201)
        trainer.runs["run_1"] = make_run(weight_version=4, groups_consumed=8)
        requests = await rollout.graded(4, lambda request: 1.0)
        assert trajectory_from_pb(requests[0].trajectory).version_range() == (4, 4)


async def test_engines_when_a_running_run_has_them_refuse_another(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        await follow(rollout)
        await rollout.graded(8, lambda request: 1.0)
        with pytest.raises(Conflict, match="run_1"):
            await rollout.publish("run_2", 0)
        rollout.trainer.runs["run_1"] = make_run(state=RunState.COMPLETED)
        await rollout.publish("run_2", 0)
        versions = await rollout.service.servicer.GetVersions(
            rollout_pb2.GetVersionsRequest(),
            None,  # type: ignore[arg-type]
        )
        assert (versions.run_id, dict(versions.engines)) == ("run_2", {"engine-0": 0})


async def test_evaluation_when_graded_sums_up(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        await rollout.post("/v1/suites", suite_body(8), expect=201)
        body = {"suite": "bugs", "num_tasks": 4, "episodes_per_task": 2, "max_tokens": 2000, "seed": 1}
        made = await rollout.post("/v1/evaluations", body, expect=202)
        passed_tasks: set[str] = set()

        def half(request: Any) -> float | None:
            passed_tasks.add(request.trajectory.task_id)
            return 1.0 if len(passed_tasks) <= 2 else 0.0

        requests = await rollout.graded(8, half)
        assert {request.trajectory.run_id for request in requests} == {""}

        async def completed() -> Any:
            view = await rollout.get(f"/v1/evaluations/{made['evaluation_id']}")
            return view if view["state"] == "completed" else None

        view = await until(completed)
        assert (view["num_episodes"], view["num_done"], view["infra_failed"]) == (8, 8, 0)
        assert 0 < view["success_rate"] < 1
        assert view["wilson_low"] < view["success_rate"] < view["wilson_high"]
        assert view["mean_turns"] == 3
        assert view["weight_version"] == 0
        assert 0 < view["engine_utilisation"] <= 1
        assert view["tokens_generated"] == rollout.pool.engines[0].meter.read().tokens_generated
        engines = await rollout.get("/v1/engines")
        assert engines["items"][0]["healthy"]
        metrics = (await rollout.rest.get("/metrics")).text
        assert 'practicum_rollout_attempts_total{outcome="completed"} 8.0' in metrics
        assert "practicum_rollout_engine_busy_slot_seconds_total" in metrics


async def test_demonstrations_when_posted_reach_the_trainer_as_the_policy_would_have_written_them(
    tmp_path: Path,
) -> None:
    async with rollout_service(tmp_path) as rollout:
        await rollout.post("/v1/suites", suite_body(3), expect=201)
        rollout.trainer.runs["sft"] = make_run("sft", state=RunState.PENDING)
        calls = [
            {"name": "read_file", "arguments": {"path": "calc.py"}},
            {"name": "finish", "arguments": {}},
        ]
        turns = [{"tool_calls": [call]} for call in calls]
        body = {
            "run_id": "sft",
            "demonstrations": [{"task": f"task-{i % 3}", "turns": turns} for i in range(7)],
        }
        made = await rollout.post("/v1/demonstrations", body, expect=202, key="k")
        again = await rollout.post("/v1/demonstrations", body, expect=202, key="k")
        assert again == made
        found = await sent_to_trainer(rollout, 7, "sft")
        for trajectory in found:
            trajectory.check()
            assert trajectory.outcome is Outcome.COMPLETED
            assert trajectory.grade is None
            assert (trajectory.group_id, trajectory.group_size) == (trajectory.episode_id, 1)
            assert trajectory.version_range() == (0, 0)
            row = trajectory.rows[0]
            assert {span.engine_id for span in row.version_spans} == {DEMONSTRATION_ENGINE}
            assert not row.logprobs_T.any()
        assert sorted(trajectory.group_index for trajectory in found) == list(range(7))
        assert rollout.engines[0].requests == []
        assert len(rollout.reward.calls) == 14

        async def completed() -> Any:
            view = await rollout.get(f"/v1/demonstrations/{made['demonstration_id']}")
            return view if view["state"] == "completed" else None

        view = await until(completed)
        assert (view["num_episodes"], view["num_done"], view["num_failed"]) == (7, 7, 0)


async def test_admission_when_tasks_are_checked_uses_only_the_admitted(tmp_path: Path) -> None:
    body = suite_body(4, admission="check")
    body["tasks"][2]["workspace"] = {"files": {"calc.py": "leak"}}
    async with rollout_service(tmp_path) as rollout:
        rollout.reward.admit_error = SandboxError("no sandbox now")
        made = await rollout.post("/v1/suites", body, expect=201)
        assert made["train"] == {"admitting": 2, "admitted": 0, "rejected": 0}
        rollout.trainer.runs["run_1"] = make_run()
        await rollout.publish("run_1", 0)
        await asyncio.sleep(0.2)
        assert rollout.engines[0].requests == [], "a run waits for its suite"
        rollout.reward.admit_error = None

        async def ready() -> Any:
            view = (await rollout.get("/v1/suites"))["items"][0]
            return view if view["ready"] else None

        view = await until(ready)
        assert view["train"] == {"admitting": 0, "admitted": 1, "rejected": 1}
        requests = await rollout.graded(8, lambda request: 1.0)
        rejected = (await rollout.get("/v1/tasks?state=rejected"))["items"]
        assert [task["name"] for task in rejected] == ["task-2"]
        assert rejected[0]["reasons"] == [{"name": "no_leak", "ok": False, "detail": "looked for the answer"}]
        assert rejected[0]["task_id"] not in {request.trajectory.task_id for request in requests}


async def test_sandboxes_when_full_are_waited_for_without_a_failure(tmp_path: Path) -> None:
    reward = ScriptedReward()
    refusals = {"left": 5}

    def full(session_id: str) -> Overloaded | None:
        refusals["left"] -= 1
        return Overloaded("no slot", retry_after_s=0.05) if refusals["left"] >= 0 else None

    reward.open_error = full
    async with rollout_service(tmp_path, reward=reward) as rollout:
        await follow(rollout)
        requests = await rollout.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {1}


async def test_grades_when_the_stream_lost_the_request_are_asked_for_again(tmp_path: Path) -> None:
    queue, trainer = MemoryQueue(claim_after_s=1e9), ScriptedTrainer()
    async with rollout_service(tmp_path, queue=queue, trainer=trainer) as rollout:
        await follow(rollout)
        await until(lambda: rollout.get("/v1/episodes?state=grading"))
        await until(_has_all(rollout, 8))
        engine = rollout.engines[0]
    lost = MemoryQueue(claim_after_s=1e9)  # the queue came back empty
    settings = {"regrade_after_s": 0.2, "trainer": trainer, "engines": [engine]}
    async with rollout_service(tmp_path, queue=lost, **settings) as rollout:  # type: ignore[arg-type]
        await rollout.graded(8, lambda request: 1.0)
        page = await until(_has_all(rollout, 8, "graded"))
        assert {item["attempt"] for item in page} == {1}


def _has_all(rollout: Rollout, number: int, state: str = "grading") -> Any:
    async def check() -> Any:
        items = (await rollout.get(f"/v1/episodes?run_id=run_1&state={state}"))["items"]
        return items if len(items) == number else None

    return check


async def test_run_when_the_trajectory_stream_was_lost_has_its_groups_sent_again(tmp_path: Path) -> None:
    async with rollout_service(tmp_path, stalled_after_s=0.5) as rollout:
        await follow(rollout)
        await rollout.graded(8, lambda request: 0.5)
        # Nothing of this reached the trainer: it consumes no group.
        found = await sent_to_trainer(rollout, 8)
        assert {trajectory.reward for trajectory in found} == {0.5}
        for trajectory in found:
            trajectory.check()


async def test_run_when_it_stalls_has_its_cancelled_episodes_sent_again_too(tmp_path: Path) -> None:
    async with rollout_service(tmp_path, stalled_after_s=0.5) as rollout:
        rollout.engines[0].hold.clear()
        await follow(rollout)
        await until(lambda: rollout.engines[0].num_running == 8)
        items = (await rollout.get("/v1/episodes?run_id=run_1"))["items"]
        cancelled_id = items[0]["episode_id"]
        await rollout.post(f"/v1/episodes/{cancelled_id}:cancel", {}, expect=200)
        rollout.engines[0].hold.set()
        await rollout.graded(7, lambda request: 0.5)
        found = await sent_to_trainer(rollout, 9)
        assert [trajectory.episode_id for trajectory in found].count(cancelled_id) == 2
        assert len({trajectory.episode_id for trajectory in found}) == 8


class FaultyQueue(MemoryQueue):
    """A queue that refuses what is sent to grading, or breaks on it a few times; it is never trimmed."""

    is_away = True
    num_defects = 0

    async def publish(self, stream: str, message: Message, *, traceparent: str = "") -> str:
        if stream == GRADING and self.is_away:
            raise QueueFull("no room")
        if stream == GRADING and self.num_defects:
            self.num_defects -= 1
            raise ValueError("a defect")
        return await super().publish(stream, message, traceparent=traceparent)

    async def trim(self, stream: str) -> int:
        raise QueueError("not now")


async def test_debts_when_one_cannot_be_sent_are_settled_but_for_that_one(tmp_path: Path) -> None:
    queue, clock = FaultyQueue(claim_after_s=1e9), MovableClock()
    workers = ["engines", "runs", "grades"]
    async with rollout_service(tmp_path, queue=queue, workers=workers, clock=clock) as rollout:
        await follow(rollout)
        await until(_has_all(rollout, 8))
        await until(lambda: not rollout.reward.open_sessions)
        await asyncio.sleep(0.2)
        queue.is_away, queue.num_defects = False, 1
        clock.ahead_s = 61  # past the moment for a look at everything, trimming included
        await rollout.service.reconciler.round()
        requests = await rollout.graded(7, lambda request: 1.0)
        assert len({request.trajectory.episode_id for request in requests}) == 7
        await until(_has_all(rollout, 7, "graded"))
        assert await rollout.service.reconciler.settle_overdue() == 0, "its time begins again"
        clock.ahead_s = 122
        assert await rollout.service.reconciler.settle_overdue() == 1


class SlowReward(ScriptedReward):
    """Tools that wait until a test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def CallTool(self, request: Any, context: Any) -> Any:
        await self.go.wait()
        return await super().CallTool(request, context)


async def test_demonstration_when_cancelled_while_it_waits_is_not_played(tmp_path: Path) -> None:
    reward = SlowReward()
    async with rollout_service(tmp_path, reward=reward, max_episodes=1) as rollout:
        await rollout.post("/v1/suites", suite_body(3), expect=201)
        rollout.trainer.runs["sft"] = make_run("sft", state=RunState.PENDING)
        turns = [{"tool_calls": [{"name": "finish", "arguments": {}}]}]
        body = {"run_id": "sft", "demonstrations": [{"task": "task-0", "turns": turns}] * 2}
        await rollout.post("/v1/demonstrations", body, expect=202)
        await until(lambda: reward.open_sessions)
        playing = next(iter(reward.open_sessions)).rpartition("-")[0]
        items = (await rollout.get("/v1/episodes?run_id=sft"))["items"]
        [waiting] = [item["episode_id"] for item in items if item["episode_id"] != playing]
        await rollout.post(f"/v1/episodes/{waiting}:cancel", {}, expect=200)
        reward.go.set()
        found = await sent_to_trainer(rollout, 2, "sft")
        await until(lambda: not reward.open_sessions)
        await asyncio.sleep(0.2)
        assert {trajectory.outcome for trajectory in found} == {Outcome.COMPLETED, Outcome.CANCELLED}
        assert len(reward.opened) == 1


async def test_readiness_when_an_engine_is_away_names_it(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        assert (await rollout.get("/readyz"))["engines"] == "ok"
        rollout.pool.engines[0].needs_reload = True
        rollout.engines[0].is_up = False
        problem = await rollout.get("/readyz", expect=503)
        assert "engines: no engine can be used" in problem["detail"]


async def test_episode_when_the_engine_fails_once_is_tried_again(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        failures = {"left": 3}
        usual = rollout.engines[0].change_answer

        def sometimes(answer: dict[str, Any]) -> dict[str, Any]:
            failures["left"] -= 1
            return {"output_ids": [1]} if failures["left"] >= 0 else usual(answer)

        rollout.engines[0].change_answer = sometimes
        await follow(rollout)
        requests = await rollout.graded(8, lambda request: 1.0)
        attempts = sorted(request.trajectory.attempt for request in requests)
        assert attempts == [1] * 5 + [2] * 3
