"""Cases of the trainer service, each named by its id: what went wrong elsewhere must not go wrong here."""

from pathlib import Path

import pytest

from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import trajectories as stream_of
from practicum.trajectory import MaskReason, Trajectory
from services.trainer.intake.groups import Admission, Arrival, GroupAssembler
from services.trainer.step import run_step
from tests.fixtures.trainer import ScriptedBackend, complete_group, model_folder, rl_spec, row, trajectory
from tests.fixtures.trainer_service import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


async def test_C26_dropping_all_equal_groups_never_loops_for_ever(tmp_path: Path, model: Path) -> None:
    """Input: every group all 1, at most 10 rounds."""
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=10)
        for group in range(10):
            await trainer.send(
                *(trajectory(run_id=run_id, group=group, episode=k, reward=1.0) for k in range(2))
            )
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
    assert [step["zero_variance_groups"] for step in body["steps"]] == [1] * 10
    assert not any(step["updated"] for step in body["steps"])


def test_D04_a_trajectory_of_many_turns_is_judged_by_each_token() -> None:
    """Input: turns of versions 3, 5, 5; the trainer at 6; at most 2 behind."""
    backend = ScriptedBackend()
    groups = [complete_group([0.0, 1.0], rows=(row(versions=(3, 5, 5)),))]
    outcome = run_step(backend, groups, rl_spec(max_staleness=2), weight_version=6)
    assert [trained.trained_T[3:].tolist() for trained in backend.rows] == [[False, True, True]] * 2
    assert outcome.tokens_by_reason[MaskReason.EXPIRED] == 2
    assert outcome.staleness is not None
    assert (outcome.staleness.min, outcome.staleness.max) == (1, 3)


def test_D10_a_task_that_two_workers_finish_counts_once() -> None:
    """Input: attempt 1 times out and answers 1.0 late; attempt 2 answers 0.0."""
    assembler = GroupAssembler(2)
    live = trajectory(attempt=2, reward=0.0)
    late = trajectory(attempt=1, reward=1.0)
    other = trajectory(episode=1, reward=1.0)
    assembler.add(Arrival(trajectory=live, entry_ids=("live",), usable=True))
    refused = assembler.add(Arrival(trajectory=late, entry_ids=("late",), usable=True))
    assembler.add(Arrival(trajectory=other, entry_ids=("other",), usable=True))
    (group,) = assembler.take(1)
    assert refused.admission is Admission.SUPERSEDED
    assert [member.reward for member in group.usable] == [0.0, 1.0]
    after = assembler.add(Arrival(trajectory=late, entry_ids=("again",), usable=True))
    assert after.admission is Admission.SUPERSEDED


async def test_D10_a_late_attempt_is_refused_and_counted(tmp_path: Path, model: Path) -> None:
    """The same through the service: the count of refused attempts is shown."""
    async with serving(tmp_path) as trainer:
        run_id = await trainer.make_run(model, num_steps=1)
        await trainer.send(
            trajectory(run_id=run_id, attempt=2, reward=0.0),
            trajectory(run_id=run_id, attempt=1, reward=1.0),
            trajectory(run_id=run_id, attempt=2, reward=0.0),
            trajectory(run_id=run_id, episode=1, reward=1.0),
        )
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
    assert body["refused"] == {"duplicate": 1, "superseded": 1}
    assert body["steps"][0]["reward_mean"] == 0.5


async def test_D13_resume_trains_what_was_generated_and_not_trained(tmp_path: Path, model: Path) -> None:
    """Input: tasks 0..7, six generated, two trained, then a crash after the checkpoint."""
    queue = MemoryQueue(claim_after_s=1e9)

    async with serving(tmp_path, queue=queue) as trainer:
        run_id = await trainer.make_run(model, num_steps=8)
        await trainer.send(*_pair(run_id, 0), *_pair(run_id, 1))
        await trainer.until(run_id, lambda body: body["weight_version"] == 2)
        # Read and held, but not enough to be trained: the first half of each group only.
        await trainer.send(*(_pair(run_id, task)[0] for task in range(2, 6)))
        await trainer.until(
            run_id, lambda body: bool(body["activity"]) and body["activity"]["groups_partial"] == 4
        )
    async with serving(tmp_path, queue=queue) as trainer:
        await trainer.send(*(_pair(run_id, task)[1] for task in range(2, 6)))
        await trainer.send(*_pair(run_id, 6), *_pair(run_id, 7))
        body = await trainer.until(run_id, lambda body: body["state"] == "completed")
        consumed = await trainer.store.runs.consumed(run_id)
    assert len(body["steps"]) == 8
    assert sorted(consumed.attempts) == sorted(
        f"ep_{run_id}_{task}_{k}" for task in range(8) for k in range(2)
    )
    assert (await queue.depth(stream_of(run_id), "trainer")).pending == 0


def _pair(run_id: str, task: int) -> list[Trajectory]:
    return [trajectory(run_id=run_id, group=task, episode=k, reward=float(k)) for k in range(2)]
