"""The trainer's loop: one run at a time, in the order in which they came.

A run that was running when the process died is taken up first, by itself, from its last committed
step. What a session raises is judged here and nowhere else: a dependency that is away is waited for
without end, a run that cannot be is failed at once, and anything else is tried again from the last
committed step until the attempts are spent. Committing a step renews them.
"""

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError

from practicum.errors import Conflict, InvalidInput, PracticumError, QueueError, first_error
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Trajectory
from services.trainer.progress import Phase
from services.trainer.session import NothingToTrain, RunSession, SessionParts
from services.trainer.spec import RunState
from services.trainer.store.records import RunRecord

log = get_logger("trainer.worker")

MAX_RETRY_S = 30.0
IDLE_POLL_S = 2.0


class TrainerWorker:
    """Runs sessions until the service stops."""

    def __init__(
        self, parts: SessionParts, *, attempts: int, cancel_episodes: Callable[[str], Awaitable[None]]
    ) -> None:
        self._parts = parts
        self._attempts = attempts
        self._cancel_episodes = cancel_episodes
        self._session: RunSession | None = None
        self._changed = asyncio.Event()
        self._ready: set[str] = set()  # held runs that are loaded and, where there is anyone to serve, served

    def wake(self) -> None:
        """A run was made or resumed: look at once."""
        self._changed.set()

    def find(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory that is held for a step to come; None where there is none."""
        if self._session is None or self._session.intake is None:
            return None
        return self._session.intake.find(trajectory_id)

    async def run(self, stop: asyncio.Event) -> None:
        """Train runs until `stop` is set."""
        tries = _Tries(self._parts.first_retry_s)
        while not stop.is_set():
            run: RunRecord | None = None
            try:
                run = await self._parts.store.runs.claim_next() or await self._next_to_make_ready()
                # A run that failed after its end is never taken up again, and would stay on the board.
                self._parts.progress.keep_only(None if run is None else run.run_id)
                if run is None:
                    await self._idle(stop)
                    continue
                tries.begin(run)
                if run.state is RunState.PAUSED:
                    await self._make_ready(run, stop)
                else:
                    await self._train(run, stop)
                tries.succeed()
            except Exception as raised:  # the loop is where every error ends, and it logs and counts
                error = first_error(raised)
                wait_s = tries.fail(is_outage=_is_outage(error))
                run_id = "" if run is None else run.run_id
                if run is not None and await self._give_up(run_id, error, tries.num_failed):
                    continue
                log.warning("session.failed", run_id=run_id, attempt=tries.num_failed, exc_info=error)
                self._parts.progress.enter(run_id, Phase.RETRYING, problem=str(error))
                await pause(stop, wait_s)

    async def _train(self, run: RunRecord, stop: asyncio.Event) -> None:
        log.info("run.started", run_id=run.run_id, weight_version=run.weight_version)
        await self._parts.events.run_changed(run.run_id, run.state)
        self._session = RunSession(self._parts, run)
        try:
            await self._session.train(stop)
        except Conflict:
            # A caller changed the run while it was being opened; otherwise it is an error like any other.
            if (await self._parts.store.runs.get(run.run_id)).state is RunState.RUNNING:
                raise
        finally:
            intake, self._session = self._session.intake, None
        self._parts.progress.leave(run.run_id)
        state = (await self._parts.store.runs.get(run.run_id)).state
        log.info("run.left", run_id=run.run_id, state=state)
        if state is not RunState.RUNNING:
            await self._parts.events.run_changed(run.run_id, state)
        if state is RunState.STOPPED:
            await self._cancel_episodes(run.run_id)
            if intake is not None:
                await intake.drop_all()

    async def _next_to_make_ready(self) -> RunRecord | None:
        """A run that asked to be held at its start; only while nobody trains, since it takes the engines."""
        waiting = await self._parts.store.runs.not_ready()
        asked = (run for run in waiting if run.spec.start_paused and run.run_id not in self._ready)
        return next(asked, None)

    async def _make_ready(self, run: RunRecord, stop: asyncio.Event) -> None:
        log.info("run.making_ready", run_id=run.run_id)
        if await RunSession(self._parts, run).make_ready(stop):
            self._ready.add(run.run_id)
        self._parts.progress.leave(run.run_id)

    async def _give_up(self, run_id: str, error: Exception, num_failures: int) -> bool:
        """Fail the run where trying again is no use; True where it was failed."""
        hopeless = isinstance(error, InvalidInput | NothingToTrain)
        if _is_outage(error) or (not hopeless and num_failures < self._attempts):
            return False
        reason = str(error) if isinstance(error, PracticumError) else f"{type(error).__name__}: {error}"
        log.error("run.failed", run_id=run_id, reason=reason, attempts=num_failures, exc_info=error)
        try:
            await self._parts.store.runs.change_state(
                run_id, RunState.FAILED, allowed={RunState.RUNNING, RunState.PAUSED}, error=reason
            )
            await self._parts.events.run_changed(run_id, RunState.FAILED)
        except Conflict:
            log.info("run.over_already", run_id=run_id)
        except DBAPIError:
            return False
        self._parts.progress.leave(run_id)
        return True

    async def _idle(self, stop: asyncio.Event) -> None:
        """Wait until a run is made, the service stops, or it is time to look again."""
        stopping = asyncio.ensure_future(stop.wait())
        changed = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait({stopping, changed}, timeout=IDLE_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        changed.cancel()
        self._changed.clear()


class _Tries:
    """How often the present run failed since it last moved, and how long to wait before the next try."""

    def __init__(self, first_wait_s: float) -> None:
        self.num_failed = 0
        self._first_wait_s = first_wait_s
        self._wait_s = first_wait_s
        self._at: tuple[str, int] | None = None  # None = nothing was tried yet

    def begin(self, run: RunRecord) -> None:
        """A run is tried; one that moved since it failed has all its tries again."""
        if self._at != (run.run_id, run.weight_version):
            self._at = (run.run_id, run.weight_version)
            self.succeed()

    def succeed(self) -> None:
        """Nothing is wrong any more."""
        self.num_failed, self._wait_s = 0, self._first_wait_s

    def fail(self, *, is_outage: bool) -> float:
        """Count a failure, an outage aside; the seconds to wait."""
        self.num_failed += not is_outage
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, MAX_RETRY_S)
        return wait_s


def _is_outage(error: Exception) -> bool:
    """True where a dependency is away: waiting mends it, failing the run does not."""
    if isinstance(error, QueueError):
        return True
    if isinstance(error, IntegrityError):
        return False
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | InterfaceError | ConnectionError)
