"""What the worker does with what a session raises."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import QueueError
from practicum.queue import Entry
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import trajectories as stream_of
from tests.fixtures.trainer import model_folder, rl_spec, trajectory
from tests.fixtures.trainer_service import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


class KeepsStreams(MemoryQueue):
    """A queue that is away whenever a stream is to be removed."""

    def __init__(self) -> None:
        super().__init__(claim_after_s=1e9)
        self.num_refused = 0

    async def delete(self, stream: str) -> None:
        """Refuse."""
        self.num_refused += 1
        raise QueueError("connection refused")


async def test_run_when_its_stream_cannot_be_removed_ends_all_the_same(tmp_path: Path, model: Path) -> None:
    queue = KeepsStreams()
    async with serving(tmp_path, queue=queue) as trainer:
        first = await trainer.make_run(model, num_steps=1)
        await trainer.send(*(trajectory(run_id=first, episode=k, reward=float(k)) for k in range(2)))
        await trainer.until(first, lambda body: body["state"] == "completed")
        second = await trainer.make_run(model)
        # Only a run that waits for groups has a stream to remove.
        await trainer.until(
            second, lambda body: (body["activity"] or {}).get("phase") == "waiting_for_groups"
        )
        assert queue.num_refused == 1
        assert trainer.progress.activity(first) is None
        await trainer.post(f"/v1/runs/{second}:stop")
        await trainer.until(second, lambda _: queue.num_refused == 2)
        await trainer.until(second, lambda _: trainer.progress.activity(second) is None)


async def test_run_when_it_completes_leaves_no_stream(tmp_path: Path, model: Path) -> None:
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        members = [trajectory(run_id=run_id, group=k // 2, episode=k, reward=float(k % 2)) for k in range(3)]
        await trainer.send(*members)  # one is left over
        await trainer.until(run_id, lambda body: body["state"] == "completed")
        await trainer.until(run_id, lambda _: trainer.worker.find(members[2].trajectory_id) is None)
        assert await trainer.queue.read(stream_of(run_id), "anyone", "a", max_entries=9, wait_s=0.01) == []


class AwayQueue(MemoryQueue):
    """A queue that is away until it is let back."""

    def __init__(self) -> None:
        super().__init__(claim_after_s=1e9)
        self.is_away = True
        self.num_refused = 0

    async def read(self, stream: str, group: str, consumer: str, **options: Any) -> list[Entry]:
        """Refuse while away."""
        if self.is_away:
            self.num_refused += 1
            raise QueueError("connection refused")
        return await super().read(stream, group, consumer, **options)


async def test_run_when_the_queue_is_away_waits_for_it_without_failing(tmp_path: Path, model: Path) -> None:
    queue = AwayQueue()
    async with serving(tmp_path, queue=queue) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        body = await trainer.until(
            run_id, lambda body: bool(body["activity"]) and body["activity"]["phase"] == "retrying"
        )
        assert body["activity"]["problem"] == "connection refused"
        async with asyncio.timeout(30):
            while True:  # more often than an error of another kind would be forgiven
                if queue.num_refused > 5:
                    break
                await asyncio.sleep(0.02)
        queue.is_away = False
        await trainer.send(*(trajectory(run_id=run_id, episode=k, reward=float(k)) for k in range(2)))
        await trainer.until(run_id, lambda body: body["state"] == "completed")


async def test_run_when_the_model_cannot_be_fails_at_once_and_the_next_run_goes_on(
    tmp_path: Path, model: Path
) -> None:
    broken = model_folder(tmp_path / "broken")
    text = (broken / "config.json").read_text().replace('"LlamaForCausalLM"', '"ParrotForCausalLM"')
    (broken / "config.json").write_text(text.replace('"llama"', '"parrot"'))
    async with serving(tmp_path) as trainer:
        # As a folder that changed after the run was made.
        first = (await trainer.store.runs.create(rl_spec(broken))).run_id
        second = await trainer.make_run(model, num_steps=1)
        body = await trainer.until(first, lambda body: body["state"] == "failed")
        assert "parrot" in body["error"].lower()
        await trainer.until(second, lambda body: body["state"] == "running")


async def test_run_when_the_weights_are_broken_fails_after_its_attempts(tmp_path: Path, model: Path) -> None:
    broken = model_folder(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not tensors")
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(broken)
        body = await trainer.until(run_id, lambda body: body["state"] == "failed")
        assert "model.safetensors" in body["error"]
        assert list((tmp_path / "checkpoints" / run_id).iterdir()) == []
