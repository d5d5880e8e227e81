"""The replicas of this service: who is alive, and what becomes of those that are not.

A replica says that it lives by counting a number up in SQL. The others watch it on their own monotonic clock,
so that no two machines need agree about the time; who could not look itself judges nobody. A replica that
stands still for too long is removed, and what it owned is free in the same transaction. One that was only
slow finds out at its next beat or write, drops what it plays, and joins again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from practicum.clock import Clock
from practicum.errors import Conflict
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.rollout.store.replicas import Beat, ReplicaStore

log = get_logger("rollout.membership")

_LEAVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """A replica's last beat, and when it was heard first."""

    beat: Beat
    at_s: float


class Membership:
    """This replica among the others."""

    def __init__(
        self,
        store: ReplicaStore,
        *,
        instance: str,
        life: str,
        clock: Clock,
        interval_s: float = 3.0,
        lost_after_s: float = 15.0,
    ) -> None:
        self.instance = instance
        self.came_first = False  # no other replica was there when this one joined
        self.num_live = 1
        self.leads = True  # one of the live replicas does what need not be done by all
        self.on_change: list[Callable[[], None]] = []  # told when a replica came or went
        self.on_lost: list[
            Callable[[], None]
        ] = []  # told when this one was given up: it owns nothing any more
        self._store = store
        self._life = life
        self._clock = clock
        self._interval_s = interval_s
        self._lost_after_s = lost_after_s
        self._num_beats = 0
        self._ended = asyncio.Event()
        self._heard: dict[str, _Heard] = {}
        self._looked_at_s = clock.monotonic()
        self._names: tuple[str, ...] = (instance,)

    @property
    def is_alone(self) -> bool:
        """Whether no other replica was alive at the last look."""
        return self.num_live == 1

    def share(self, number: int) -> int:
        """How much of a number of things one replica takes at a time, rounded up."""
        return -(-number // self.num_live)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Be a member for the length of a block, or until `leave`."""
        await self.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._go_on(), name="membership")
            try:
                yield
            finally:
                self._ended.set()  # not cancelled: a beat under way comes to its end

    async def leave(self) -> None:
        """Free everything that is still owned, once nothing is played any more.

        Where that takes too long, it is free when the others find this replica gone, or at its next start.
        """
        self._ended.set()
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                await self._store.remove(self._beat(), as_heard=False)
        except (TimeoutError, SQLAlchemyError) as error:
            log.warning("membership.not_left", error=type(error).__name__)

    async def join(self) -> None:
        """Begin this life; what an earlier one of this name owned is free."""
        self.came_first = await self._store.join(self._beat(), self._clock.now())
        await self.round()

    async def _go_on(self) -> None:
        while True:
            await pause(self._ended, self._interval_s)
            if self._ended.is_set():
                return
            try:
                await self.round()
            except SQLAlchemyError as error:
                self._heard.clear()
                log.warning("membership.not_heard", error=type(error).__name__)

    async def round(self) -> None:
        """One beat, and a look at the others. Raises `Conflict` where another process has this one's name."""
        self._num_beats += 1
        found = {beat.instance: beat for beat in await self._store.beat(self._beat())}
        mine = found.pop(self.instance, None)
        if self._ended.is_set():
            return
        if mine is None:
            log.warning("membership.given_up", instance=self.instance)
            for tell in self.on_lost:
                tell()
            await self._store.join(self._beat(), self._clock.now())
        elif mine.life != self._life:
            raise Conflict(
                f"another process runs as {self.instance!r}; give each its own PRACTICUM_ROLLOUT_INSTANCE"
            )
        now_s = self._clock.monotonic()
        if now_s - self._looked_at_s > self._lost_after_s / 2:
            self._heard.clear()  # this process stood still itself
        self._looked_at_s = now_s
        self._heard = {name: heard for name, heard in self._heard.items() if name in found}
        for name, beat in list(found.items()):
            heard = self._heard.get(name)
            if heard is None or heard.beat != beat:
                self._heard[name] = _Heard(beat=beat, at_s=now_s)
            elif now_s - heard.at_s >= self._lost_after_s:
                if await self._store.remove(beat, as_heard=True):
                    log.warning("membership.removed", instance=name, silent_s=round(now_s - heard.at_s, 1))
                del found[name]
        self._note(tuple(sorted([self.instance, *found])))

    def _note(self, names: tuple[str, ...]) -> None:
        self.num_live = len(names)
        self.leads = names[0] == self.instance
        if names != self._names:
            log.info("membership.changed", replicas=list(names))
            self._names = names
            for tell in self.on_change:
                tell()

    def _beat(self) -> Beat:
        return Beat(instance=self.instance, life=self._life, num_beats=self._num_beats)
