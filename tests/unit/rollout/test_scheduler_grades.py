"""What a grade without a reward leaves behind at its episode."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import EVENTS
from practicum.v1 import events_pb2, trajectory_pb2
from services.rollout.metrics import Metrics
from services.rollout.scheduler.grades import GROUP, GradeTaker
from services.rollout.store.episodes import EpisodeStore, GradeNote


class RecordingStore(EpisodeStore):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[GradeNote] = []

    async def record_grades(self, notes: Iterable[GradeNote], now: datetime) -> int:
        before = len(self.notes)
        self.notes += notes
        return len(self.notes) - before


@pytest.mark.parametrize(
    ("grade", "error"),
    [
        ({"evidence": ["no clean room", "bwrap: exit 1"]}, "no clean room; bwrap: exit 1"),
        ({}, "the reward service gave no reason"),
        ({"reward": 0.0, "evidence": ["not editable"]}, ""),
    ],
)
async def test_grade_when_it_holds_no_reward_gives_its_evidence_as_the_error(
    grade: dict[str, Any], error: str
) -> None:
    queue, store = MemoryQueue(claim_after_s=1e9), RecordingStore()
    taker = GradeTaker(
        queue=queue, store=store, metrics=Metrics(CollectorRegistry()), clock=SystemClock(), consumer="t"
    )
    await queue.ensure_group(EVENTS, GROUP)
    event = events_pb2.TrajectoryGraded(
        episode_id="ep_0",
        attempt=1,
        outcome=trajectory_pb2.OUTCOME_INFRA_FAILED,
        grade=trajectory_pb2.Grade(**grade),
    )
    await queue.publish(EVENTS, event)
    await taker.take(await queue.read(EVENTS, GROUP, "t", max_entries=9, wait_s=0.1))
    (note,) = store.notes
    assert note.error == error
    assert note.reward == grade.get("reward")
