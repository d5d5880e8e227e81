"""Facts that other services may follow, told as well as can be: SQL is the truth, this is news."""

from google.protobuf.message import Message

from practicum.errors import QueueError
from practicum.queue import Queue
from practicum.queue.streams import EVENTS
from practicum.telemetry.logs import get_logger
from practicum.v1 import events_pb2 as pb
from services.trainer.spec import RunState

log = get_logger("trainer.events")


class Events:
    """Tells what happened to runs."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def run_changed(self, run_id: str, state: RunState) -> None:
        """A run is in another state."""
        await self._tell(pb.RunChanged(run_id=run_id, state=state.value))

    async def step_committed(self, run_id: str, step: int) -> None:
        """A step is durable."""
        await self._tell(pb.StepCommitted(run_id=run_id, step=step, weight_version=step))

    async def version_published(self, run_id: str, weight_version: int) -> None:
        """Every engine serves a version."""
        await self._tell(pb.VersionPublished(run_id=run_id, weight_version=weight_version))

    async def _tell(self, message: Message) -> None:
        try:
            await self._queue.publish(EVENTS, message)
        except QueueError as error:
            # Who missed it asks for the run.
            log.warning("event.not_told", type=message.DESCRIPTOR.full_name, error=str(error))
