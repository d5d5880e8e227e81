"""Cases of other systems' failures that belong to the rollout service, each by its id."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import SandboxError
from practicum.queue.streams import EVENTS, GRADING, trajectories
from practicum.trajectory import Outcome, SamplingParams
from practicum.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from practicum.wire import trajectory_from_pb
from services.rollout.scheduler.runs import RunState
from tests.fixtures.rollout import (
    Rollout,
    ScriptedReward,
    graded_event,
    make_run,
    rollout_service,
    suite_body,
    task_body,
    until,
)


async def follow(rollout: Rollout, **changes: Any) -> None:
    await rollout.post("/v1/suites", suite_body(), expect=201)
    rollout.trainer.runs["run_1"] = make_run(**changes)
    await rollout.publish("run_1", 0)


async def ended(rollout: Rollout, number: int) -> list[Any]:
    """The next trajectories sent straight to the trainer."""
    found: list[Any] = []
    stream = trajectories("run_1")
    async with asyncio.timeout(20):
        while len(found) < number:
            entries = await rollout.queue.read(stream, "trainer", "t", max_entries=64, wait_s=0.2)
            found += [trajectory_from_pb(entry.unpack(trajectory_pb2.Trajectory)) for entry in entries]
    return found


async def grading(rollout: Rollout, number: int) -> list[reward_pb2.GradeRequest]:
    """The next requests on the grading stream, ungraded."""
    found: list[reward_pb2.GradeRequest] = []
    async with asyncio.timeout(20):
        while len(found) < number:
            entries = await rollout.queue.read(GRADING, "reward", "t", max_entries=64, wait_s=0.2)
            found += [entry.unpack(reward_pb2.GradeRequest) for entry in entries]
    return found


async def test_D08_group_when_a_rollout_hangs_closes_within_its_deadline(tmp_path: Path) -> None:
    reward = ScriptedReward()
    hanging: list[str] = []

    class Hanging(ScriptedReward):
        async def CallTool(self, request: Any, context: Any) -> Any:
            if not hanging or request.session_id.split("-")[0] in hanging:
                hanging.append(request.session_id.split("-")[0])
                await asyncio.sleep(60)
            return await super().CallTool(request, context)

    reward = Hanging()
    async with rollout_service(tmp_path, reward=reward, attempt_deadline_s=0.6, max_failures=2) as rollout:
        await follow(rollout, group_size=4, groups_per_step=1, max_staleness=0)
        done = await grading(rollout, 3)
        (stuck,) = await ended(rollout, 1)
        assert stuck.outcome is Outcome.INFRA_FAILED
        assert "hung for 0.6 s" in stuck.error
        assert stuck.episode_id in hanging
        assert {request.trajectory.group_id for request in done} == {stuck.group_id}


async def test_D10_episode_when_an_attempt_is_late_counts_the_live_one(tmp_path: Path) -> None:
    failed: set[str] = set()

    def first_times(session_id: str) -> SandboxError | None:
        if session_id.endswith("-1"):
            failed.add(session_id)
            return SandboxError("timed out")
        return None

    reward = ScriptedReward()
    reward.call_error = first_times
    async with rollout_service(tmp_path, reward=reward) as rollout:
        await follow(rollout, group_size=1, groups_per_step=1, max_staleness=0)
        (live,) = await grading(rollout, 1)
        assert live.trajectory.attempt == 2
        late = trajectory_pb2.Trajectory()
        late.CopyFrom(live.trajectory)
        late.attempt = 1
        late.trajectory_id = f"{late.episode_id}-1"
        await rollout.queue.publish(EVENTS, graded_event(late, 1.0))
        await rollout.queue.publish(EVENTS, graded_event(live.trajectory, 0.0))
        await rollout.queue.publish(EVENTS, graded_event(live.trajectory, 1.0))  # the same attempt again

        async def graded() -> Any:
            view = await rollout.get(f"/v1/episodes/{late.episode_id}")
            return view if view["state"] == "graded" else None

        view = await until(graded)
        await asyncio.sleep(0.1)
        view = await rollout.get(f"/v1/episodes/{late.episode_id}")
        assert (view["attempt"], view["reward"]) == (2, 0.0)
        assert len((await rollout.get("/v1/episodes?run_id=run_1"))["items"]) == 1


async def test_D12_episode_when_it_always_fails_ends_after_its_budget(tmp_path: Path) -> None:
    doomed: list[str] = []

    def one_task_fails(session_id: str) -> SandboxError | None:
        episode_id = session_id.rsplit("-", 1)[0]
        if not doomed:
            doomed.append(episode_id)
        return SandboxError("always raises") if episode_id in doomed else None

    reward = ScriptedReward()
    reward.open_error = one_task_fails
    async with rollout_service(tmp_path, reward=reward) as rollout:
        await follow(rollout, group_size=2, groups_per_step=2, max_staleness=0)
        others = await grading(rollout, 3)
        (dead,) = await ended(rollout, 1)
        assert (dead.attempt, dead.outcome) == (3, Outcome.INFRA_FAILED)
        assert dead.error == "sandbox: always raises"
        assert dead.group_id in {request.trajectory.group_id for request in others}
        view = await rollout.get(f"/v1/episodes/{dead.episode_id}")
        assert (view["state"], view["reward"], view["error"]) == ("infra_failed", None, dead.error)


async def test_D16_sampling_parameters_when_shared_by_requests_cannot_be_changed(tmp_path: Path) -> None:
    shared = SamplingParams(max_new_tokens=16)
    with pytest.raises(AttributeError):
        shared.max_new_tokens = 4  # type: ignore[misc]
    async with rollout_service(tmp_path) as rollout:
        # The second turn of each episode is cut by its token budget; the others keep their own bound.
        await follow(rollout, sampling=shared, group_size=2, groups_per_step=1, max_staleness=0)
        await grading(rollout, 2)
        asked = [request["sampling_params"]["max_new_tokens"] for request in rollout.engines[0].requests]
        assert set(asked) == {16}


async def test_D17_failures_when_the_platforms_carry_no_reward_and_the_policys_do(tmp_path: Path) -> None:
    kinds = [
        "sandbox could not start",
        "reward worker crashed",
        "agent wall-clock timeout",
        "agent broke its own sandbox",
    ]
    kind_of: dict[str, str] = {}

    def kind(session_id: str) -> str:
        episode_id = session_id.rsplit("-", 1)[0]
        return kind_of.setdefault(episode_id, kinds[len(kind_of) % 4])

    class Mixed(ScriptedReward):
        async def CallTool(self, request: Any, context: Any) -> Any:
            if kind(request.session_id) == "agent wall-clock timeout":
                return reward_pb2.CallToolResponse(
                    output="killed", is_error=True, limit_hit="wall", seconds=99
                )
            if kind(request.session_id) == "agent broke its own sandbox":
                return reward_pb2.CallToolResponse(
                    output="error: no shell", is_error=True, limit_hit="memory"
                )
            return await super().CallTool(request, context)

    reward = Mixed()
    reward.open_error = lambda session_id: (
        SandboxError("no namespace") if kind(session_id) == "sandbox could not start" else None
    )
    async with rollout_service(tmp_path, reward=reward, episode_wall_s=50) as rollout:
        await follow(rollout, group_size=4, groups_per_step=1, max_staleness=0)
        requests = await grading(rollout, 3)
        (unstarted,) = await ended(rollout, 1)
        assert kind(unstarted.trajectory_id) == "sandbox could not start"
        assert (unstarted.outcome, unstarted.reward) == (Outcome.INFRA_FAILED, None)
        outcomes = {
            kind(request.trajectory.trajectory_id): trajectory_from_pb(request.trajectory).outcome
            for request in requests
        }
        assert outcomes["agent wall-clock timeout"] is Outcome.TIMED_OUT
        assert outcomes["agent broke its own sandbox"] is Outcome.TRUNCATED, "its finish could not run"
        for request in requests:
            crashed = kind(request.trajectory.trajectory_id) == "reward worker crashed"
            await rollout.queue.publish(EVENTS, graded_event(request.trajectory, None if crashed else 0.0))

        async def settled() -> Any:
            items = (await rollout.get("/v1/episodes?run_id=run_1"))["items"]
            return items if all(item["state"] in ("graded", "infra_failed") for item in items) else None

        by_kind = {kind(f"{item['episode_id']}-1"): item for item in await until(settled)}
        assert [by_kind[name]["reward"] for name in kinds] == [None, None, 0.0, 0.0]
        assert [by_kind[name]["outcome"] for name in kinds] == [
            "infra_failed",
            "infra_failed",
            "timed_out",
            "truncated",
        ]


async def test_F08_task_when_posted_twenty_times_with_one_key_exists_once(tmp_path: Path) -> None:
    body = task_body("new") | {"suite": "bugs"}
    async with rollout_service(tmp_path) as rollout:
        await rollout.post("/v1/suites", suite_body(1), expect=201)
        answers = await asyncio.gather(
            *(rollout.post("/v1/tasks", body, expect=201, key="k1") for _ in range(20))
        )
        assert len({answer["task_id"] for answer in answers}) == 1
        assert len((await rollout.get("/v1/tasks"))["items"]) == 2
        problem = await rollout.post("/v1/tasks", body | {"name": "other"}, expect=422, key="k1")
        assert problem["errors"][0]["field"] == "Idempotency-Key"
    async with rollout_service(tmp_path) as rollout:  # a restart
        again = await rollout.post("/v1/tasks", body, expect=201, key="k1")
        assert again == answers[0]
        assert len((await rollout.get("/v1/tasks"))["items"]) == 2


@pytest.mark.parametrize("order", ["cancel then finish", "finish then cancel", "cancel while claimed"])
async def test_F09_episode_when_cancelled_and_finished_keeps_its_first_end(
    tmp_path: Path, order: str
) -> None:
    async with rollout_service(tmp_path) as rollout:
        if order != "finish then cancel":
            rollout.engines[0].hold.clear()
        await follow(rollout, group_size=1, groups_per_step=1, max_staleness=0)
        if order == "cancel while claimed":
            await until(lambda: rollout.engines[0].num_running)
        items = await until(lambda: _items(rollout))
        path = f"/v1/episodes/{items[0]['episode_id']}"
        if order == "finish then cancel":
            (request,) = await rollout.graded(1, lambda request: 1.0)
            assert request.trajectory.episode_id == items[0]["episode_id"]
            await until(lambda: _state(rollout, path, "graded"))
            problem = await rollout.post(f"{path}:cancel", {}, expect=409)
            assert problem["code"] == "conflict"
            assert (await rollout.get(path))["reward"] == 1.0
            return
        assert (await rollout.post(f"{path}:cancel", {}, expect=200))["state"] == "cancelled"
        (sent,) = await ended(rollout, 1)
        assert (sent.outcome, sent.num_trained_tokens) == (Outcome.CANCELLED, 0)
        sent.check()
        await until(lambda: not rollout.reward.open_sessions, timeout_s=10)
        rollout.engines[0].hold.set()
        await rollout.queue.publish(
            EVENTS,
            graded_event(
                trajectory_pb2.Trajectory(
                    episode_id=items[0]["episode_id"],
                    attempt=1,
                    outcome=trajectory_pb2.OUTCOME_COMPLETED,
                ),
                1.0,
            ),
        )
        await asyncio.sleep(0.2)
        view = await rollout.get(path)
        assert (view["state"], view["reward"]) == ("cancelled", None)
        assert (await rollout.queue.depth(GRADING, "reward")).undelivered == 0
        await rollout.post(f"{path}:cancel", {}, expect=409)


async def _items(rollout: Rollout) -> Any:
    return (await rollout.get("/v1/episodes?run_id=run_1"))["items"]


async def _state(rollout: Rollout, path: str, state: str) -> bool:
    return bool((await rollout.get(path))["state"] == state)


async def test_F10_pages_when_rows_share_a_moment_and_others_come_between_show_each_once(
    tmp_path: Path,
) -> None:
    async with rollout_service(tmp_path, workers=[]) as rollout:
        body = suite_body(50)
        await rollout.post("/v1/suites", body, expect=201)
        seen: list[str] = []
        token = ""
        for page in range(10):
            answer = await rollout.get(f"/v1/tasks?page_size=20{token}")
            seen += [task["name"] for task in answer["items"]]
            if page == 0:
                for number in range(5):
                    await rollout.post(
                        "/v1/tasks", task_body(f"between-{number}") | {"suite": "bugs"}, expect=201
                    )
            if answer["next_page_token"] is None:
                break
            token = f"&page_token={answer['next_page_token']}"
        assert sorted(name for name in seen if name.startswith("task-")) == sorted(
            task["name"] for task in body["tasks"]
        )
        assert len(seen) == len(set(seen)) == 55
        problem = await rollout.get("/v1/tasks?page_token=nonsense", expect=422)
        assert problem["errors"][0]["field"] == "page_token"
        await rollout.get("/v1/tasks?page_size=100000", expect=422)


async def test_D20_version_when_the_update_fails_stays_for_everyone(tmp_path: Path) -> None:
    async with rollout_service(tmp_path) as rollout:
        await follow(rollout, group_size=1, groups_per_step=1, max_staleness=0)
        await rollout.publish("run_1", 7)
        request = rollout_pb2.PublishWeightsRequest(run_id="run_1", weight_version=8, path="/models/half")
        answer = await rollout.service.servicer.PublishWeights(request, None)  # type: ignore[arg-type]
        assert (answer.ok, answer.weight_version) == (False, 7)
        assert (await rollout.get("/v1/engines"))["weight_version"] == 7
        assert rollout.pool.serving is not None
        assert rollout.pool.serving.weight_version == 7
        assert rollout.trainer.runs["run_1"].state is RunState.RUNNING
        (made,) = await grading(rollout, 1)
        assert set(trajectory_from_pb(made.trajectory).version_range() or ()) <= {0, 7}
