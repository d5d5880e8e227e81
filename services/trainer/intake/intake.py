"""From the stream to complete groups: the trainer's one reader of trajectories.

Owns reading, verification, quarantine, and which stream entries are owed. An entry is acknowledged
when it can never be needed again: with the committed step that took its group, or at once where it
is a repeat, a superseded attempt, or has no place in any group. Everything else stays pending under
this consumer's name, which is how a restart finds it.

A trajectory that must not be trained is set aside but still fills its place, so that its group can
close; its entry stays owed with the group, and a restart sets it aside again, which changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import Message

from practicum.clock import Clock
from practicum.errors import IntakeError, QueueError
from practicum.ids import new_id
from practicum.queue import Entry, Queue
from practicum.queue.streams import trajectories as stream_of
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Trajectory
from practicum.v1 import trajectory_pb2 as pb
from practicum.wire import trajectory_from_pb
from services.trainer.intake.groups import Admission, Arrival, Group, GroupAssembler
from services.trainer.intake.verify import UNGRADED_OUTCOMES, Expectations, check_address, check_content
from services.trainer.metrics import TrainerMetrics
from services.trainer.store import TrainerStore
from services.trainer.store.records import QuarantineRecord

log = get_logger("trainer.intake")

CONSUMER_GROUP = "trainer"
MAX_ENTRIES_A_READ = 64
KEPT_PAYLOAD_BYTES = 4 * 1024 * 1024


class Intake:
    """Reads one run's stream and assembles its groups."""

    def __init__(
        self,
        *,
        queue: Queue,
        store: TrainerStore,
        metrics: TrainerMetrics,
        clock: Clock,
        consumer: str,
        expected: Expectations,
    ) -> None:
        self._queue = queue
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._consumer = consumer
        self._expected = expected
        self._stream = stream_of(expected.run_id)
        self._assembler = GroupAssembler(expected.group_size)
        self._done: list[str] = []  # entries of committed steps that are not acknowledged yet
        self.weight_version = 0  # the newest committed version; nothing was sampled by a later one

    async def recover(self, weight_version: int) -> int:
        """Start from what SQL and the stream hold; the number of entries that were owed."""
        self.weight_version = weight_version
        consumed = await self._store.runs.consumed(self._expected.run_id)
        self._assembler = GroupAssembler(
            self._expected.group_size,
            consumed_attempts=consumed.attempts,
            consumed_groups=consumed.group_ids,
        )
        await self._queue.ensure_group(self._stream, CONSUMER_GROUP)
        owed = await self._queue.read_own_pending(self._stream, CONSUMER_GROUP, self._consumer)
        for entry in owed:
            await self._take_in(entry)
        return len(owed)

    async def poll(self, wait_s: float) -> int:
        """Take in what is there, waiting up to `wait_s` for the first entry; the number of entries."""
        entries = await self._queue.read(
            self._stream, CONSUMER_GROUP, self._consumer, max_entries=MAX_ENTRIES_A_READ, wait_s=wait_s
        )
        for entry in entries:
            await self._take_in(entry)
        return len(entries)

    def take(self, num_groups: int) -> tuple[Group, ...]:
        """The first complete groups; () where there are fewer than `num_groups`."""
        return self._assembler.take(num_groups)

    @property
    def num_complete(self) -> int:
        """Complete groups that wait for a step."""
        return self._assembler.num_complete

    @property
    def num_partial(self) -> int:
        """Groups that wait for an episode."""
        return self._assembler.num_partial

    def find(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory that is held and not trained yet."""
        return self._assembler.find(trajectory_id)

    async def acknowledge(self, groups: Sequence[Group]) -> None:
        """Release the entries of groups whose step is committed, and what the stream holds of them."""
        self._done.extend(entry_id for group in groups for entry_id in group.entry_ids)
        try:
            await self._queue.ack(self._stream, CONSUMER_GROUP, self._done)
            self._done.clear()
            await self._queue.trim(self._stream)
        except QueueError as error:
            # The step is committed whatever the queue says; the next step, or a restart, tries again.
            log.warning("entries.not_acknowledged", run_id=self._expected.run_id, error=str(error))

    async def drop_all(self) -> None:
        """Remove the stream of a run that is over, as well as can be: the sweeper removes what is left."""
        try:
            await self._queue.delete(self._stream)
        except QueueError as error:
            log.warning("stream.not_removed", run_id=self._expected.run_id, error=str(error))

    async def _take_in(self, entry: Entry) -> None:
        trajectory, complaint = _read(entry)
        if trajectory is not None and complaint is None:
            complaint = self._complaint_about(trajectory)
        if trajectory is None or (complaint is not None and not self._has_place(trajectory)):
            assert complaint is not None
            await self._set_aside(entry, trajectory, complaint)
            await self._release([entry.entry_id])
            return
        if complaint is not None:
            await self._set_aside(entry, trajectory, complaint)
        usable = complaint is None and trajectory.outcome not in UNGRADED_OUTCOMES
        arrival = Arrival(
            trajectory=trajectory,
            entry_ids=(entry.entry_id,),
            usable=usable,
            quarantined=complaint is not None,
        )
        await self._admit(entry, arrival)

    def _has_place(self, trajectory: Trajectory) -> bool:
        try:
            check_address(trajectory, self._expected)
        except IntakeError:
            return False
        return True

    def _complaint_about(self, trajectory: Trajectory) -> IntakeError | None:
        try:
            check_address(trajectory, self._expected)
            check_content(trajectory, self._expected, weight_version=self.weight_version)
        except IntakeError as error:
            return error
        return None

    async def _admit(self, entry: Entry, arrival: Arrival) -> None:
        try:
            verdict = self._assembler.add(arrival)
        except IntakeError as error:
            await self._set_aside(entry, arrival.trajectory, error)
            await self._release([entry.entry_id])
            return
        match verdict.admission:
            case Admission.ACCEPTED:
                result = "accepted" if arrival.usable else "unusable"
            case Admission.DUPLICATE:
                result = "duplicate"
                if verdict.released_entry_ids:
                    await self._store.runs.count_refused(self._expected.run_id, duplicates=1)
            case Admission.SUPERSEDED:
                result = "superseded"
                await self._store.runs.count_refused(self._expected.run_id, superseded=1)
            case Admission.CONSUMED:
                # A crash between commit and acknowledgement, or a producer that sent it again.
                result = "consumed"
        self._metrics.trajectories.labels(result=result).inc()
        log.debug(
            "trajectory.taken_in",
            run_id=self._expected.run_id,
            trajectory_id=arrival.trajectory.trajectory_id,
            result=result,
        )
        await self._release(verdict.released_entry_ids)

    async def _set_aside(self, entry: Entry, trajectory: Trajectory | None, complaint: IntakeError) -> None:
        payload = _payload_of(entry)
        record = QuarantineRecord(
            quarantine_id=new_id("quar"),
            run_id=self._expected.run_id,
            event_id=_storable(entry.envelope.event_id, 64) or entry.entry_id,
            trajectory_id=_storable(trajectory.trajectory_id, 160) if trajectory else "",
            episode_id=_storable(trajectory.episode_id, 128) if trajectory else "",
            group_id=_storable(trajectory.group_id, 128) if trajectory else "",
            reason=complaint.reason,
            message=_storable(str(complaint), 2000),
            created_at=self._clock.now(),
        )
        if await self._store.quarantine.add(record, payload):
            self._metrics.quarantined.labels(reason=complaint.reason).inc()
            log.warning(
                "trajectory.quarantined",
                run_id=record.run_id,
                trajectory_id=record.trajectory_id,
                reason=record.reason,
                message=record.message,
            )

    async def _release(self, entry_ids: Sequence[str]) -> None:
        if entry_ids:
            await self._queue.ack(self._stream, CONSUMER_GROUP, entry_ids)


def _read(entry: Entry) -> tuple[Trajectory | None, IntakeError | None]:
    """The trajectory of an entry and what is wrong with it; without rows where only those are broken."""
    try:
        message = entry.unpack(pb.Trajectory)
    except IntakeError as error:
        return None, error
    try:
        return trajectory_from_pb(message), None
    except (IntakeError, ValueError, OverflowError) as error:
        complaint = error if isinstance(error, IntakeError) else IntakeError("unreadable", str(error))
    # What names its place may still be readable, and its group waits for it.
    frame = pb.Trajectory()
    frame.CopyFrom(message)
    for name in ("rows", "turns", "grade", "created_at", "finished_at"):
        frame.ClearField(name)
    frame.outcome = pb.OUTCOME_INFRA_FAILED
    return replace(trajectory_from_pb(frame), error="unreadable"), complaint


def _payload_of(entry: Entry) -> bytes | None:
    """The serialised trajectory, for whoever wants to look; None where it is too large or unreadable."""
    try:
        message: Message = entry.unpack(pb.Trajectory)
    except IntakeError:
        return None
    payload = message.SerializeToString()
    return payload if len(payload) <= KEPT_PAYLOAD_BYTES else None


def _storable(text: str, longest: int) -> str:
    """The text as every database takes it."""
    return text.replace("\x00", "�")[:longest]
