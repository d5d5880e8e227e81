"""The record of an attempt in a database that is away for a while."""

from collections.abc import Sequence
from datetime import datetime
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import GRADING
from services.rollout.episode.policy import ScriptedPolicy
from services.rollout.metrics import Metrics
from services.rollout.rpc.sandboxes import ToolCatalogue
from services.rollout.scheduler.runner import EpisodeRunner, Job, Retry
from services.rollout.store.claims import ClaimStore
from services.rollout.store.episodes import Ending, EpisodeStore
from tests.fixtures.chat_models import build_chat
from tests.fixtures.rollout import ManualClock
from tests.fixtures.scripted_engine import turn_ids
from tests.unit.rollout.test_episode_loop import SCHEMAS, TableSandboxes, script, spec_of


class FaultyStore(EpisodeStore):
    """Stores nothing; each write first meets the errors that are left."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.ended: list[Ending] = []
        self.begun: list[int] = []

    async def end(self, ending: Ending, now: datetime) -> bool:
        self._meet()
        self.ended.append(ending)
        return True

    async def next_attempt(self, episode_id: str, attempt: int, now: datetime) -> int | None:
        self._meet()
        self.begun.append(attempt + 1)
        return attempt + 1

    def _meet(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class Tools(ToolCatalogue):
    """The tools of the table."""

    def __init__(self) -> None:
        return

    async def awaited_tools(self) -> Any:
        return SCHEMAS


class EmptySandboxes(TableSandboxes):
    """Sandboxes in which nothing is changed."""

    async def snapshot(self) -> bytes:
        return b""


def away() -> Exception:
    return OperationalError("UPDATE", {}, Exception("database is locked"))


class Owned(ClaimStore):
    """Everything stays this replica's."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    async def give_back(self, episode_ids: Sequence[str]) -> None:
        self.given_back += episode_ids


async def play(store: FaultyStore) -> tuple[EpisodeRunner, MemoryQueue]:
    chat, clock, queue = build_chat(), ManualClock(), MemoryQueue(claim_after_s=1e9)
    runner = EpisodeRunner(
        store=store,
        claims=Owned(),
        queue=queue,
        sandboxes=EmptySandboxes(),
        catalogue=Tools(),
        chat=chat,
        clock=clock,
        random=Random(0),
        retry=Retry(),
        metrics=Metrics(CollectorRegistry()),
    )

    def make_policy() -> ScriptedPolicy:
        return script(chat, turn_ids(chat, ("finish", {})))

    await runner.play(Job(spec=spec_of(), make_policy=make_policy, is_graded=True))
    return runner, queue


async def test_record_when_the_database_is_away_is_written_when_it_is_back() -> None:
    store = FaultyStore(away(), PoolTimeout("no connection"), away())
    runner, queue = await play(store)
    assert [ending.attempt for ending in store.ended] == [2]
    assert (await queue.depth(GRADING, "reward")).undelivered == 1
    assert runner.num_live == 0


async def test_record_when_it_breaks_a_constraint_is_not_written_again() -> None:
    store = FaultyStore(IntegrityError("INSERT", {}, Exception("there already")))
    await play(store)
    assert (store.ended, store.errors) == ([], [])


async def test_record_when_the_database_stays_away_is_given_up() -> None:
    store = FaultyStore(*(away() for _ in range(50)))
    runner, _ = await play(store)
    assert store.ended == []
    assert 0 < len(store.errors) < 50
    assert not runner.is_live("ep_1")
