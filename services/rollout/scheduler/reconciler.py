"""Sends again what SQL says is owed: SQL is the truth, the streams are transport.

Three debts are settled. An episode that waits for its grade although nothing waits in the grading stream is
published there again. An ended episode that the trainer was not sent is sent. A run that makes no progress
although all its groups have ended (the trajectory stream was lost) has its latest groups sent again. Every
receiver knows trajectories by their id, so sending twice costs work and changes nothing. A debt is claimed
before it is settled, so that replicas share them; what only one need do, the leading replica does.
"""

import asyncio
from collections.abc import Awaitable
from datetime import timedelta

from practicum.clock import Clock
from practicum.errors import PracticumError, QueueError
from practicum.pauses import pause
from practicum.queue.base import Queue
from practicum.queue.streams import EVENTS, GRADING, trajectories
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Outcome, SamplingParams
from practicum.v1.trajectory_pb2 import Trajectory
from practicum.wire import outcome_to_pb, trajectory_from_pb, trajectory_to_pb
from services.rollout.chat import ChatTemplate
from services.rollout.episode.loop import EpisodeSpec, unplayed
from services.rollout.metrics import Metrics
from services.rollout.rpc.taskspec import grade_request
from services.rollout.scheduler.follower import RunFollower
from services.rollout.scheduler.membership import Membership
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.scheduler.selection import TaskShelf
from services.rollout.store.episodes import EpisodeState, EpisodeStore, StoredEpisode

log = get_logger("rollout.reconciler")

REWARD_GROUP = "reward"
_BATCH = 64
_TRIM_EVERY_S = 30.0
_ORPHAN_AFTER_S = 60.0
_LOOK_FOR_ORPHANS_EVERY_S = 15.0


class Reconciler:
    """The worker that settles debts, and the one way in which an ended episode is sent late."""

    def __init__(
        self,
        *,
        store: EpisodeStore,
        shelf: TaskShelf,
        queue: Queue,
        runner: EpisodeRunner,
        follower: RunFollower,
        membership: Membership,
        chat: ChatTemplate,
        metrics: Metrics,
        clock: Clock,
        overdue_after_s: float = 60.0,
        stalled_after_s: float = 120.0,
        interval_s: float = 2.0,
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._queue = queue
        self._runner = runner
        self._follower = follower
        self._membership = membership
        self._chat = chat
        self._metrics = metrics
        self._clock = clock
        self._overdue_after_s = overdue_after_s
        self._stalled_after_s = stalled_after_s
        self._interval_s = interval_s
        self._trimmed_at_s = self._orphans_at_s = clock.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`."""
        while not stop.is_set():
            try:
                await self.round()
            except PracticumError as error:
                log.warning("reconciler.waiting", error=f"{error.code}: {error}")
            except Exception:
                log.exception("reconciler.failed")
                self._metrics.errors.labels("reconciler").inc()
            await pause(stop, self._interval_s)
        await self._runner.flush_sent()

    async def round(self) -> None:
        """One look at everything."""
        await self._trim()  # first: a stream at its bound takes nothing of what follows
        await self._runner.flush_sent()
        await self.settle_overdue()
        await self._free_orphans()
        if not self._membership.is_alone:
            await self._runner.drop_lost()
        if self._membership.leads:
            for run, first_index in await self._follower.stalled(self._stalled_after_s):
                await self._send_again(run.run_id, first_index)

    async def _free_orphans(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._orphans_at_s < _LOOK_FOR_ORPHANS_EVERY_S:
            return
        self._orphans_at_s = now_s
        if await self._runner.free_orphans(before=self._clock.now() - timedelta(seconds=_ORPHAN_AFTER_S)):
            self._follower.look_for_unowned()

    async def _trim(self) -> None:
        if not self._membership.leads or self._clock.monotonic() - self._trimmed_at_s <= _TRIM_EVERY_S:
            return
        self._trimmed_at_s = self._clock.monotonic()
        try:
            for stream in (GRADING, EVENTS):
                await self._queue.trim(stream)
        except QueueError as error:
            log.warning("reconciler.not_trimmed", error=str(error))

    async def settle_overdue(self) -> int:
        """Send what has been owed for too long; the number of episodes.

        One that cannot be sent holds up no other: it comes again after the time of the rest.
        """
        now = self._clock.now()
        before = now - timedelta(seconds=self._overdue_after_s)
        overdue = await self._store.overdue(before=before, limit=_BATCH)
        if not overdue:
            return 0
        depth = await self._queue.depth(GRADING, REWARD_GROUP)
        is_backed_up = depth.undelivered + depth.pending > 0
        # One in grading may well be on its way while others are.
        due = {
            episode.episode_id: episode
            for episode in overdue
            if not (episode.state is EpisodeState.GRADING and is_backed_up)
        }
        num_settled = 0
        for episode_id in await self._store.claim_overdue(list(due), before=before, now=now):
            num_settled += await self._try(episode_id, self.send(due[episode_id]))
        return num_settled

    async def _try(self, episode_id: str, sending: Awaitable[None]) -> bool:
        try:
            await sending
        except PracticumError as error:
            log.warning("reconciler.not_sent", episode_id=episode_id, error=f"{error.code}: {error}")
            return False
        except Exception:
            log.exception("reconciler.not_sent", episode_id=episode_id)
            self._metrics.errors.labels("reconciler").inc()
            return False
        return True

    async def cancel(self, episode_id: str) -> StoredEpisode:
        """End one open episode; its group is told. `NotFound`; `Conflict` where it has ended."""
        episode = await self._store.cancel(episode_id, self._clock.now())
        self._runner.interrupt(episode_id)
        if episode.run_id and episode.num_turns == 0:
            await self.send(episode)
        return episode

    async def send(self, episode: StoredEpisode) -> None:
        """Send an episode to whoever waits for it. `QueueError` where it cannot be sent now."""
        if episode.state is EpisodeState.CANCELLED:
            message = await self._cancelled(episode)
        else:
            stored = await self._store.trajectory(episode.episode_id, episode.attempt)
            if stored is None:
                return
            message = Trajectory.FromString(stored[0])
            if episode.state is EpisodeState.GRADING:
                task = await self._shelf.get(episode.task_id)
                request = grade_request(trajectory_from_pb(message), task, stored[1])
                await self._queue.publish(GRADING, request)
                self._metrics.republished.inc()
                return
        await self._queue.publish(trajectories(episode.run_id), message)
        self._metrics.republished.inc()
        await self._store.mark_sent([episode.episode_id])

    async def _send_again(self, run_id: str, first_group_index: int) -> None:
        members = await self._store.ended_since(run_id, first_group_index)
        log.warning("run.stalled", run_id=run_id, sent_again=len(members))
        for episode in members:
            await self._try(episode.episode_id, self._send_ended(episode))

    async def _send_ended(self, episode: StoredEpisode) -> None:
        if episode.state is EpisodeState.CANCELLED:
            message = await self._cancelled(episode)
        else:
            stored = await self._store.trajectory(episode.episode_id, episode.attempt)
            if stored is None or episode.outcome is None:
                return
            message = Trajectory.FromString(stored[0])
            message.outcome = outcome_to_pb(episode.outcome)
            if episode.grade is not None:
                message.grade.ParseFromString(episode.grade)
        await self._queue.publish(trajectories(episode.run_id), message)
        self._metrics.republished.inc()

    async def _cancelled(self, episode: StoredEpisode) -> Trajectory:
        spec = EpisodeSpec(
            episode_id=episode.episode_id,
            attempt=max(1, episode.attempt),  # one that nobody began ends as its first
            run_id=episode.run_id,
            group_id=episode.group_id,
            group_index=episode.group_index,
            group_size=episode.group_size,
            task=await self._shelf.get(episode.task_id),
            sampling=SamplingParams(),
            max_turns=0,
            max_tokens=0,
            wall_s=0.0,
        )
        record = unplayed(
            spec, outcome=Outcome.CANCELLED, error="cancelled", chat=self._chat, clock=self._clock
        )
        return trajectory_to_pb(record.trajectory)
