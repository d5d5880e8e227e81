"""Two replicas of the rollout service over one database, queue, reward service and engine."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import Conflict
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import trajectories
from practicum.v1 import reward_pb2, trajectory_pb2
from services.rollout.scheduler.runs import RunState
from tests.fixtures.chat_models import build_chat
from tests.fixtures.rollout import (
    Rollout,
    ScriptedReward,
    ScriptedTrainer,
    make_run,
    rollout_service,
    suite_body,
    until,
)
from tests.fixtures.scripted_engine import ScriptedEngine, by_turn, usual_turns


class CountingReward(ScriptedReward):
    """Keeps which tasks it was asked to admit; answers no tool before some sessions were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: list[str] = []
        self.num_opened_first = 0

    async def CallTool(
        self, request: reward_pb2.CallToolRequest, context: Any
    ) -> reward_pb2.CallToolResponse:
        await until(lambda: len(self.opened) >= self.num_opened_first)
        return await super().CallTool(request, context)

    async def Admit(self, request: reward_pb2.AdmitRequest, context: Any) -> reward_pb2.AdmitResponse:
        self.admitted.append(request.task.task_id)
        return await super().Admit(request, context)


@asynccontextmanager
async def replicas(folder: Path, **settings: Any) -> AsyncIterator[tuple[Rollout, Rollout, AsyncExitStack]]:
    """Replica a, and b, which the stack ends."""
    chat = build_chat()
    shared: dict[str, Any] = {
        "queue": MemoryQueue(claim_after_s=1e9),
        "trainer": ScriptedTrainer(),
        "reward": CountingReward(),
        "engines": [ScriptedEngine(by_turn(chat, usual_turns(chat)))],
        "beat_interval_s": 0.1,
        "lost_after_s": 60,
        **settings,
    }
    async with rollout_service(folder, rollout_instance="a", **shared) as a, AsyncExitStack() as stack:
        b = await stack.enter_async_context(rollout_service(folder, rollout_instance="b", **shared))
        await until(lambda: [each.service.membership.num_live for each in (a, b)] == [2, 2])
        yield a, b, stack


async def follow(a: Rollout, b: Rollout, **changes: Any) -> None:
    """A suite posted at one, a run whose weights are published at the other; both follow it."""
    await a.post("/v1/suites", suite_body(), expect=201)
    a.trainer.runs["run_1"] = make_run(**changes)
    await until(lambda: all(each.service.follower.follows("run_1") for each in (a, b)))
    await b.publish("run_1", 0)


async def owners(rollout: Rollout, query: str = "run_id=run_1") -> Counter[str | None]:
    """Episodes by their replica."""
    items = (await rollout.get(f"/v1/episodes?{query}&page_size=200"))["items"]
    return Counter(item["owner"] for item in items)


async def test_run_when_two_replicas_follow_it_is_shared_within_the_bound_and_played_once(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as (a, b, _):
        a.engines[0].hold.clear()
        await follow(a, b, groups_per_step=4)
        await until(lambda: a.engines[0].num_running == 16)
        a.engines[0].hold.set()
        requests = await a.graded(16, lambda request: 1.0)
        assert Counter(request.trajectory.group_index for request in requests) == dict.fromkeys(range(8), 2)
        assert len({request.trajectory.episode_id for request in requests}) == 16
        assert {request.trajectory.attempt for request in requests} == {1}
        assert len(a.engines[0].requests) == 16 * 3
        played = await owners(b)
        assert set(played) == {"a", "b"}
        assert min(played.values()) >= 4

        a.trainer.runs["run_1"] = make_run(groups_per_step=4, groups_consumed=4, weight_version=1)
        a.engines[0].logprob["/models/v1"] = -1.5
        await a.publish("run_1", 1, "/models/v1")
        requests = await b.graded(8, lambda request: 0.0)
        assert {request.trajectory.group_index for request in requests} == set(range(8, 12))
        assert len(a.engines[0].updates) == 2, "one load for each publication"
        for each in (a, b):
            assert each.pool.serving is not None
            assert each.pool.serving.weight_version == 1


async def test_replica_when_it_leaves_has_its_episodes_played_by_the_other_as_the_next_attempt(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as (a, b, stack):
        a.engines[0].hold.clear()
        await follow(a, b)
        await until(lambda: a.engines[0].num_running == 8)
        of_b = (await owners(a))["b"]
        assert of_b > 0
        await stack.aclose()
        a.engines[0].hold.set()
        requests = await a.graded(8, lambda request: 1.0)
        assert Counter(request.trajectory.attempt for request in requests) == {1: 8 - of_b, 2: of_b}
        assert await owners(a) == {"a": 8}
        assert a.service.membership.is_alone


async def test_evaluation_when_posted_at_one_is_played_by_both_and_told_by_either(tmp_path: Path) -> None:
    async with replicas(tmp_path, max_episodes=4) as (a, b, _):
        await a.post("/v1/suites", suite_body(8), expect=201)
        a.engines[0].hold.clear()
        body = {"suite": "bugs", "num_tasks": 4, "episodes_per_task": 2, "max_tokens": 2000, "seed": 1}
        made = await b.post("/v1/evaluations", body, expect=202)
        await until(lambda: a.engines[0].num_running == 8)
        a.engines[0].hold.set()
        requests = await a.graded(8, lambda request: 1.0)
        assert {request.trajectory.attempt for request in requests} == {1}
        for each in (a, b):

            async def completed(asked: Rollout = each) -> Any:
                view = await asked.get(f"/v1/evaluations/{made['evaluation_id']}")
                return view if view["state"] == "completed" else None

            view = await until(completed)
            assert (view["num_episodes"], view["num_passed"], view["infra_failed"]) == (8, 8, 0)
            assert 0 < view["engine_utilisation"] <= 1
        assert await owners(a, f"evaluation_id={made['evaluation_id']}") == {"a": 4, "b": 4}
        assert len(a.engines[0].requests) == 8 * 3


async def test_demonstrations_when_posted_at_one_are_played_by_both_once(tmp_path: Path) -> None:
    async with replicas(tmp_path, max_episodes=3) as (a, b, _):
        await a.post("/v1/suites", suite_body(3), expect=201)
        a.trainer.runs["sft"] = make_run("sft", state=RunState.PENDING)
        turns = [{"tool_calls": [{"name": "finish", "arguments": {}}]}]
        body = {
            "run_id": "sft",
            "demonstrations": [{"task": f"task-{i % 3}", "turns": turns} for i in range(12)],
        }
        assert isinstance(a.reward, CountingReward)
        a.reward.num_opened_first = 6  # the places of both: neither is done before the other has begun
        await b.post("/v1/demonstrations", body, expect=202)
        found: list[trajectory_pb2.Trajectory] = []
        while len(found) < 12:
            entries = await a.queue.read(trajectories("sft"), "trainer", "t", max_entries=64, wait_s=5)
            found += [entry.unpack(trajectory_pb2.Trajectory) for entry in entries]
        assert sorted(trajectory.group_index for trajectory in found) == list(range(12))
        assert len(a.reward.calls) == 12
        assert set(await owners(a, "run_id=sft")) == {"a", "b"}


async def test_admission_when_two_replicas_look_checks_each_task_once(tmp_path: Path) -> None:
    async with replicas(tmp_path, admissions_at_once=1) as (a, b, _):
        made = await a.post("/v1/suites", suite_body(12, admission="check"), expect=201)

        async def ready() -> bool:
            return bool((await b.get(f"/v1/suites/{made['suite_id']}"))["ready"])

        await until(ready)
        assert isinstance(a.reward, CountingReward)
        assert len(a.reward.admitted) == len(set(a.reward.admitted)) == 12


async def test_episode_when_cancelled_at_the_other_replica_is_dropped_where_it_is_played(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as (a, b, _):
        a.engines[0].hold.clear()
        await follow(a, b)
        await until(lambda: a.engines[0].num_running == 8)
        items = (await a.get("/v1/episodes?run_id=run_1"))["items"]
        episode_id = next(item["episode_id"] for item in items if item["owner"] == "a")
        await b.post(f"/v1/episodes/{episode_id}:cancel", {}, expect=200)
        await until(lambda: a.engines[0].num_running == 7)
        a.engines[0].hold.set()
        requests = await a.graded(7, lambda request: 1.0)
        assert episode_id not in {request.trajectory.episode_id for request in requests}
        entries = await a.queue.read(trajectories("run_1"), "trainer", "t", max_entries=9, wait_s=5)
        sent = [entry.unpack(trajectory_pb2.Trajectory) for entry in entries]
        assert [(t.episode_id, t.outcome) for t in sent] == [(episode_id, trajectory_pb2.OUTCOME_CANCELLED)]


async def test_run_when_it_stops_is_ended_at_both(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b, _):
        a.engines[0].hold.clear()
        await follow(a, b)
        await until(lambda: a.engines[0].num_running == 8)
        with pytest.raises(Conflict, match="run_1"):
            await a.publish("run_2", 0)
        a.trainer.runs["run_1"] = make_run(state=RunState.STOPPED)
        await until(lambda: a.engines[0].num_running == 0)
        await until(lambda: not a.reward.open_sessions)
        page = await b.get("/v1/episodes?run_id=run_1&state=cancelled")
        assert len(page["items"]) == 8
