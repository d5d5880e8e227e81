"""Takes grades from the events stream into SQL.

Acknowledged after the commit; a second delivery is a no-op.
"""

import asyncio

from practicum.clock import Clock
from practicum.errors import IntakeError, QueueError
from practicum.pauses import pause
from practicum.queue.base import Entry, Queue
from practicum.queue.streams import EVENTS
from practicum.telemetry.logs import get_logger
from practicum.v1.events_pb2 import TrajectoryGraded
from practicum.wire import outcome_from_pb
from services.rollout.metrics import Metrics
from services.rollout.store.episodes import EpisodeStore, GradeNote

log = get_logger("rollout.grades")

GROUP = "rollout"
_BATCH = 128
_WAIT_S = 0.5


class GradeTaker:
    """The worker that follows the events."""

    def __init__(
        self, *, queue: Queue, store: EpisodeStore, metrics: Metrics, clock: Clock, consumer: str
    ) -> None:
        self._queue = queue
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._consumer = consumer

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; a lost queue is waited for."""
        is_ready = False
        while not stop.is_set():
            try:
                if not is_ready:
                    await self._queue.ensure_group(EVENTS, GROUP)
                    is_ready = True
                    await self.take(await self._queue.read_own_pending(EVENTS, GROUP, self._consumer))
                entries = await self._queue.read(
                    EVENTS, GROUP, self._consumer, max_entries=_BATCH, wait_s=_WAIT_S
                )
                await self.take(entries)
            except QueueError as error:
                is_ready = False  # a queue that came back empty has no group
                log.warning("grades.queue", error=str(error))
                await pause(stop, _WAIT_S)
            except Exception:
                log.exception("grades.failed")
                self._metrics.errors.labels("grades").inc()
                await pause(stop, _WAIT_S)

    async def take(self, entries: list[Entry]) -> None:
        """Store the grades among these entries in one transaction, then acknowledge all."""
        if not entries:
            return
        notes = [note for entry in entries if (note := _note(entry)) is not None]
        if notes:
            num_stored = await self._store.record_grades(notes, self._clock.now())
            self._metrics.grades.inc(num_stored)
            if num_stored < len(notes):
                log.info("grades.ignored", number=len(notes) - num_stored)
        await self._queue.ack(EVENTS, GROUP, [entry.entry_id for entry in entries])


def _note(entry: Entry) -> GradeNote | None:
    if entry.envelope.type != TrajectoryGraded.DESCRIPTOR.full_name:
        return None
    try:
        graded = entry.unpack(TrajectoryGraded)
        outcome = outcome_from_pb(graded.outcome)
    except IntakeError as error:
        log.error("grades.unreadable", entry_id=entry.entry_id, error=str(error))
        return None
    is_graded = graded.grade.HasField("reward")
    return GradeNote(
        episode_id=graded.episode_id,
        attempt=graded.attempt,
        outcome=outcome,
        reward=graded.grade.reward if is_graded else None,
        grade=graded.grade.SerializeToString(),
        error="" if is_graded else "; ".join(graded.grade.evidence) or "the reward service gave no reason",
    )
