"""The round that evaluations and demonstrations share: what SQL says is open is played, each in one task.

Whichever replica was asked, every replica looks; what each of them plays of it is claimed (see `claiming`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from practicum.telemetry.logs import get_logger
from services.rollout.metrics import Metrics
from services.rollout.scheduler.crew import Crew

T = TypeVar("T")

_LOOK_S = 1.0  # for what was asked of another replica


class OpenWork(Generic[T]):
    """Open things of one kind; `play` goes on until one is complete, and its episodes join the crew."""

    def __init__(
        self,
        kind: str,
        *,
        find: Callable[[], Awaitable[Sequence[T]]],
        id_of: Callable[[T], str],
        play: Callable[[T, Crew], Awaitable[None]],
        metrics: Metrics,
    ) -> None:
        self._kind = kind
        self._find = find
        self._id_of = id_of
        self._play = play
        self._metrics = metrics
        self._log = get_logger(f"rollout.{kind}")
        self._wake = asyncio.Event()  # set when one was stored
        self._playing: set[str] = set()

    def look_now(self) -> None:
        """Play what was stored since the last look."""
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end; the rest is left to whoever comes."""
        async with Crew() as crew:
            while not stop.is_set():
                try:
                    for one in await self._find():
                        if self._id_of(one) not in self._playing:
                            self._playing.add(self._id_of(one))
                            crew.start(self._play_one(one, crew))
                except Exception:  # noqa: BLE001 — the worker outlives any look
                    self._log.exception(f"{self._kind}s.failed")
                    self._metrics.errors.labels(self._kind).inc()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                self._wake.clear()
            await crew.finish()

    async def _play_one(self, one: T, crew: Crew) -> None:
        """Until it is complete, or something breaks: then the next look takes it up, and its plays go on."""
        try:
            await self._play(one, crew)
        except Exception:  # noqa: BLE001 — the worker outlives any one of them
            self._log.exception(f"{self._kind}.failed", **{f"{self._kind}_id": self._id_of(one)})
            self._metrics.errors.labels(self._kind).inc()
        finally:
            self._playing.discard(self._id_of(one))
