"""From an entry of the grading stream to a graded trajectory, read from top to bottom.

Delivery is at least once: a trajectory that has its grade is published again, not graded again. An entry is
acknowledged only after its grade is stored and published, so that a crash anywhere redelivers it.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from practicum.clock import Clock
from practicum.errors import InvalidInput, PracticumError, QueueError
from practicum.pauses import pause
from practicum.queue.base import Entry, Queue
from practicum.queue.streams import EVENTS, GRADING, trajectories
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Grade, Outcome, Trajectory
from practicum.v1 import events_pb2, reward_pb2
from practicum.wire import grade_to_pb, outcome_to_pb, trajectory_from_pb, trajectory_to_pb
from services.reward.grading import Graded, Grading
from services.reward.rpc.convert import changes_from_pb, task_from_pb
from services.reward.sandbox.limits import SandboxLimits
from services.reward.store.grades import GradeStore, StoredGrade

GROUP = "reward"
READ_WAIT_S = 1.0
RETRY_S = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingWorker:
    """Grades several episodes at a time."""

    queue: Queue
    grading: Grading
    store: GradeStore
    clock: Clock
    defaults: SandboxLimits
    consumer: str
    concurrency: int
    renew_every_s: float = 20.0  # less than the claim time, after which others take an entry over

    async def run(self, stop: asyncio.Event) -> None:
        """Consumes until told to stop, first what an earlier life left; what is in hand then is finished.

        Cancelled, it leaves what is in hand. What was read and not graded is given back, whatever ended it.
        """
        owed: deque[Entry] = deque()
        is_owed_known = False
        in_hand: dict[str, asyncio.Task[None]] = {}
        left: list[Entry] = []
        done = asyncio.Event()
        renewing = asyncio.create_task(self._renew(in_hand, owed, done))
        try:
            async with asyncio.TaskGroup() as group:
                while not stop.is_set():
                    free = self.concurrency - len(in_hand)
                    if free == 0:
                        await asyncio.wait(in_hand.values(), return_when=asyncio.FIRST_COMPLETED)
                        continue
                    try:
                        if not is_owed_known:
                            owed.extend(await self.queue.read_own_pending(GRADING, GROUP, self.consumer))
                            is_owed_known = True
                        entries = [owed.popleft()] if owed else await self._read(free)
                    except QueueError as error:
                        _log.warning("grading.read_failed", error=str(error))
                        await pause(stop, RETRY_S)
                        continue
                    for entry in entries:
                        if entry.entry_id in in_hand:
                            continue  # a grading longer than the claim time, claimed from ourselves
                        if stop.is_set():  # it was waited for when the stop came
                            left.append(entry)
                            continue
                        in_hand[entry.entry_id] = group.create_task(self._handle(entry, in_hand, left))
        finally:
            done.set()
            await renewing
            await self._give_back([*left, *owed])

    async def _renew(
        self, in_hand: Mapping[str, object], owed: Collection[Entry], done: asyncio.Event
    ) -> None:
        """Keep what is in hand or waits here from those who would take it for a dead consumer's."""
        while True:
            await pause(done, self.renew_every_s)
            if done.is_set():
                return
            ids = [*in_hand, *(entry.entry_id for entry in owed)]
            try:
                await self.queue.renew(GRADING, GROUP, self.consumer, ids)
            except QueueError as error:
                _log.warning("grading.not_renewed", entries=len(ids), error=str(error))

    async def _give_back(self, entries: Sequence[Entry]) -> None:
        try:
            ids = [entry.entry_id for entry in entries]
            await self.queue.give_back(GRADING, GROUP, self.consumer, ids)
        except QueueError as error:
            # Then they come again after the claim time.
            _log.warning("grading.not_given_back", entries=len(entries), error=str(error))
        else:
            if entries:
                _log.info("grading.given_back", entries=len(entries))

    async def _read(self, max_entries: int) -> list[Entry]:
        return await self.queue.read(
            GRADING, GROUP, self.consumer, max_entries=max_entries, wait_s=READ_WAIT_S
        )

    async def _handle(self, entry: Entry, in_hand: dict[str, asyncio.Task[None]], left: list[Entry]) -> None:
        try:
            await self.grade_entry(entry)
        except asyncio.CancelledError:
            left.append(entry)
            raise
        except PracticumError as error:
            # not acknowledged: it comes again, and lies with the dead letters after its last delivery
            _log.error("grading.entry_failed", entry_id=entry.entry_id, code=error.code, error=str(error))
        except Exception:  # noqa: BLE001 — a worker outlives any one entry
            _log.exception("grading.entry_crashed", entry_id=entry.entry_id)
        finally:
            in_hand.pop(entry.entry_id, None)

    async def grade_entry(self, entry: Entry) -> None:
        """Grades one entry (or takes its stored grade), publishes it, and acknowledges the entry."""
        request = entry.unpack(reward_pb2.GradeRequest)
        trajectory = trajectory_from_pb(request.trajectory)
        stored = await self.store.find(trajectory.trajectory_id)
        if stored is None:
            graded = await self._grade(request, trajectory)
            stored = await self.store.put(
                StoredGrade(
                    trajectory_id=trajectory.trajectory_id,
                    run_id=trajectory.run_id,
                    task_id=trajectory.task_id,
                    outcome=graded.outcome,
                    grade=graded.grade,
                    created_at=self.clock.now(),
                )
            )
        await self._publish(trajectory, stored, entry.envelope.traceparent)
        # ack after the grade is stored and published: a crash between must redeliver
        await self.queue.ack(GRADING, GROUP, [entry.entry_id])

    async def _grade(self, request: reward_pb2.GradeRequest, trajectory: Trajectory) -> Graded:
        try:
            task = task_from_pb(request.task, self.defaults)
            changes = changes_from_pb(request.diff)
            return await self.grading.grade(trajectory.trajectory_id, task, changes, trajectory.outcome)
        except InvalidInput as error:
            # nobody can grade this task: no reward, but its group must be able to close
            _log.error("grading.bad_task", trajectory_id=trajectory.trajectory_id, error=str(error))
            grade = Grade(reward=None, evidence=(str(error),))
            return Graded(grade=grade, outcome=Outcome.INFRA_FAILED)

    async def _publish(self, trajectory: Trajectory, stored: StoredGrade, traceparent: str) -> None:
        error = trajectory.error
        if stored.outcome is Outcome.INFRA_FAILED and not error:
            error = "; ".join(stored.grade.evidence)[:1000] or "not graded"
        graded = replace(trajectory, grade=stored.grade, outcome=stored.outcome, error=error)
        if trajectory.run_id:  # an evaluation is not trained on
            stream = trajectories(trajectory.run_id)
            await self.queue.publish(stream, trajectory_to_pb(graded), traceparent=traceparent)
        event = events_pb2.TrajectoryGraded(
            trajectory_id=trajectory.trajectory_id,
            episode_id=trajectory.episode_id,
            attempt=trajectory.attempt,
            outcome=outcome_to_pb(stored.outcome),
            grade=grade_to_pb(stored.grade),
        )
        await self.queue.publish(EVENTS, event, traceparent=traceparent)
