"""Removes the streams of runs that are over.

A run's own session removes its stream at the end, as well as can be: the queue may be away then, the
process may die first, and grades that were on their way arrive later and begin the stream anew. At the
start every run that is over is gone through, and after that those that ended lately. Removing a stream
that is not there changes nothing, and a run that is over never reads again.
"""

import asyncio
from datetime import datetime, timedelta

from practicum.clock import Clock
from practicum.pauses import pause
from practicum.queue import Queue
from practicum.queue.streams import trajectories as stream_of
from practicum.telemetry.logs import get_logger
from services.trainer.store import TrainerStore

log = get_logger("trainer.sweeper")

EVERY_S = 60.0
LATELY = timedelta(hours=1)  # longer than an episode takes with its grading


class StreamSweeper:
    """Sweeps until the service stops."""

    def __init__(self, store: TrainerStore, queue: Queue, clock: Clock, *, every_s: float = EVERY_S) -> None:
        self._store = store
        self._queue = queue
        self._clock = clock
        self._every_s = every_s

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep at the start and then again and again until `stop` is set."""
        went_through_all = False
        while not stop.is_set():
            try:
                await self.sweep(since=self._clock.now() - LATELY if went_through_all else None)
                went_through_all = True
            except Exception as error:  # noqa: BLE001 — the loop is where every error ends
                log.warning("streams.not_swept", error=str(error))
            await pause(stop, self._every_s)

    async def sweep(self, *, since: datetime | None) -> None:
        """Remove the streams of runs that ended at `since` or later; None = of all that are over."""
        for run_id in await self._store.runs.over(since=since):
            await self._queue.delete(stream_of(run_id))
