"""Runs from request to served weights, in this process, with a real model and real SQL."""

import asyncio
import errno
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from practicum.errors import QueueError
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import trajectories as stream_of
from practicum.trajectory import Outcome
from services.trainer.checkpoints.manifest import verify_folder
from services.trainer.megatron.backend import MegatronBackend
from services.trainer.spec import RunState
from services.trainer.store import TrainerStore
from services.trainer.store.records import CheckpointRecord
from services.trainer.store.runs import RunStore
from tests.fixtures.trainer import VOCAB_SIZE, failed, model_folder, row, trajectory
from tests.fixtures.trainer_service import RecordingRollout, Trainer, serving

SFT: dict[str, Any] = {"stage": "sft", "rollout": None, "trajectories_per_step": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


async def send_group(
    trainer: Trainer, run_id: str, group: int, rewards: Sequence[float] = (0.0, 1.0)
) -> None:
    await trainer.send(
        *(
            trajectory(run_id=run_id, group=group, episode=k, reward=reward)
            for k, reward in enumerate(rewards)
        )
    )


async def until_nothing_is_owed(trainer: Trainer, run_id: str) -> None:
    async with asyncio.timeout(10):
        while True:
            depth = await trainer.queue.depth(stream_of(run_id), "trainer")
            if (depth.undelivered, depth.pending) == (0, 0):
                return
            await asyncio.sleep(0.02)


async def test_run_when_groups_arrive_steps_commits_and_publishes(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model)
        body = await trainer.until(run_id, lambda body: body["published_version"] == 0)
        assert body["activity"]["phase"] == "waiting_for_groups"
        await send_group(trainer, run_id, 0)
        body = await trainer.until(run_id, lambda body: body["published_version"] == 1)
        (step,) = body["steps"]
        assert (step["reward_mean"], step["groups"], step["trajectories"], step["updated"]) == (
            0.5,
            1,
            2,
            True,
        )
        assert step["tokens_trained"] == 8
        assert step["publish_s"] > 0
        assert step["commit_s"] < 2
        await send_group(trainer, run_id, 1)
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert (body["weight_version"], body["published_version"], body["activity"]) == (2, 2, None)
        depth = await trainer.queue.depth(stream_of(run_id), "trainer")
        assert (depth.undelivered, depth.pending) == (0, 0)

        listed = (await trainer.client.get("/v1/checkpoints", params={"run_id": run_id})).json()["items"]
        assert [checkpoint["weight_version"] for checkpoint in listed] == [2, 1, 0]
        assert listed[2]["retired_at"] is not None  # the newest two are kept
        base, last = (load_file(Path(at) / "model.safetensors") for at in (model, listed[0]["path"]))
        assert set(base) == set(last)
        assert any(not np.array_equal(base[name], last[name]) for name in base)
        verify_folder(Path(listed[0]["path"]), manifest_sha256=listed[0]["manifest_sha256"])

    first, second, third = trainer.rollout.requests
    assert [first.rollback, second.rollback, third.rollback] == [True, False, False]
    assert all(len(request.probes) >= 1 for request in (first, second, third))
    logprobs_T = np.frombuffer(second.probes[0].logprobs, dtype="<f4")
    assert logprobs_T[0] == 0
    assert (logprobs_T[1:] < 0).all()


async def test_run_when_all_groups_say_nothing_still_ends_with_the_weights_as_they_were(
    tmp_path: Path, model: Path
) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model)
        for group in range(2):
            await send_group(trainer, run_id, group, rewards=(1.0, 1.0))
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert [step["zero_variance_groups"] for step in body["steps"]] == [1, 1]
        assert [step["skipped_reason"] for step in body["steps"]] == ["no_trained_tokens"] * 2
        last = (await trainer.client.get("/v1/checkpoints", params={"run_id": run_id})).json()["items"][0]
        assert last["weight_version"] == 2
        base, same = (load_file(Path(at) / "model.safetensors") for at in (model, last["path"]))
        assert all(np.array_equal(base[name], same[name]) for name in base)


async def test_run_when_trajectories_are_bad_sets_them_aside_and_closes_their_group(
    tmp_path: Path, model: Path
) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(
            model, num_steps=1, rollout={"suite": "s", "group_size": 3, "groups_per_step": 1}
        )
        broken = trajectory(run_id=run_id, episode=0, group_size=3, rows=(row(first_id=VOCAB_SIZE + 1),))
        broken = replace(broken, checksum="0" * 64)
        await trainer.send(
            broken,
            trajectory(run_id=run_id, episode=1, reward=0.0, group_size=3),
            trajectory(run_id=run_id, episode=2, reward=1.0, group_size=3),
        )
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert body["quarantined"] == 1
        step = body["steps"][0]
        assert (step["trajectories"], step["quarantined"], step["infra_failed"]) == (2, 1, 0)
        listed = (await trainer.client.get(f"/v1/runs/{run_id}/quarantine")).json()["items"]
        assert [(entry["trajectory_id"], entry["reason"]) for entry in listed] == [
            (broken.trajectory_id, "checksum")
        ]
        assert await trainer.store.quarantine.payload(broken.trajectory_id) is not None


async def test_sft_run_when_demonstrations_arrive_trains_in_order_and_publishes_the_last(
    tmp_path: Path, model: Path
) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=3, **SFT)
        for number in range(6):
            await trainer.send(trajectory(run_id=run_id, group=number, group_size=1, reward=None))
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        losses = [step["loss"] for step in body["steps"]]
        assert losses[2] < losses[0]
        assert trainer.rollout.versions == [3]
        assert body["published_version"] == 3


async def test_publish_when_it_fails_is_retried_and_shown(tmp_path: Path, model: Path) -> None:
    rollout = RecordingRollout(failures=2, refuse=True)
    async with serving(tmp_path, rollout=rollout) as trainer:
        run_id = await trainer.make_run(model)
        body = await trainer.until(run_id, lambda body: "logprobs differ" in body["publish_error"])
        assert (body["published_version"], body["state"]) == (None, "running")
        await send_group(trainer, run_id, 0)  # training does not wait for it
        await trainer.until(run_id, lambda body: body["weight_version"] == 1)
        rollout.refuse = False
        body = await trainer.until(run_id, lambda body: body["published_version"] == 1)
        assert body["publish_error"] == ""
        assert not body["publish_pending"]


async def test_run_when_its_last_version_is_never_served_ends_and_says_so(
    tmp_path: Path, model: Path
) -> None:
    rollout = RecordingRollout(hang=True)
    async with serving(tmp_path, rollout=rollout, publish_patience_s=0.1) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        await send_group(trainer, run_id, 0)
        body = await trainer.until(run_id, lambda body: body["weight_version"] == 1)
        assert body["publish_pending"] or body["state"] == "completed"
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert (body["weight_version"], body["published_version"]) == (1, None)
        assert not body["publish_pending"]
        assert "not served within 0.1 s" in body["publish_error"]


async def test_pause_when_running_holds_and_resume_goes_on(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        first = await trainer.make_run(model)
        await trainer.until(first, lambda body: body["state"] == "running")
        second = await trainer.make_run(model)
        assert (await trainer.run_body(second))["state"] == "pending"
        assert (await trainer.post(f"/v1/runs/{first}:pause")).json()["state"] == "paused"
        await trainer.until(second, lambda body: body["state"] == "running")  # the trainer is free for it
        await send_group(trainer, first, 0)
        await send_group(trainer, first, 1)
        assert (await trainer.post(f"/v1/runs/{first}:resume")).status_code == 200
        assert (await trainer.post(f"/v1/runs/{second}:stop")).json()["state"] == "stopped"
        body = await trainer.until(first, lambda body: body["state"] == "completed")
        assert len(body["steps"]) == 2
        assert trainer.rollout.cancelled == [second]
        for verb in ("pause", "resume", "stop"):
            for run_id in (first, second):
                assert (await trainer.post(f"/v1/runs/{run_id}:{verb}")).status_code == 409


async def test_start_paused_when_asked_serves_the_base_and_waits(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, start_paused=True)
        body = await trainer.until(run_id, lambda body: body["published_version"] == 0)
        assert (body["state"], body["request"]["start_paused"]) == ("paused", True)
        await send_group(trainer, run_id, 0)
        await send_group(trainer, run_id, 1)
        body = await trainer.until(run_id, lambda body: body["activity"] is None)
        assert (body["state"], body["weight_version"]) == ("paused", 0)
        await trainer.post(f"/v1/runs/{run_id}:resume")
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert body["weight_version"] == 2
    assert trainer.rollout.versions == [0, 0, 1, 2] or trainer.rollout.versions == [0, 0, 2]


class StopsBeforeCommit(RunStore):
    """A caller who stops the run while a step is being computed."""

    def __init__(self, inner: RunStore) -> None:
        super().__init__(inner._engine, inner._clock)

    async def commit_step(self, run_id: str, **options: Any) -> CheckpointRecord:
        """Stop it, then try to commit."""
        await self.change_state(run_id, RunState.STOPPED, allowed={RunState.RUNNING})
        return await super().commit_step(run_id, **options)


async def test_F09_stop_when_a_step_is_being_computed_drops_the_step(tmp_path: Path, model: Path) -> None:
    def stopping(store: TrainerStore) -> TrainerStore:
        return replace(store, runs=StopsBeforeCommit(store.runs))

    async with serving(tmp_path, wrap_store=stopping) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        body = await trainer.until(run_id, lambda body: body["state"] == "stopped")
        assert (body["weight_version"], body["steps"]) == (0, [])
        await until_nothing_is_owed(trainer, run_id)
        assert [path.name for path in (tmp_path / "checkpoints" / run_id).iterdir()] == ["v000000"]


async def test_stop_when_groups_wait_drops_their_entries(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model)
        await trainer.send(trajectory(run_id=run_id))
        await trainer.until(
            run_id, lambda body: bool(body["activity"]) and body["activity"]["groups_partial"] == 1
        )
        assert trainer.worker.find(trajectory(run_id=run_id).trajectory_id) is not None
        await trainer.post(f"/v1/runs/{run_id}:stop")
        await trainer.until(run_id, lambda body: body["activity"] is None)
        await until_nothing_is_owed(trainer, run_id)
        assert trainer.worker.find(trajectory(run_id=run_id).trajectory_id) is None


async def test_F21_run_when_no_batch_is_usable_fails_with_the_reason(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=5)
        for group in range(3):
            await trainer.send(*(failed(run_id=run_id, group=group, episode=k) for k in range(2)))
        body = await trainer.until(run_id, lambda body: body["state"] == "failed")
        assert "3 batches in a row held no usable trajectory" in body["error"]
        assert "no sandbox could be made" in body["error"]
        assert (body["weight_version"], body["batches_discarded"], body["steps"]) == (0, 3, [])


async def test_F21_run_when_one_batch_is_unusable_goes_on_with_the_next(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        cancelled = trajectory(run_id=run_id, group=0, episode=1, reward=None, outcome=Outcome.CANCELLED)
        await trainer.send(failed(run_id=run_id), cancelled)
        await trainer.until(run_id, lambda body: body["batches_discarded"] == 1)
        await send_group(trainer, run_id, 1)
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert (body["weight_version"], body["groups_consumed"]) == (1, 2)


class HeldStep(MegatronBackend):
    """Computes a step only when it is let."""

    begun = threading.Event()
    let = threading.Event()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.let.wait(60)
        return super().train(*args, **kwargs)


async def test_stop_when_a_step_is_being_computed_commits_it_whole(tmp_path: Path, model: Path) -> None:
    HeldStep.begun.clear()
    HeldStep.let.clear()
    queue = MemoryQueue(claim_after_s=1e9)
    async with serving(tmp_path, queue=queue, load_backend=HeldStep.load) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        await send_group(trainer, run_id, 1)
        assert await asyncio.to_thread(HeldStep.begun.wait, 60)
        trainer.stop.set()
        HeldStep.let.set()
        await trainer.working
        assert (await trainer.store.runs.get(run_id)).weight_version == 1
        assert (await trainer.queue.depth(stream_of(run_id), "trainer")).pending <= 2, "one group is owed"
    async with serving(tmp_path, queue=queue) as again:
        body = await again.until(run_id, lambda body: body["state"] == "completed")
        assert [step["trajectories"] for step in body["steps"]] == [2, 2]


async def test_stop_when_a_step_takes_too_long_drops_it_whole(tmp_path: Path, model: Path) -> None:
    HeldStep.begun.clear()
    HeldStep.let.clear()
    queue = MemoryQueue(claim_after_s=1e9)
    async with serving(tmp_path, queue=queue, load_backend=HeldStep.load) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        assert await asyncio.to_thread(HeldStep.begun.wait, 60)
        trainer.stop.set()
        trainer.working.cancel()
        HeldStep.let.set()
        await asyncio.wait([trainer.working])
        assert trainer.working.cancelled()
        run = await trainer.store.runs.get(run_id)
        assert (run.weight_version, run.groups_consumed) == (0, 0)
        assert (await trainer.queue.depth(stream_of(run_id), "trainer")).pending == 2
        assert [path.name for path in (tmp_path / "checkpoints" / run_id).iterdir()] == ["v000000"]
    async with serving(tmp_path, queue=queue) as again:
        await send_group(again, run_id, 1)
        body = await again.until(run_id, lambda body: body["state"] == "completed")
        assert [step["trajectories"] for step in body["steps"]] == [2, 2]


class FullDisk(MegatronBackend):
    """A backend whose disk is full until somebody makes room."""

    is_full = True

    def export(self, folder: Path, *, dtype: str | None = None) -> None:
        """Write half of it, then fail."""
        super().export(folder, dtype=dtype)
        if FullDisk.is_full:
            (folder / "model.safetensors").unlink()
            raise OSError(errno.ENOSPC, "No space left on device")


async def test_F14_step_when_the_disk_is_full_waits_visibly_and_goes_on_when_there_is_room(
    tmp_path: Path, model: Path
) -> None:
    FullDisk.is_full = True
    async with serving(tmp_path, load_backend=FullDisk.load) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        await send_group(trainer, run_id, 0)
        body = await trainer.until(
            run_id, lambda body: bool(body["activity"]) and "No space left" in body["activity"]["problem"]
        )
        assert (body["state"], body["weight_version"], body["activity"]["phase"]) == (
            "running",
            0,
            "committing",
        )
        FullDisk.is_full = False
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert body["steps"][0]["trajectories"] == 2
        names = sorted(path.name for path in (tmp_path / "checkpoints" / run_id).iterdir())
        assert names == ["v000000", "v000001"]


async def test_F14_step_when_the_disk_stays_full_fails_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    FullDisk.is_full = True
    async with serving(tmp_path, load_backend=FullDisk.load, checkpoint_patience_s=0.05) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        await send_group(trainer, run_id, 0)
        body = await trainer.until(run_id, lambda body: body["state"] == "failed")
        assert "No space left on device" in body["error"]
        (kept,) = await trainer.store.checkpoints.kept(run_id)
        verify_folder(Path(kept.path), manifest_sha256=kept.manifest_sha256)
        assert [path.name for path in (tmp_path / "checkpoints" / run_id).iterdir()] == ["v000000"]


# Crashes between the parts of a step. A crash in this process is an error out of the part concerned;
# the restart is a new service over the same files and the same queue.


class AckFails(MemoryQueue):
    """A queue that is away when the step's entries are to be acknowledged."""

    failing = True

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Fail where there is something to acknowledge."""
        if self.failing and entry_ids:
            raise QueueError("connection lost")
        await super().ack(stream, group, entry_ids)


async def test_restart_when_the_database_is_postgresql_goes_on_from_the_last_step(
    tmp_path: Path, model: Path, postgres_url: str
) -> None:
    queue = MemoryQueue(claim_after_s=1e9)
    async with serving(tmp_path, queue=queue, database_url=postgres_url) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        await trainer.send(trajectory(run_id=run_id, group=1, episode=0, reward=0.0))
        await trainer.until(run_id, lambda body: body["weight_version"] == 1)
    async with serving(tmp_path, queue=queue, database_url=postgres_url) as trainer:
        await trainer.send(trajectory(run_id=run_id, group=1, episode=1, reward=1.0))
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert [step["trajectories"] for step in body["steps"]] == [2, 2]
        assert body["steps"][1]["updated"]


async def test_F18_restart_when_the_step_committed_but_was_not_acknowledged_trains_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    queue = AckFails(claim_after_s=1e9)
    async with serving(tmp_path, queue=queue) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        await trainer.until(run_id, lambda body: body["weight_version"] == 1)
    assert (await queue.depth(stream_of(run_id), "trainer")).pending == 2
    queue.failing = False
    async with serving(tmp_path, queue=queue) as trainer:
        await trainer.until(run_id, lambda body: body["published_version"] == 1)
        body = await trainer.until(run_id, lambda body: body["activity"]["phase"] == "waiting_for_groups")
        assert (body["weight_version"], body["groups_consumed"]) == (1, 1)
        assert (await queue.depth(stream_of(run_id), "trainer")).pending == 0
        await send_group(trainer, run_id, 1)
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert [step["trajectories"] for step in body["steps"]] == [2, 2]
    assert (await queue.depth(stream_of(run_id), "trainer")).pending == 0


class CommitFails(RunStore):
    """A database that goes away when a step is to be committed, some times."""

    def __init__(self, inner: RunStore, times: int) -> None:
        super().__init__(inner._engine, inner._clock)
        self.times = times

    async def commit_step(self, run_id: str, **options: Any) -> CheckpointRecord:
        """Fail before anything is written."""
        if self.times:
            self.times -= 1
            raise ConnectionError("the database went away")
        return await super().commit_step(run_id, **options)


async def test_restart_when_the_folder_was_written_but_not_committed_trains_the_same_groups_again(
    tmp_path: Path, model: Path
) -> None:
    def breaking(store: TrainerStore) -> TrainerStore:
        return replace(store, runs=CommitFails(store.runs, times=2))

    async with serving(tmp_path, wrap_store=breaking) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        await send_group(trainer, run_id, 0)
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        assert (body["weight_version"], body["steps"][0]["trajectories"]) == (1, 2)
        last = (await trainer.client.get("/v1/checkpoints", params={"run_id": run_id})).json()["items"][0]
        through_failure = load_file(Path(last["path"]) / "model.safetensors")
    async with serving(tmp_path / "other") as trainer:
        again = await trainer.make_run(model, num_steps=1)
        await send_group(trainer, again, 0)
        await trainer.until(again, lambda body: body["state"] == "completed")
        last = (await trainer.client.get("/v1/checkpoints", params={"run_id": again})).json()["items"][0]
        straight = load_file(Path(last["path"]) / "model.safetensors")
    # The weights that survive are those of one step on these groups, not of three.
    assert all(np.array_equal(through_failure[name], straight[name]) for name in straight)


async def test_restart_when_a_run_continues_equals_the_run_that_never_stopped(
    tmp_path: Path, model: Path
) -> None:
    weights = []
    for name, restarts in (("straight", False), ("restarted", True)):
        folder, queue = tmp_path / name, MemoryQueue(claim_after_s=1e9)
        folder.mkdir()
        async with serving(folder, queue=queue) as trainer:
            run_id = await trainer.make_run(model, num_steps=3, optimizer={"lr": 0.01, "schedule": "linear"})
            for group in range(1 if restarts else 3):
                await send_group(trainer, run_id, group)
            await trainer.until(run_id, lambda body: body["weight_version"] >= 1)
            if not restarts:
                await trainer.until(run_id, lambda body: body["state"] == "completed")
        if restarts:
            async with serving(folder, queue=queue) as trainer:
                for group in (1, 2):
                    await send_group(trainer, run_id, group)
                await trainer.until(run_id, lambda body: body["state"] == "completed")
        record = await _last_checkpoint(folder, run_id)
        weights.append(load_file(Path(record) / "model.safetensors"))
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


async def _last_checkpoint(folder: Path, run_id: str) -> str:
    return str(max((folder / "checkpoints" / run_id).glob("v*")))


async def test_open_when_the_committed_checkpoint_changed_on_disk_fails_the_run(
    tmp_path: Path, model: Path
) -> None:
    queue = MemoryQueue(claim_after_s=1e9)
    async with serving(tmp_path, queue=queue) as trainer:
        run_id = await trainer.make_run(model)
        await send_group(trainer, run_id, 0)
        await trainer.until(run_id, lambda body: body["weight_version"] == 1)
    weights = Path(await _last_checkpoint(tmp_path, run_id)) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    async with serving(tmp_path, queue=queue) as trainer:
        body = await trainer.until(run_id, lambda body: body["state"] == "failed")
        assert "model.safetensors is not what the manifest says" in body["error"]
